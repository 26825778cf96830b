"""Base classes of input pipelines, which return any batch by its index."""

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

if TYPE_CHECKING:  # A worker process does not need JAX, which takes a second to import.
    import jax

    from praxis_lite.inputs.tokenizers.base import Tokenizer

__all__ = ("IndexedPipeline", "InputPipeline", "TRAIN", "spec_of")

# The name of the training dataset; all others are for evaluation.
TRAIN = "train"


@typing.runtime_checkable
class HasFingerprint(Protocol):
    """An object that can fingerprint its data, such as a source or a tokenizer."""

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything that determines the data, as JSON."""


class InputPipeline(abc.ABC):
    """Base class of input pipelines, which compute a batch from settings, seed and batch index.

    A job resumes at step k with `batches(start=k)`. Pipelines with random access replay nothing.
    Streams store the state of their iterator in checkpoints (`state`), and other pipelines
    recompute the first k batches. The shapes of each batch are those of one of the `element_specs`;
    an incomplete last batch is padded with zero rows whose `weights` are 0. Constructors only store
    their settings: files are read by `check` and later methods.
    """

    batch_size: int  # Number of rows in the global batch, across all hosts.
    # Whether batch k can only be computed after all earlier batches; logged when a job starts.
    replays: bool = False
    tokenizer: "Tokenizer | None" = None  # Set by text pipelines.

    @property
    @abc.abstractmethod
    def num_batches(self) -> int | None:
        """The number of batches in one pass, or None for an endless pipeline (training)."""

    def check(self) -> None:
        """Reads the files and validates the settings.

        Raises:
            ConfigError: A batch could not be computed.
        """
        self.require_at_least(1, "batch_size")

    @abc.abstractmethod
    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        """Returns the shape and dtype of each leaf in the global batch."""

    def element_specs(self) -> "tuple[dict[str, jax.ShapeDtypeStruct], ...]":
        """Returns a spec for each shape of the global batch, starting with `element_spec`."""
        return (self.element_spec(),)

    def num_rows(self, index: int) -> int:
        """Returns the number of rows in the global batch `index`, a multiple of batch_size."""
        return self.batch_size

    @abc.abstractmethod
    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Returns an iterator over batches `start`, `start + 1`, ...

        Args:
            start: Index of the first batch.
            rows: Rows of the global batch to return, a slice of range(batch_size); None for all.
                Each process requests the rows of its devices (`Partitioner.process_rows`). For a
                batch with a multiple of batch_size rows, see `rows_of_batch`.

        Raises:
            ConfigError: `check` failed.
        """

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns everything that determines the batches, as JSON: settings, seed and data hash."""

    def state(self, next_batch: int) -> Any:
        """Returns the state for resuming at this batch, as JSON, or None if none is needed."""
        return None

    def restore(self, state: Any) -> None:
        """Sets the state, as returned by `state`, from which later calls of `batches` resume."""
        assert state is None, f"{type(self).__name__}.state returns no state"

    def nondeterminism(self) -> str | None:
        """Returns the reason why batches may differ between runs, or None if batches cannot differ.

        By default, the first batch is computed twice and compared.
        """
        first, second = (next(self.batches(), {}) for _ in range(2))
        return first_difference(first, second)

    def baselines(self) -> dict[str, float]:
        """Returns reference values for evaluation metrics, keyed by name; {} by default."""
        return {}

    def classes(self) -> dict[str, tuple[str, ...]]:
        """Returns the class names of each label, keyed by the label's name; {} if unknown.

        A class must have the same index in all datasets of a job and all sources of a mixture.
        """
        return {}

    def largest_id(self) -> int | None:
        """Returns the largest token id, or None if it is unknown."""
        return None

    def place_of_largest_id(self) -> str:
        """Returns the location of the largest token id; "" if unknown."""
        return ""

    def example_of(self, index: int, row: int) -> str:
        """Returns the location of a batch row's example, such as file and line; "" if unknown."""
        return ""

    def tokens_per_row(self) -> float | None:
        """Returns the mean number of tokens per row, or None if a mixture must measure it."""
        return None

    def class_name(self) -> str:
        """Returns the class name for fingerprints, with the module for user-defined classes.

        Both `TextWindows` classes have the same name because their batches are equal.
        """
        is_library_class = type(self).__module__.startswith("praxis_lite.inputs.")
        prefix = "" if is_library_class else f"{type(self).__module__}."
        return prefix + type(self).__qualname__

    def settings_fingerprint(self, *settings: str) -> dict[str, Any]:
        """Returns the class name and the values, or fingerprints, of the given attributes."""
        values = {name: getattr(self, name) for name in settings}
        return {"pipeline": self.class_name()} | {
            name: value.fingerprint() if isinstance(value, HasFingerprint) else value
            for name, value in values.items()
        }

    def require_at_least(self, minimum: int, *settings: str) -> None:
        """Raises ConfigError unless each of the given attributes is an integer >= minimum."""
        for setting in settings:
            value = getattr(self, setting)
            require(
                hasattr(value, "__index__") and value >= minimum,
                f"{type(self).__name__}.{setting}",
                value,
                f"an integer, at least {minimum}",
            )

    def rows_or_all(self, rows: slice | None) -> slice:
        """Returns `rows`, or a slice with all rows in the batch if `rows` is None."""
        return slice(0, self.batch_size) if rows is None else rows

    def rows_of_batch(self, index: int, rows: slice) -> slice:
        """Converts a slice of range(batch_size) to the same fraction of the rows of a batch."""
        multiple = self.num_rows(index) // self.batch_size
        return slice(rows.start * multiple, rows.stop * multiple)


