"""Base classes of input pipelines: any rows of any batch by its index."""

import abc
import functools
import hashlib
import itertools
import logging
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import require
from praxis_lite.inputs.mixing.shuffle import examples_at

if TYPE_CHECKING:  # A worker process needs no JAX, which takes a second to import.
    import jax

    from praxis_lite.inputs.tokenizers.base import Tokenizer

__all__ = ("IndexedPipeline", "InputPipeline", "TRAIN", "spec_of")

# The name of the training dataset; all others are for evaluation.
TRAIN = "train"


@typing.runtime_checkable
class Fingerprinted(Protocol):
    """A setting of a pipeline with a fingerprint of its data: a source, a tokenizer."""

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything that determines the data, as JSON."""


class InputPipeline(abc.ABC):
    """Batches of host arrays, each a pure function of (settings, seed, index).

    Resuming at step k is `batches(start=k)`: nothing is replayed and no position is stored. Every
    batch of a pipeline has the same shapes; an incomplete last batch ends with zero rows whose
    `weights` are 0. A constructor only stores its settings: `check` or later methods read files.
    """

    batch_size: int  # Rows of the global batch, over all hosts.
    # True: batch k needs all batches before it; a job logs this at the start.
    replays: bool = False
    tokenizer: "Tokenizer | None" = None  # Set by pipelines of text.

    @property
    @abc.abstractmethod
    def num_batches(self) -> int | None:
        """The batches in a pass, or None for an endless pipeline (training)."""

    def check(self) -> None:
        """Reads files, and raises ConfigError for what would fail later."""
        self.require_at_least(1, "batch_size")

    @abc.abstractmethod
    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        """Returns the shape and dtype of each leaf of the global batch."""

    @abc.abstractmethod
    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Returns batch `start`, `start + 1`, ..., or these rows of each.

        Args:
            rows: a slice of the batch_size rows of the global batch. None: all. A process
                requests the rows of its devices (`sharding.inputs.process_rows`).

        Raises:
            ConfigError: as `check`.
        """

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns everything that determines the batches, as JSON: settings, seed, data hash."""

    def nondeterminism(self) -> str | None:
        """Returns why another run may have other batches, or None.

        The default compares the first batch of two iterations.
        """
        first, second = (next(self.batches(), {}) for _ in range(2))
        return difference(first, second)

    def baselines(self) -> dict[str, float]:
        """Returns figures to compare an evaluation with, by name; {} unless overridden."""
        return {}

    def classes(self) -> dict[str, tuple[str, ...]]:
        """Returns the names of the classes, by the name of the labels; {} if unknown.

        A class has one number in all datasets of a job and in all sources of a mixture.
        """
        return {}

    def largest_id(self) -> int | None:
        """Returns the largest token id, or None if it is unknown."""
        return None

    def place_of_largest_id(self) -> str:
        """Returns the location of the largest token id; "" if unknown."""
        return ""

    def example_of(self, index: int, row: int) -> str:
        """Returns the example in a row of a batch, such as its file and line; "" if unknown."""
        return ""

    def tokens_per_row(self) -> float | None:
        """Returns the mean number of tokens per row; None: a mixture counts them."""
        return None

    def class_name(self) -> str:
        """Returns the class's name for fingerprints, with its module unless it is the library's.

        Both classes `TextWindows` have one name, because their batches are the same.
        """
        is_own = type(self).__module__.startswith("praxis_lite.inputs.")
        return ("" if is_own else f"{type(self).__module__}.") + type(self).__qualname__

    def settings_fingerprint(self, *settings: str) -> dict[str, Any]:
        """Returns the class's name and these attributes, or their fingerprints."""
        values = {name: getattr(self, name) for name in settings}
        return {"pipeline": self.class_name()} | {
            name: value.fingerprint() if isinstance(value, Fingerprinted) else value
            for name, value in values.items()
        }

    def require_at_least(self, minimum: int, *settings: str) -> None:
        """Raises ConfigError unless each of these attributes is an integer >= minimum."""
        for setting in settings:
            value = getattr(self, setting)
            require(
                hasattr(value, "__index__") and value >= minimum,
                f"{type(self).__name__}.{setting}", value, f"an integer, at least {minimum}",
            )

    def whole_or(self, rows: slice | None) -> slice:
        """Returns `rows`, or all rows of the batch for None."""
        return slice(0, self.batch_size) if rows is None else rows


