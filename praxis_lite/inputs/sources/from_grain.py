"""Reads batches from a Grain dataset that a user-defined function returns."""

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
    SequentialPipeline,
    batches_sha256,
    fingerprint_json,
    spec_of_rows,
    zero_rows,
)
from praxis_lite.inputs.batch_arrays import stack_examples

if TYPE_CHECKING:
    import jax

_NUM_HASHED_BATCHES = 2  # The fingerprint contains a hash of this many batches.


class _GrainPipeline(InputPipeline):
    """Base class of pipelines over a Grain dataset of the class grain.<_DATASET_CLASS>."""

    make_dataset: Callable[[], Any]
    batch_size: int
    _DATASET_CLASS = ""
    _ALTERNATIVES = ""  # Advice for the error message if the dataset has a different class.

    def check(self) -> None:
        super().check()
        self.element_spec()

    @functools.cached_property
    def dataset(self) -> Any:
        """The user's dataset. Raises ConfigError if the dataset has an unexpected class."""
        dataset = self.make_dataset()
        grain = optional_module("grain", type(self).__name__)
        if not isinstance(dataset, getattr(grain, self._DATASET_CLASS)):
            raise ConfigError(
                f"{type(self).__name__}: {self._name} returns a {type(dataset).__name__}; expected "
                f"a grain.{self._DATASET_CLASS}. {self._ALTERNATIVES}"
            )
        return dataset

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of_rows(self._first_batch, self.batch_size)

    @functools.cached_property
    def _first_batch(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _batch(self, elements: list[Any], num_rows: int) -> dict[str, np.ndarray]:
        return stack_examples(type(self).__name__, self._name, elements, num_rows)

    def fingerprint(self) -> dict[str, Any]:
        first_batches = itertools.islice(self.batches(), _NUM_HASHED_BATCHES)
        return self.settings_fingerprint("batch_size", "num_batches") | {
            "make_dataset": fingerprint_json(self.make_dataset),
            "first_batches_sha256": batches_sha256(first_batches),
        }

    @property
    def _name(self) -> str:
        return function_name(self.make_dataset)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process builds the dataset again.
        recomputed = ("dataset", "_first_batch")
        return {name: value for name, value in vars(self).items() if name not in recomputed}


class FromGrain(_GrainPipeline, IndexedPipeline):
    """Batches from a user-defined function that returns a grain.MapDataset of dicts of arrays.

    A MapDataset has random access, so a job resumes without replaying data, each host computes only
    its own rows, and `WithWorkers` and `Mixture` accept this pipeline. Shuffle and repeat the
    dataset in your function: `.seed(0).shuffle().repeat()` makes it endless for training; without
    `.repeat()`, it is a single pass. Elements are examples, not batches. Filtered datasets are not
    supported, because a filter leaves gaps in the indices; filter the source instead, or use
    `FromGrainIter`.

    If there are no `weights`, weights of 1 are added, with the shape of `labels`, or one per row if
    there are no `labels`. 64-bit numbers are converted to 32 bits. An incomplete last batch is
    padded with zero rows. The fingerprint contains the function's qualified name, its arguments,
    the settings, and a hash of the first two batches.

    Args:
        make_dataset: Importable function that returns the dataset. Configure it as
            `fdl.Partial(make_dataset, split="train")`.
        batch_size: Number of rows in the global batch.
    """

    _DATASET_CLASS = "MapDataset"
    _ALTERNATIVES = "Use FromGrainIter for an IterDataset, or FromDataset for a tf.data.Dataset."

    def __init__(self, make_dataset: "Callable[[], Any]", batch_size: int):
        self.make_dataset, self.batch_size = make_dataset, batch_size

    def check(self) -> None:
        if len(self.dataset) == 0:
            raise ConfigError(
                f"FromGrain: {self._name} has 0 elements; expected at least one. Add data, or "
                "relax its filters."
            )
        super().check()

    @property
    def num_batches(self) -> int | None:
        # Grain reports sys.maxsize as the length of an endless dataset.
        length = len(self.dataset)
        return None if length == sys.maxsize else -(-length // self.batch_size)

    @functools.cached_property
    def _first_batch(self) -> dict[str, np.ndarray]:
        return self._batch([self._element(0)], 1)

    def _element(self, index: int) -> Any:
        element = self.dataset[index]
        if element is None:
            raise ConfigError(
                f"FromGrain: element {index} of {self._name} was removed by a filter, but "
                "FromGrain does not support filters. Filter the source instead, or end the "
                "function with .to_iter_dataset() and use FromGrainIter."
            )
        return element

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first = index * self.batch_size + rows.start
        stop = min(index * self.batch_size + rows.stop, len(self.dataset))
        elements = [self._element(element) for element in range(first, stop)]
        if elements:
            return self._batch(elements, rows.stop - rows.start)
        return zero_rows(self._first_batch, rows.stop - rows.start)


class FromGrainIter(_GrainPipeline, SequentialPipeline):
    """Batches from a user-defined function that returns a grain.IterDataset of dicts of arrays.

    An IterDataset has no random access: a job that resumes at step k first recomputes k batches
    (and logs this), and every process computes the complete global batch and keeps only its own
    rows. Prefer `FromGrain`, which avoids both costs. Leaves are converted and padded as in
    `FromGrain`.

    Args:
        make_dataset: Importable function that returns the dataset. Configure it as
            `fdl.Partial(make_dataset, split="train")`. Elements are examples, not batches.
        batch_size: Number of rows in the global batch.
        num_batches: Number of batches in one pass; the last may be incomplete. None if the dataset
            is endless, for training.
    """

    num_batches: int | None = None
    _DATASET_CLASS = "IterDataset"
    _ALTERNATIVES = "Use FromGrain for a MapDataset, or FromDataset for a tf.data.Dataset."

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
                f"FromGrainIter: {self._name} has 0 elements; expected at least one. Add data, or "
                "relax its filters."
            )
        return self._batch(first, 1)

    def batches_from(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        elements = itertools.islice(iter(self.dataset), start * self.batch_size, None)
        end = self.num_batches
        indices = itertools.count(start) if end is None else range(start, end)
        for index in indices:
            examples = list(itertools.islice(elements, self.batch_size))
            # Only the last batch may have fewer examples.
            is_last = end is not None and index + 1 == end
            if not examples or (len(examples) < self.batch_size and not is_last):
                expected = "an endless dataset" if end is None else f"{end} batches"
                raise ConfigError(
                    f"FromGrainIter: {self._name} ended in batch {index}; expected {expected}. Add "
                    ".repeat(), or change num_batches."
                )
            yield {name: x[rows] for name, x in self._batch(examples, self.batch_size).items()}
