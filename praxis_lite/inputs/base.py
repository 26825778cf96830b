"""What a pipeline of batches promises: any batch by its index, on any number of hosts."""

import abc
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from praxis_lite.errors import ConfigError


class InputPipeline(abc.ABC):
    """Batches of host arrays, each a pure function of (settings, seed, index, host).

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
        self, start: int = 0, *, host_index: int = 0, num_hosts: int = 1
    ) -> Iterator[dict[str, np.ndarray]]:
        """Returns this host's rows of batch `start`, `start + 1`, ...

        The rows of all hosts, concatenated in the order of host_index, are the global batch.

        Raises:
            ConfigError: as `check`, or where num_hosts does not divide batch_size.
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

    def host_rows(self, host_index: int, num_hosts: int) -> slice:
        """Returns the rows of the global batch that this host provides."""
        if num_hosts < 1 or self.batch_size % num_hosts:
            raise ConfigError(
                f"{type(self).__name__}: batch_size {self.batch_size} does not divide over "
                f"{num_hosts} hosts. Make batch_size a multiple of the number of hosts."
            )
        if not 0 <= host_index < num_hosts:
            raise ConfigError(
                f"{type(self).__name__}: host_index is {host_index}; with {num_hosts} hosts it "
                f"must be 0 to {num_hosts - 1}."
            )
        rows_per_host = self.batch_size // num_hosts
        return slice(host_index * rows_per_host, (host_index + 1) * rows_per_host)


class IndexedPipeline(InputPipeline):
    """A pipeline that computes the rows of a batch from its index, with NumPy alone."""

    @abc.abstractmethod
    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        """Returns these rows (start to stop) of the global batch `index`."""

    def batches(
        self, start: int = 0, *, host_index: int = 0, num_hosts: int = 1
    ) -> Iterator[dict[str, np.ndarray]]:
        # Checks now, not at the first next(): the function that does so is no generator.
        self.check()
        rows = self.host_rows(host_index, num_hosts)
        end = self.num_batches
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
