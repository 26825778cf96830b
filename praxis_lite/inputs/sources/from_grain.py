"""Batches of a Grain dataset that a function of the user's makes."""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.base import (
    IndexedPipeline,
    InputPipeline,
    ReplayedPipeline,
    described,
    digest_of,
    spec_of_rows,
    zero_rows,
)
from praxis_lite.inputs.batch_arrays import stacked

if TYPE_CHECKING:
    import jax

_NUM_HASHED = 2  # Batches, in the fingerprint.


class _OfGrain(InputPipeline):
    """The shared part of both pipelines: the function's dataset, and batches of its elements."""

    make_dataset: Callable[[], Any]
    batch_size: int
    _KIND = ""
    _INSTEAD = ""

    def check(self) -> None:
        super().check()
        self.element_spec()

    @functools.cached_property
    def dataset(self) -> Any:
        """The function's dataset. Raises ConfigError if it is no dataset of the right kind."""
        made = self.make_dataset()
        if not isinstance(made, getattr(optional_module("grain", type(self).__name__), self._KIND)):
            raise ConfigError(
                f"{type(self).__name__}: {self._name} returns a {type(made).__name__}; a "
                f"grain.{self._KIND} was wanted. {self._INSTEAD}"
            )
        return made

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of_rows(self._first_batch, self.batch_size)

    @functools.cached_property
    def _first_batch(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _batch(self, elements: list[Any], num_rows: int) -> dict[str, np.ndarray]:
        return stacked(type(self).__name__, self._name, elements, num_rows)

    def fingerprint(self) -> dict[str, Any]:
        first = itertools.islice(self.batches(), _NUM_HASHED)
        return self.settings_fingerprint("batch_size", "num_batches") | {
            "make_dataset": described(self.make_dataset), "first_batches_sha256": digest_of(first),
        }

    @property
    def _name(self) -> str:
        return function_name(self.make_dataset)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process makes the dataset anew.
        result = ("dataset", "_first_batch")
        return {name: value for name, value in vars(self).items() if name not in result}


class FromGrain(_OfGrain, IndexedPipeline):
    """Batches of a grain.MapDataset that a function of yours makes, from dicts of arrays.

    Any element is found by its index, so a job resumes at its batch at once, each host makes its
    own rows alone, and `WithWorkers` and `Mixture` take it. Shuffle and repeat in the function:
    `.seed(0).shuffle().repeat()` has no end, for training; without repeat it is one pass. Elements
    are examples, not batches. A filter leaves holes among the indices: filter the source, or see
    `FromGrainIter`.

    `weights` of ones are added if there are none, a weight per label or else per row; numbers of
    64 bits become 32; a last batch that is not full ends in zero rows. The fingerprint has the
    function's full name, its arguments, the settings, and a hash of the first two batches.

    Args:
        make_dataset: importable; returns the dataset. Configure it as
            `fdl.Partial(make_dataset, split="train")`.
        batch_size: rows of the global batch.
    """

    _KIND = "MapDataset"
    _INSTEAD = "FromGrainIter takes an IterDataset; FromDataset takes a tf.data.Dataset."

    def __init__(self, make_dataset: "Callable[[], Any]", batch_size: int):
        self.make_dataset, self.batch_size = make_dataset, batch_size

    def check(self) -> None:
        if len(self.dataset) == 0:
            raise ConfigError(
                f"FromGrain: {self._name} has 0 elements; expected at least one. Make it of more "
                "data, or filter less."
            )
        super().check()

    @property
    def num_batches(self) -> int | None:
        # Grain gives a dataset that repeats for ever the largest length that Python has.
        length = len(self.dataset)
        return None if length == sys.maxsize else -(-length // self.batch_size)

    @functools.cached_property
    def _first_batch(self) -> dict[str, np.ndarray]:
        return self._batch([self._element(0)], 1)

    def _element(self, index: int) -> Any:
        element = self.dataset[index]
        if element is None:
            raise ConfigError(
                f"FromGrain: element {index} of {self._name} is filtered out, so which element "
                "comes next is not known without reading on. Filter the source instead, or end "
                "the function with .to_iter_dataset() and use FromGrainIter."
            )
        return element

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first = index * self.batch_size + rows.start
        stop = min(index * self.batch_size + rows.stop, len(self.dataset))
        elements = [self._element(place) for place in range(first, stop)]
        if elements:
            return self._batch(elements, rows.stop - rows.start)
        return zero_rows(self._first_batch, rows.stop - rows.start)


class FromGrainIter(_OfGrain, ReplayedPipeline):
    """Batches of a grain.IterDataset that a function of yours makes, from dicts of arrays.

    An IterDataset gives its elements only in order: batch k is found by reading on from the first.
    A job that resumes at step k first makes k batches (a line says so), and every process makes the
    whole batch and takes its rows. `FromGrain` needs neither. Otherwise as `FromGrain`.

    Args:
        make_dataset: importable; returns the dataset, of examples.
        batch_size: rows of the global batch.
        num_batches: of one pass, of which the last may lack rows. None: without end, for training.
    """

    num_batches: int | None = None
    _KIND = "IterDataset"
    _INSTEAD = "FromGrain takes a MapDataset; FromDataset takes a tf.data.Dataset."

    def __init__(
        self, make_dataset: "Callable[[], Any]", batch_size: int, num_batches: int | None = None
    ):
        self.make_dataset, self.batch_size = make_dataset, batch_size
        self.num_batches = num_batches

    def check(self) -> None:
        if self.num_batches is not None:
            self.require_at_least(1, "num_batches")
        super().check()

    @functools.cached_property
    def _first_batch(self) -> dict[str, np.ndarray]:
        first = list(itertools.islice(iter(self.dataset), 1))
        if not first:
            raise ConfigError(
                f"FromGrainIter: {self._name} has 0 elements; expected at least one. Make it of "
                "more data, or filter less."
            )
        return self._batch(first, 1)

    def batches_from(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        elements = itertools.islice(iter(self.dataset), start * self.batch_size, None)
        end = self.num_batches
        expected = itertools.count(start) if end is None else range(start, end)
        for index in expected:
            actual = list(itertools.islice(elements, self.batch_size))
            is_last = end is not None and index + 1 == end
            if not actual or (len(actual) < self.batch_size and not is_last):
                has = f"has {end} batches, as num_batches says"
                wants = "repeats without end" if end is None else has
                raise ConfigError(
                    f"FromGrainIter: {self._name} ended in batch {index}; expected a dataset that "
                    f"{wants}. Add .repeat(), or change num_batches."
                )
            yield {name: x[rows] for name, x in self._batch(actual, self.batch_size).items()}
