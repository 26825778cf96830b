"""What a pipeline of batches promises: any rows of any batch by its index."""

import abc
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from praxis_lite.errors import ConfigError


class InputPipeline(abc.ABC):
    """Batches of host arrays, each a pure function of (settings, seed, index).

    Resuming at step k is `batches(start=k)`: nothing is replayed and no position is stored. Every
    batch of a pipeline has the same shapes; a last batch that is not full ends in zero rows whose
    `weights` are 0. A constructor only keeps its settings: files are read by `check` or later.
    """

    batch_size: int  # Rows of the global batch, over all hosts.

    @property
    @abc.abstractmethod
    def num_batches(self) -> int | None:
        """The batches in one pass, or None for a pipeline without end (training)."""

    def check(self) -> None:
        """Reads what must be read. Raises ConfigError for what would fail later."""
        self.require_at_least(1, "batch_size")

    @abc.abstractmethod
    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape and dtype of each leaf of the global batch."""

    @abc.abstractmethod
    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Returns batch `start`, `start + 1`, ..., or these rows of each.

        Args:
            rows: from start to stop, of the batch_size rows of the global batch; None: all. A
                process asks for those that its devices hold (`sharding.inputs.process_rows`).

        Raises:
            ConfigError: as `check`.
        """

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns all that determines the batches, as JSON: settings, seed, hash of the data."""

    def baselines(self) -> dict[str, float]:
        """Returns figures to hold an evaluation against, by name; none, unless overridden."""
        return {}

    def require_at_least(self, minimum: int, *settings: str) -> None:
        """Raises ConfigError for the first of these settings that is no integer >= minimum."""
        for setting in settings:
            value = getattr(self, setting)
            try:
                good = operator.index(value) >= minimum
            except TypeError:
                good = False
            if not good:
                raise ConfigError(
                    f"{type(self).__name__}: {setting} is {value!r}; it must be a whole number, "
                    f"{minimum} or more."
                )

    def whole_or(self, rows: slice | None) -> slice:
        """Returns `rows`, or all rows of the batch where they are None."""
        return slice(0, self.batch_size) if rows is None else rows


class IndexedPipeline(InputPipeline):
    """A pipeline that computes the rows of a batch from its index, with NumPy alone."""

    @abc.abstractmethod
    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        """Returns these rows (start to stop) of the global batch `index`."""

    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        # Checks now, not at the first next(): the function that does so is no generator.
        self.check()
        rows, end = self.whole_or(rows), self.num_batches
        indices = itertools.count(start) if end is None else range(start, end)
        return (self.rows(index, rows) for index in indices)


def lm_spec(batch_size: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of a language model's batch: ids, labels, weights of [B, T]."""
    shape = (batch_size, seq_len)
    return {
        "ids": jax.ShapeDtypeStruct(shape, np.int32),
        "labels": jax.ShapeDtypeStruct(shape, np.int32),
        "weights": jax.ShapeDtypeStruct(shape, np.float32),
    }