class IndexedPipeline(InputPipeline):
    """A pipeline that computes any rows of a batch from the batch's index, with NumPy."""

    @abc.abstractmethod
    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        """Returns rows of the global batch `index`; for `rows`, see `batches`."""

    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        # Return a generator instead of yielding, so that errors are raised here, not by next().
        self.check()
        rows, end = self.rows_or_all(rows), self.num_batches
        indices = itertools.count(start) if end is None else range(start, end)
        return (self.rows(index, rows) for index in indices)


class ExamplePipeline(IndexedPipeline):
    """A pipeline over examples with random access, in order or shuffled every epoch.

    Attributes:
        seed: Seed of the shuffled order.
        shuffle: Whether batches are endless and reshuffled every epoch; False for one ordered pass.
    """

    seed: int
    shuffle: bool

    @property
    @abc.abstractmethod
    def num_examples(self) -> int:
        """The number of examples in one pass over the data."""

    def check(self) -> None:
        super().check()
        self.require_at_least(0, "seed")

    @property
    def num_batches(self) -> int | None:
        return None if self.shuffle else -(-self.num_examples // self.batch_size)

    def example_indices(self, index: int, rows: slice) -> np.ndarray:
        """Returns the example index of each row as int64; fewer rows at the end of a pass."""
        first, count = index * self.batch_size + rows.start, rows.stop - rows.start
        return examples_at(self.num_examples, first, count, seed=self.seed, shuffle=self.shuffle)

    def example_of(self, index: int, row: int) -> str:
        indices = self.example_indices(index, slice(row, row + 1)).tolist()
        return self.where(indices[0]) if indices else ""

    def where(self, example: int) -> str:
        """Returns an example's location for messages; by default its zero-based index."""
        return f"example {example}"


class SequentialPipeline(InputPipeline):
    """A pipeline without random access; by default, a resumed job recomputes earlier batches."""

    replays = True

    @abc.abstractmethod
    def batches_from(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        """Yields the given rows from batches `start`, `start + 1`, ..."""

    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        self.check()
        if num_recomputed := self.num_recomputed(start):
            _log.info(
                "recomputing %d batches before batch %d: %s has no random access",
                num_recomputed,
                start,
                type(self).__name__,
            )
        return self.batches_from(start, self.rows_or_all(rows))

    def num_recomputed(self, start: int) -> int:
        """Returns the number of batches that are recomputed before batch `start`."""
        return start


def first_difference(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> str | None:
    """Names the first leaf in which two batches differ; returns None if they are equal."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return None  # `checked_batches` reports batches that are not dicts.
    for name, leaf in first.items():
        if name not in second or np.asarray(leaf).tobytes() != np.asarray(second[name]).tobytes():
            return f"two computations of the first batch differ in {name!r}"
    return None


def lm_spec(batch_size: int, seq_len: int) -> "dict[str, jax.ShapeDtypeStruct]":
    """Returns the spec of a language model's batch: `ids`, `labels` and `weights`, each [B, T]."""
    shape = (batch_size, seq_len)
    return spec_of(ids=(shape, np.int32), labels=(shape, np.int32), weights=(shape, np.float32))


def spec_of(**leaves: tuple[tuple[int, ...], Any]) -> "dict[str, jax.ShapeDtypeStruct]":
    """Returns the spec of a batch from the (shape, dtype) of each leaf."""
    import jax

    return {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()}


def spec_of_rows(leaves: Mapping[str, Any], batch_size: int) -> "dict[str, jax.ShapeDtypeStruct]":
    """Returns the spec of a batch of `batch_size` rows with the row shapes of `leaves`."""
    return spec_of(
        **{name: ((batch_size, *leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()}
    )


def zero_rows(leaves: Mapping[str, Any], num_rows: int) -> dict[str, np.ndarray]:
    """Returns `num_rows` rows of zeros with the row shapes and dtypes of `leaves`."""
    return {
        name: np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()
    }


def batches_sha256(batches: Iterable[Mapping[str, np.ndarray]]) -> str:
    """Returns the hex SHA-256 of the names, dtypes, shapes and bytes of all leaves."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, leaf in sorted(batch.items()):
            digest.update(f"{name} {leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes())
    return digest.hexdigest()


def fingerprint_json(value: Any) -> Any:
    """Returns JSON that identifies a setting, such as a function with its bound arguments."""
    if isinstance(value, functools.partial):
        arguments = {str(n): fingerprint_json(x) for n, x in enumerate(value.args)}
        arguments |= {name: fingerprint_json(x) for name, x in value.keywords.items()}
        return {"function": fingerprint_json(value.func), **arguments}
    if isinstance(value, Mapping):
        return {str(name): fingerprint_json(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [fingerprint_json(x) for x in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, HasFingerprint):
        return value.fingerprint()
    return callable_name(value if hasattr(value, "__qualname__") else type(value))


_log = logging.getLogger(__name__)
