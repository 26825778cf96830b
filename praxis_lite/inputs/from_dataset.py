"""Reads batches from a tf.data.Dataset that a user-defined function returns."""

import functools
import itertools
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.inputs.base import (
    SequentialPipeline,
    batches_sha256,
    fingerprint_json,
    first_difference,
    spec_of_rows,
)
from praxis_lite.inputs.batch_arrays import narrow, narrow_dtype, padded_rows, with_weights
from praxis_lite.inputs.tensorflow_import import tensorflow

if TYPE_CHECKING:
    import jax

# Number of batches that are computed twice and compared. The first comes from the initial shuffle
# buffer; the second also depends on the elements that refill the buffer.
_NUM_COMPARED = 2


class FromDataset(SequentialPipeline):
    """Batches from a user-defined function that returns a tf.data.Dataset of dicts of tensors.

    Each iteration calls the function after `tf.random.set_seed(seed)`, which seeds all random
    operations without an explicit seed. tf.data preserves the order of parallel operations, so all
    runs read the same batches unless the dataset's options disable this. In that case,
    `nondeterminism` returns the reason, which the job logs on startup.

    The dataset has no random access: a job that resumes at step k first recomputes k batches (and
    logs this). Every process computes the complete global batch and keeps only its own rows.

    The fingerprint contains the function's qualified name, its arguments, the settings, the number
    of examples, and a hash of the first two batches. File paths are only included if they are
    arguments.

    If a batch has no `weights`, weights of 1 are added, with the shape of `labels`, or one per row
    if there are no `labels`. 64-bit numbers are converted to 32 bits. An incomplete last batch is
    padded with zero rows.

    Args:
        make_dataset: Importable function that returns the dataset. Configure it as
            `fdl.Partial(make_dataset, split="train")`.
        batch_size: Number of rows in the global batch.
        seed: Seed of all random operations in the dataset.
        is_batched: Whether the dataset's elements are global batches instead of examples.
        num_batches: Number of batches in one pass. If None, the dataset's cardinality is used. If
            the cardinality is unknown (TFRecord files, filters), the dataset is read once at each
            launch to count the batches.
    """

    def __init__(
        self,
        make_dataset: "Callable[[], Any]",
        batch_size: int,
        seed: int = 0,
        *,
        is_batched: bool = False,
        num_batches: int | None = None,
    ):
        self.make_dataset, self.batch_size, self.seed = make_dataset, batch_size, seed
        self.is_batched, self._requested_batches = is_batched, num_batches

    def check(self) -> None:
        super().check()
        self.require_at_least(0, "seed")
        if self._requested_batches is not None:
            self.require_at_least(1, "num_batches")
            num_elements = int(self._dataset.cardinality())  # Negative: endless or unknown.
            if num_elements >= 0:
                num_available = self._batches_in(num_elements)
                if num_available < self._requested_batches:
                    raise self._too_few_batches("has", num_available)
        _ = self.num_batches
        self.element_spec()

    @property
    def num_batches(self) -> int | None:
        if self._requested_batches is not None:
            return self._requested_batches
        return None if self._num_elements is None else self._batches_in(self._num_elements)

    def _batches_in(self, num_elements: int) -> int:
        return num_elements if self.is_batched else -(-num_elements // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        leaves = {}
        for name, (shape, dtype) in self._element.items():
            narrow("FromDataset", name, np.empty(0, dtype))
            row_shape = shape[1:] if self.is_batched else shape
            static_shape = tuple(size for size in row_shape if size is not None)
            if static_shape != row_shape or (self.is_batched and not shape):
                raise ConfigError(
                    f"FromDataset: {name!r} has the shape {shape} in {self._name}; expected a "
                    "static shape, except for the rows of a batch. Pad it, or set its shape with "
                    "tf.ensure_shape."
                )
            leaves[name] = np.empty((0, *static_shape), narrow_dtype(np.dtype(dtype)))
        return spec_of_rows(with_weights(leaves), self.batch_size)

    def batches_from(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        dataset = self._build_dataset()
        if not self.is_batched:
            dataset = dataset.batch(self.batch_size)
        if self._requested_batches is not None:
            dataset = dataset.take(self._requested_batches)
        dataset = dataset.skip(start).prefetch(2)
        if not dataset.options().threading.private_threadpool_size:
            # `tensorflow_import` limits tensorflow to two threads, too few for parallel maps.
            options = type(dataset.options())()
            options.threading.private_threadpool_size = os.cpu_count()
            dataset = dataset.with_options(options)
        num_read = start
        for batch in self._read(dataset.as_numpy_iterator()):
            num_read += 1
            leaves = padded_rows("FromDataset", self._name, batch, self.batch_size)
            yield {name: leaf[rows] for name, leaf in leaves.items()}
        if self._requested_batches is not None and num_read < self._requested_batches:
            raise self._too_few_batches("ended after", num_read)

    def _read(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Yields the elements, and converts tensorflow's errors to ConfigError."""
        try:
            yield from elements
        except self._tf.errors.OpError as error:
            reason = re.sub(r"\{\{.*?\}\}", "", error.message or str(error)).strip()
            reason = shortened(reason.splitlines()[0], 500).rstrip(".")
            raise ConfigError(
                f"FromDataset: {self._name} cannot be read: {reason}. Fix the dataset."
            ) from error

    def _too_few_batches(self, verb: str, num_found: int) -> ConfigError:
        return ConfigError(
            f"FromDataset: {self._name} {verb} {num_found} batches, but num_batches is "
            f"{self._requested_batches}. Lower num_batches, or omit it to count the batches."
        )

    def fingerprint(self) -> dict[str, Any]:
        reason, digest = self._nondeterminism_and_digest
        is_counted = self._requested_batches is None
        return self.settings_fingerprint("batch_size", "seed", "is_batched") | {
            "make_dataset": fingerprint_json(self.make_dataset),
            **(
                {"num_elements": self._num_elements}
                if is_counted
                else {"num_batches": self._requested_batches}
            ),
            "first_batches_sha256": "not deterministic" if reason else digest,
        }

    def nondeterminism(self) -> str | None:
        return self._nondeterminism_and_digest[0]

    @functools.cached_property
    def _nondeterminism_and_digest(self) -> tuple[str | None, str]:
        """The result of `nondeterminism`, and a hash of the first two batches."""
        first, second = (
            list(itertools.islice(self.batches_from(0, self.rows_or_all(None)), _NUM_COMPARED))
            for _ in range(2)
        )
        differences = (first_difference(*pair) for pair in zip(first, second, strict=True))
        reason = why_nondeterministic(self._tf, self._dataset)
        return reason or next(filter(None, differences), None), batches_sha256(first)

    @functools.cached_property
    def _dataset(self) -> Any:
        """A dataset for checks only; iterating over it a second time would reshuffle it."""
        return self._build_dataset()

    @property
    def _tf(self) -> Any:
        return tensorflow("FromDataset")

    def _build_dataset(self) -> Any:
        self._tf.random.set_seed(self.seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Seed .* from outer graph", UserWarning)
            dataset = self.make_dataset()
        if not isinstance(dataset, self._tf.data.Dataset):
            raise ConfigError(
                f"FromDataset: {self._name} returns a {type(dataset).__name__}; expected a "
                "tf.data.Dataset."
            )
        return dataset

    @functools.cached_property
    def _num_elements(self) -> int | None:
        """The number of elements in the dataset, or None for an endless dataset."""
        count = int(self._dataset.cardinality())
        if count == self._tf.data.UNKNOWN_CARDINALITY:
            _log.info(
                "counting the elements of %s; to avoid this, set num_batches, or end the dataset "
                "with .repeat() for training",
                self._name,
            )
            count = sum(1 for _ in self._read(iter(self._dataset)))
        if count == 0:
            raise ConfigError(
                f"FromDataset: {self._name} has 0 elements; expected at least one. Add data, or "
                "relax its filters."
            )
        return None if count == self._tf.data.INFINITE_CARDINALITY else count

    @functools.cached_property
    def _element(self) -> dict[str, tuple[tuple[int | None, ...], Any]]:
        """The shape and dtype of each leaf of an element."""
        spec = self._dataset.element_spec
        tensors = self._tf.TensorSpec
        if not isinstance(spec, dict) or not all(isinstance(s, tensors) for s in spec.values()):
            raise ConfigError(
                f"FromDataset: the elements of {self._name} are {spec}; expected a dict of dense "
                "tensors, such as {'ids': ..., 'labels': ...}. End the dataset with a map that "
                "returns such dicts."
            )
        return {
            name: (tuple(tensor.shape.as_list()), tensor.dtype.as_numpy_dtype)
            for name, tensor in spec.items()
        }

    @property
    def _name(self) -> str:
        return function_name(self.make_dataset)


def why_nondeterministic(tf: ModuleType, dataset: Any) -> str | None:
    """Returns why a dataset may differ between runs, or None if it is deterministic.

    tf.data preserves the order of parallel operations unless the options disable it. Random
    operations are stateful, so operations inside a parallel map draw random numbers in arbitrary
    order.
    """
    if dataset.options().deterministic is False:
        return "its options have deterministic=False"
    variant = tf.data.experimental.to_variant(dataset)
    ignore_state = 1  # ExternalStatePolicy.IGNORE: accept graphs with counters and lookup tables.
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, external_state_policy=ignore_state, strip_device_assignment=True
    )
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    # Functions that are passed to operations such as map are in the graph's library.
    functions = {f.signature.name: list(f.node_def) for f in graph.library.function}
    for node in [*graph.node, *(node for nodes in functions.values() for node in nodes)]:
        if node.attr["deterministic"].s == b"false":
            return f"{node.op} has deterministic=False"
        if "Parallel" in node.op:
            for called in _called_nodes(node, functions, set()):
                if _is_random(called):
                    return f"{called.op} runs in a function that {node.op} calls in parallel"
        elif _is_random(node) and not (node.attr["seed"].i or node.attr["seed2"].i):
            return f"{node.op} has no seed"
    return None


def _called_nodes(node: Any, functions: dict[str, list[Any]], seen: set[str]) -> Iterator[Any]:
    """Yields the nodes of all functions that `node` calls directly or indirectly."""
    for attribute in node.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name in functions and function.name not in seen:
                seen.add(function.name)
                for inner in functions[function.name]:
                    yield inner
                    yield from _called_nodes(inner, functions, seen)


def _is_random(node: Any) -> bool:
    """Returns whether a node is a stateful random operation."""
    # Dataset operations such as shuffle also have seeds, but draw random numbers sequentially.
    return "seed2" in node.attr and "Dataset" not in node.op


_log = logging.getLogger(__name__)
