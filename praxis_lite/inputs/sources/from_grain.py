"""Reads batches from a Grain dataset that a user-defined function returns."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.base import IndexedPipeline, zero_rows
from praxis_lite.inputs.sources.dataset_pipeline import DatasetPipeline
from praxis_lite.inputs.sources.streams import Stream


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
        return _made_by_grain(
            self,
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


class FromGrainIter(Stream):
    """Batches from a user-defined function that returns a grain.IterDataset of dicts of arrays.

    An IterDataset has no random access: every process computes the complete global batch and keeps
    only its own rows. Prefer `FromGrain`, which avoids this cost. Checkpoints contain the state of
    the dataset's iterator, from which a job resumes. Leaves are converted and padded as in
    `FromGrain`.

    Args:
        make_dataset: Importable function that returns the dataset. Configure it as
            `fdl.Partial(make_dataset, split="train")`. Elements are examples, not batches.
        batch_size: Number of rows in the global batch.
        num_batches: Number of batches in one pass; the last may be incomplete. None if the dataset
            is endless, for training.
    """

    def __init__(
        self, make_dataset: "Callable[[], Any]", batch_size: int, num_batches: int | None = None
    ):
        self.make_dataset, self.batch_size = make_dataset, batch_size
        self.num_batches = num_batches

    @functools.cached_property
    def dataset(self) -> Any:
        """The user's dataset."""
        return _made_by_grain(
            self,
            "IterDataset",
            "Use FromGrain for a MapDataset, or FromDataset for a tf.data.Dataset.",
        )

    def opened(self, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
        examples = iter(self.dataset)
        if state is not None:
            examples.set_state(state)
        return examples, examples.get_state


def _made_by_grain(pipeline: DatasetPipeline, class_name: str, alternatives: str) -> Any:
    """Returns the user's dataset. Raises ConfigError unless it is a grain.<class_name>."""
    dataset = pipeline.make_dataset()
    grain = optional_module("grain", type(pipeline).__name__)
    if not isinstance(dataset, getattr(grain, class_name)):
        raise ConfigError(
            f"{type(pipeline).__name__}: {pipeline.name} returns a {type(dataset).__name__}; "
            f"expected a grain.{class_name}. {alternatives}"
        )
    return dataset
