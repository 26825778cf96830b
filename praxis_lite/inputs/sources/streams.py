"""Pipelines over datasets that are read in order, and whose position is saved in checkpoints."""

import abc
import functools
import itertools
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.inputs.base import SequentialPipeline, first_difference
from praxis_lite.inputs.mixing.shuffle import window_order
from praxis_lite.inputs.sources.dataset_pipeline import DatasetPipeline


class Stream(DatasetPipeline, SequentialPipeline):
    """Base class of pipelines over an iterator that can return its state as JSON."""

    # A resumed job continues from the state in its checkpoint.
    replays = False
    num_batches: int | None = None
    seed: int = 0
    shuffle_window: int | None = None
    # The number of examples before a state, and the state.
    _restored: tuple[int, Any] | None = None  # From a checkpoint.
    _latest: tuple[int, Any] | None = None  # Before the window that was read last.

    @abc.abstractmethod
    def opened(self, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
        """Opens the dataset.

        Args:
            state: State at which the iterator starts, or None to start at the first example.

        Returns:
            An iterator over the examples, and a function that returns the iterator's state.
        """

    def check(self) -> None:
        if self.num_batches is not None:
            self.require_at_least(1, "num_batches")
        if self.shuffle_window is not None:
            self.require_at_least(1, "shuffle_window")
        super().check()

    @functools.cached_property
    def first_batch(self) -> dict[str, np.ndarray]:
        examples, _ = self.opened(None)
        return self.stacked([self.first_of(examples)], 1)

    def state(self, next_batch: int) -> Any:
        if self._latest is None or self._latest[0] > next_batch * self.batch_size:
            return None
        return list(self._latest)

    def restore(self, state: Any) -> None:
        self._restored = None if state is None else tuple(state)

    def _start_of(self, batch: int) -> tuple[int, Any]:
        """Returns the last state before a batch: (number of examples read, the state)."""
        if self._restored is None or self._restored[0] > batch * self.batch_size:
            return 0, None
        return self._restored

    def num_recomputed(self, start: int) -> int:
        return start - self._start_of(start)[0] // self.batch_size

    def batches_from(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        examples, end = self._examples(start), self.num_batches
        indices = itertools.count(start) if end is None else range(start, end)
        for index in indices:
            batch = list(itertools.islice(examples, self.batch_size))
            # Only the last batch may have fewer examples.
            is_last = end is not None and index + 1 == end
            if not batch or (len(batch) < self.batch_size and not is_last):
                expected = "an endless dataset" if end is None else f"{end} batches"
                raise ConfigError(
                    f"{type(self).__name__}: {self.name} ended in batch {index}; expected "
                    f"{expected}. Add .repeat(), or change num_batches."
                )
            yield {name: x[rows] for name, x in self.stacked(batch, self.batch_size).items()}

    def _examples(self, start: int) -> Iterator[Any]:
        """Yields the examples from batch `start` on. Stores the state before each window."""
        first = start * self.batch_size
        num_read, state = self._start_of(start)
        examples, state_of_examples = self.opened(state)
        size = self.shuffle_window or self.batch_size
        while True:
            latest = num_read, state_of_examples()
            window = list(itertools.islice(examples, size))
            if not window:
                return
            self._latest = latest
            if self.shuffle_window is not None:
                order = window_order(self.seed, num_read // size, len(window))
                window = [window[number] for number in order]
            yield from window[max(0, first - num_read) :]
            num_read += len(window)


@typing.runtime_checkable
class _Stateful(Protocol):
    """An iterable whose position can be saved, such as datasets.IterableDataset."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> Any:
        """Returns the state after the latest example that the iterator has returned, as JSON."""

    def load_state_dict(self, state: Any) -> None:
        """Makes the next iterator start after the example at which the state was returned."""


@typing.runtime_checkable
class _Sharded(Protocol):
    """A dataset that consists of shards, whose number changes if files are added."""

    @property
    def num_shards(self) -> int: ...


class FromIterableDataset(Stream):
    """Batches from a user-defined function that returns an iterable with a state.

    The function returns a `datasets.IterableDataset` of dicts of numbers or arrays, such as
    `load_dataset(..., streaming=True)`, or any iterable with the methods `state_dict` and
    `load_state_dict`. The function is called for each iteration. Checkpoints contain the state,
    from which a job resumes. `check` restores the state after the first batch, and verifies that
    the second batch is the same.

    Every process reads all examples, computes the complete global batch and keeps only its own
    rows. The batches therefore do not depend on the number of processes. If there are no
    `weights`, weights of 1 are added, with the shape of `labels`, or one per row if there are no
    `labels`. 64-bit numbers are converted to 32 bits. An incomplete last batch is padded with zero
    rows. The fingerprint contains the function's qualified name, its arguments, the settings, the
    number of shards, and a hash of the first two batches.

    Args:
        make_dataset: Importable function that returns the dataset. Configure it as
            `fdl.Partial(make_dataset, split="train")`. Elements are examples, not batches.
        batch_size: Number of rows in the global batch.
        num_batches: Number of batches in one pass; the last may be incomplete. None if the dataset
            is endless, for training.
        shuffle_window: Number of consecutive examples that are shuffled together, or None to keep
            the order. One window is stored in memory. A resumed job reads its first window again
            from the beginning.
        seed: Seed of the shuffled order.
    """

    def __init__(
        self,
        make_dataset: "Callable[[], Any]",
        batch_size: int,
        num_batches: int | None = None,
        *,
        shuffle_window: int | None = None,
        seed: int = 0,
    ):
        self.make_dataset, self.batch_size = make_dataset, batch_size
        self.num_batches, self.shuffle_window, self.seed = num_batches, shuffle_window, seed

    def check(self) -> None:
        self.require_at_least(0, "seed")
        super().check()
        _ = self._is_exact

    @functools.cached_property
    def _is_exact(self) -> bool:
        """True if the second batch is the same after restoring the state; else raises an error."""
        examples, state = self.opened(None)
        list(itertools.islice(examples, self.batch_size))
        saved = state()
        try:
            restored = json.loads(json.dumps(saved))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"FromIterableDataset: state_dict() of {self.name} returns "
                f"{shortened(repr(saved), 200)}, which is not JSON serializable ({error}). Return "
                "numbers, strings, and lists and dicts of these."
            ) from None
        batches = [
            list(itertools.islice(iterator, self.batch_size))
            for iterator in (examples, self.opened(restored)[0])
        ]
        expected, actual = (self.stacked(batch, len(batch)) if batch else {} for batch in batches)
        if expected.keys() != actual.keys() or first_difference(expected, actual):
            raise ConfigError(
                f"FromIterableDataset: {self.name} returns a different second batch after its "
                "state is restored. The state of `datasets` does not contain the buffer of "
                ".shuffle(buffer_size=N): set shuffle_window=N instead."
            )
        return True

    def opened(self, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
        dataset = self._made()
        if state is not None:
            dataset.load_state_dict(state)
        return iter(dataset), dataset.state_dict

    def _made(self) -> _Stateful:
        dataset = self.make_dataset()
        if not isinstance(dataset, _Stateful):
            raise ConfigError(
                f"FromIterableDataset: {self.name} returns a {type(dataset).__name__}; expected an "
                "iterable with state_dict and load_state_dict, such as a datasets.IterableDataset. "
                "Use FromGrain or FromGrainIter for Grain, FromDataset for tf.data, or "
                "HuggingFaceDataset for a datasets.Dataset."
            )
        return dataset

    @functools.cached_property
    def _num_shards(self) -> int | None:
        dataset = self._made()
        return dataset.num_shards if isinstance(dataset, _Sharded) else None

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {
            "shuffle_window": self.shuffle_window,
            "seed": self.seed,
            "num_shards": self._num_shards,
        }
