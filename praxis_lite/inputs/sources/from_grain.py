"""Reads batches from a Grain dataset that a user-defined function returns."""

import abc
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
    batches_sha256,
    fingerprint_json,
    spec_of_rows,
    zero_rows,
)
from praxis_lite.inputs.batch_arrays import stack_examples

if TYPE_CHECKING:
    import jax

_NUM_HASHED_BATCHES = 2  # The fingerprint contains a hash of this many batches.


class DatasetPipeline(InputPipeline):
    """Base class of pipelines over a dataset that a user-defined function returns."""

    make_dataset: Callable[[], Any]
    batch_size: int

    @property
    @abc.abstractmethod
    def first_batch(self) -> dict[str, np.ndarray]:
        """A batch with only the first example."""

    def check(self) -> None:
        super().check()
        self.element_spec()

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of_rows(self.first_batch, self.batch_size)

    def first_of(self, examples: Iterator[Any]) -> Any:
        """Returns the first example. Raises ConfigError if there is none."""
        for example in examples:
            return example
        raise ConfigError(
            f"{type(self).__name__}: {self.name} has 0 elements; expected at least one. Add data, "
            "or relax its filters."
        )

    def stacked(self, examples: list[Any], num_rows: int) -> dict[str, np.ndarray]:
        """Stacks examples into a batch with `num_rows` rows."""
        return stack_examples(type(self).__name__, self.name, examples, num_rows)

    def made_by_grain(self, class_name: str, alternatives: str) -> Any:
        """Returns the user's dataset. Raises ConfigError unless it is a grain.<class_name>."""
        dataset = self.make_dataset()
        grain = optional_module("grain", type(self).__name__)
        if not isinstance(dataset, getattr(grain, class_name)):
            raise ConfigError(
                f"{type(self).__name__}: {self.name} returns a {type(dataset).__name__}; expected "
                f"a grain.{class_name}. {alternatives}"
            )
        return dataset

    def fingerprint(self) -> dict[str, Any]:
        return self.settings_fingerprint("batch_size", "num_batches") | {
            "make_dataset": fingerprint_json(self.make_dataset),
            "first_batches_sha256": self._digest,
        }

    @functools.cached_property
    def _digest(self) -> str:
        return batches_sha256(itertools.islice(self.batches(), _NUM_HASHED_BATCHES))

    @property
    def name(self) -> str:
        """The name of the user-defined function."""
        return function_name(self.make_dataset)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process builds the dataset again.
        recomputed = ("dataset", "first_batch")
        return {name: value for name, value in vars(self).items() if name not in recomputed}


class FromGrain(DatasetPipeline, IndexedPipeline):
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

    def __init__(self, make_dataset: "Callable[[], Any]", batch_size: int):
        self.make_dataset, self.batch_size = make_dataset, batch_size

    @functools.cached_property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.made_by_grain(
            "MapDataset",
            "Use FromGrainIter for an IterDataset, or FromDataset for a tf.data.Dataset.",
        )

    @property
    def num_batches(self) -> int | None:
        # Grain reports sys.maxsize as the length of an endless dataset.
        length = len(self.dataset)
        return None if length == sys.maxsize else -(-length // self.batch_size)

    @functools.cached_property
    def first_batch(self) -> dict[str, np.ndarray]:
        elements = map(self._element, range(len(self.dataset)))
        return self.stacked([self.first_of(elements)], 1)

    def _element(self, index: int) -> Any:
        element = self.dataset[index]
        if element is None:
            raise ConfigError(
                f"FromGrain: element {index} of {self.name} was removed by a filter, but "
                "FromGrain does not support filters. Filter the source instead, or end the "
                "function with .to_iter_dataset() and use FromGrainIter."
            )
        return element

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first = index * self.batch_size + rows.start
        stop = min(index * self.batch_size + rows.stop, len(self.dataset))
        elements = [self._element(element) for element in range(first, stop)]
        if elements:
            return self.stacked(elements, rows.stop - rows.start)
        return zero_rows(self.first_batch, rows.stop - rows.start)