class IndexedPipeline(InputPipeline):
    """A pipeline that computes the rows of a batch from its index, with NumPy alone."""

    @abc.abstractmethod
    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        """Returns these rows (start to stop) of the global batch `index`."""

    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        # Not a generator, so that it checks before the first next().
        self.check()
        rows, end = self.whole_or(rows), self.num_batches
        indices = itertools.count(start) if end is None else range(start, end)
        return (self.rows(index, rows) for index in indices)


class NumberedPipeline(IndexedPipeline):
    """A pipeline of numbered examples, in order or shuffled every epoch.

    Attributes:
        seed: of the order.
        shuffle: True for endless batches in an order redrawn every epoch; False for one pass.
    """

    seed: int
    shuffle: bool

    @property
    @abc.abstractmethod
    def num_examples(self) -> int:
        """The examples of a pass."""

    def check(self) -> None:
        super().check()
        self.require_at_least(0, "seed")

    @property
    def num_batches(self) -> int | None:
        return None if self.shuffle else -(-self.num_examples // self.batch_size)

    def numbers(self, index: int, rows: slice) -> np.ndarray:
        """Returns int64: the examples of these rows of a batch; fewer at the end of a pass."""
        first, count = index * self.batch_size + rows.start, rows.stop - rows.start
        return examples_at(self.num_examples, first, count, seed=self.seed, shuffle=self.shuffle)

    def example_of(self, index: int, row: int) -> str:
        return "".join(map(self.where, self.numbers(index, slice(row, row + 1)).tolist()))

    def where(self, number: int) -> str:
        """Returns an example's location for messages: its number from 0 on, or its file."""
        return f"example {number}"


class ReplayedPipeline(InputPipeline):
    """A pipeline with sequential access only: a resume recomputes all earlier batches."""

    replays = True

    @abc.abstractmethod
    def batches_from(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        """Yields these rows of batch `start`, `start + 1`, ..."""

    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        self.check()
        if start:
            _log.info(
                "reading the first %d batches again (%s)", start, type(self).__name__
            )
        return self.batches_from(start, self.whole_or(rows))


def difference(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> str | None:
    """Returns the difference between a batch and the recomputed batch, or None."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return None  # A mistake that `checked_batches` reports.
    for name, leaf in first.items():
        if name not in second or np.asarray(leaf).tobytes() != np.asarray(second[name]).tobytes():
            return f"the first batch, made twice, differs in {name!r}"
    return None


def lm_spec(batch_size: int, seq_len: int) -> "dict[str, jax.ShapeDtypeStruct]":
    """Returns the spec of a language model's batch: ids, labels, weights of [B, T]."""
    shape = (batch_size, seq_len)
    return spec_of(ids=(shape, np.int32), labels=(shape, np.int32), weights=(shape, np.float32))


def spec_of(**leaves: tuple[tuple[int, ...], Any]) -> "dict[str, jax.ShapeDtypeStruct]":
    """Returns the spec of a batch from the (shape, dtype) of each leaf."""
    import jax

    return {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()}


def spec_of_rows(leaves: Mapping[str, Any], batch_size: int) -> "dict[str, jax.ShapeDtypeStruct]":
    """Returns the spec of batches of so many rows like those of `leaves`, arrays or structs."""
    return spec_of(**{
        name: ((batch_size, *leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()
    })


def zero_rows(leaves: Mapping[str, Any], num_rows: int) -> dict[str, np.ndarray]:
    """Returns rows of zeros like those of `leaves`, arrays or structs."""
    return {
        name: np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()
    }


def digest_of(batches: Iterable[Mapping[str, np.ndarray]]) -> str:
    """Returns the SHA-256, in hex, of the names, types, shapes and bytes of batches."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, leaf in sorted(batch.items()):
            digest.update(f"{name} {leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes())
    return digest.hexdigest()


def described(value: Any) -> Any:
    """Returns a function with its arguments, or an argument, as JSON for fingerprints."""
    if isinstance(value, functools.partial):
        arguments = {str(n): described(x) for n, x in enumerate(value.args)}
        arguments |= {name: described(x) for name, x in value.keywords.items()}
        return {"function": described(value.func), **arguments}
    if isinstance(value, Mapping):
        return {str(name): described(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [described(x) for x in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Fingerprinted):
        return value.fingerprint()
    return callable_name(value if hasattr(value, "__qualname__") else type(value))


_log = logging.getLogger(__name__)
