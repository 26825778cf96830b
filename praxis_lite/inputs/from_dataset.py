"""Batches of a tf.data.Dataset that a user's function returns."""

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
from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.inputs.base import (
    ReplayedPipeline,
    described,
    difference,
    digest_of,
    spec_of_rows,
)
from praxis_lite.inputs.batch_arrays import narrow, narrow_dtype, padded_rows, with_weights
from praxis_lite.inputs.tensorflow_import import tensorflow

if TYPE_CHECKING:
    import jax

_NUM_COMPARED = 2  # Batches: the first with a full shuffle buffer, and the order after it.


class FromDataset(ReplayedPipeline):
    """Batches of a tf.data.Dataset of dicts of tensors that your function returns.

    Each iteration calls the function after `tf.random.set_seed(seed)`, which seeds all random
    operations without an explicit seed. tf.data keeps the order of parallel operations, so the
    batches are the same in every run unless the dataset's options disable it; `nondeterminism`
    returns the reason, and the job logs it at the start.

    Batch k is found by reading from the first: a job that resumes at step k first makes k batches
    (and logs it). Every process makes the complete batch and takes its rows.

    The fingerprint has the function's full name, its arguments, the settings, the number of
    examples, and a hash of the first two batches. It has no paths except those in the arguments.

    `weights` of ones are added if there are none, one per label or else per row; 64-bit numbers
    become 32-bit; an incomplete last batch ends with zero rows.

    Args:
        make_dataset: importable; returns the dataset. Configure it as
            `fdl.Partial(make_dataset, split="train")`.
        batch_size: rows of the global batch.
        seed: of all random operations of the dataset.
        is_batched: the dataset's elements are global batches, not examples.
        num_batches: of one pass. None: as many as the dataset has; if it does not know (TFRecord
            files, filters), they are counted, which reads it once at each launch.
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
        self.is_batched, self._wanted_batches = is_batched, num_batches

    def check(self) -> None:
        super().check()
        self.require_at_least(0, "seed")
        if self._wanted_batches is not None:
            self.require_at_least(1, "num_batches")
            known = int(self._dataset.cardinality())  # Negative: endless or unknown.
            if known >= 0 and self._batches_of(known) < self._wanted_batches:
                raise self._has_fewer("has", self._batches_of(known))
        _ = self.num_batches
        self.element_spec()

    @property
    def num_batches(self) -> int | None:
        if self._wanted_batches is not None:
            return self._wanted_batches
        return self._batches_of(self._num_elements)

    def _batches_of(self, num_elements: int | None) -> int | None:
        if num_elements is None or self.is_batched:
            return num_elements
        return -(-num_elements // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        leaves = {}
        for name, (shape, dtype) in self._element.items():
            narrow("FromDataset", name, np.empty(0, dtype))
            row_shape = shape[1:] if self.is_batched else shape
            if None in row_shape or (self.is_batched and not shape):
                raise ConfigError(
                    f"FromDataset: {name!r} has the shape {shape} in {self._name}; all dims except "
                    "a batch's rows must be known and the same for every example. Pad it, or state "
                    "it with tf.ensure_shape."
                )
            leaves[name] = np.empty((0, *row_shape), narrow_dtype(np.dtype(dtype)))
        return spec_of_rows(with_weights(leaves), self.batch_size)

    def batches_from(self, start: int, rows: slice) -> Iterator[dict[str, np.ndarray]]:
        dataset = self._made()
        if not self.is_batched:
            dataset = dataset.batch(self.batch_size)
        if self._wanted_batches is not None:
            dataset = dataset.take(self._wanted_batches)
        dataset = dataset.skip(start).prefetch(2)
        if not dataset.options().threading.private_threadpool_size:
            # Otherwise parallel calls share tensorflow's two threads.
            options = type(dataset.options())()
            options.threading.private_threadpool_size = os.cpu_count()
            dataset = dataset.with_options(options)
        num_made = start
        for batch in self._read(dataset.as_numpy_iterator()):
            num_made += 1
            leaves = padded_rows("FromDataset", self._name, batch, self.batch_size)
            yield {name: leaf[rows] for name, leaf in leaves.items()}
        if self._wanted_batches is not None and num_made < self._wanted_batches:
            raise self._has_fewer("ended after", num_made)

    def _read(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Yields the elements; raises ConfigError for what tensorflow cannot read."""
        try:
            yield from elements
        except self._tf.errors.OpError as error:
            reason = re.sub(r"\{\{.*?\}\}", "", error.message or str(error)).strip()
            reason = shown(reason.splitlines()[0], 500).rstrip(".")
            raise ConfigError(
                f"FromDataset: {self._name} cannot be read: {reason}. Fix the dataset."
            ) from error

    def _has_fewer(self, verb: str, num_found: int) -> ConfigError:
        return ConfigError(
            f"FromDataset: {self._name} {verb} {num_found} batches, but num_batches is "
            f"{self._wanted_batches}. Lower it, or leave it out to count them."
        )

    def fingerprint(self) -> dict[str, Any]:
        reason, digest = self._examined
        is_counted = self._wanted_batches is None
        return self.settings_fingerprint("batch_size", "seed", "is_batched") | {
            "make_dataset": described(self.make_dataset),
            **({"num_elements": self._num_elements} if is_counted
               else {"num_batches": self._wanted_batches}),
            "first_batches_sha256": "not deterministic" if reason else digest,
        }

    def nondeterminism(self) -> str | None:
        return self._examined[0]

    @functools.cached_property
    def _examined(self) -> tuple[str | None, str]:
        """Why batches may differ between runs, by graph and by comparison, and a hash of two."""
        first, again = (
            list(itertools.islice(self.batches_from(0, self.whole_or(None)), _NUM_COMPARED))
            for _ in range(2)
        )
        differences = (difference(*pair) for pair in zip(first, again, strict=True))
        reason = why_nondeterministic(self._tf, self._dataset)
        return reason or next(filter(None, differences), None), digest_of(first)

    @functools.cached_property
    def _dataset(self) -> Any:
        """A dataset for checks only: its second pass has another order."""
        return self._made()

    @property
    def _tf(self) -> Any:
        return tensorflow("FromDataset")

    def _made(self) -> Any:
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
        """The number of the dataset's elements, or None if it is endless."""
        count = int(self._dataset.cardinality())
        if count == self._tf.data.UNKNOWN_CARDINALITY:
            _log.info(
                "counting the elements of %s: num_batches=NUMBER avoids this, and .repeat() makes "
                "it endless for training", self._name,
            )
            count = sum(1 for _ in self._read(iter(self._dataset)))
        if count == 0:
            raise ConfigError(
                f"FromDataset: {self._name} has 0 elements; expected at least one. Give it more "
                "data, or filter less."
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
                "tensors by name, such as {'ids': ..., 'labels': ...}. End the dataset with a map "
                "that returns one."
            )
        return {
            name: (tuple(tensor.shape.as_list()), tensor.dtype.as_numpy_dtype)
            for name, tensor in spec.items()
        }

    @property
    def _name(self) -> str:
        return function_name(self.make_dataset)


def why_nondeterministic(tf: ModuleType, dataset: Any) -> str | None:
    """Returns the operation whose order or random numbers may differ between runs, or None.

    tf.data keeps the order of parallel operations unless the options disable it. Random operations
    update a state, so parallel calls draw in any order.
    """
    if dataset.options().deterministic is False:
        return "its options have deterministic=False"
    variant = tf.data.experimental.to_variant(dataset)
    ignore_state = 1  # ExternalStatePolicy: counters and tables may be in the graph.
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, external_state_policy=ignore_state, strip_device_assignment=True
    )
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    functions = {f.signature.name: list(f.node_def) for f in graph.library.function}
    for node in [*graph.node, *(node for nodes in functions.values() for node in nodes)]:
        if node.attr["deterministic"].s == b"false":
            return f"{node.op} has deterministic=False"
        if "Parallel" in node.op:
            for called in _called(node, functions, set()):
                if _draws(called):
                    return f"{called.op} runs in a function that {node.op} calls in parallel"
        elif _draws(node) and not (node.attr["seed"].i or node.attr["seed2"].i):
            return f"{node.op} has no seed"
    return None


def _called(node: Any, functions: dict[str, list[Any]], seen: set[str]) -> Iterator[Any]:
    """Yields the nodes of all functions that a node calls, directly or indirectly."""
    for attribute in node.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name in functions and function.name not in seen:
                seen.add(function.name)
                for inner in functions[function.name]:
                    yield inner
                    yield from _called(inner, functions, seen)


def _draws(node: Any) -> bool:
    """Returns whether a node draws random numbers from a state."""
    # Datasets (shuffle) have explicit seeds and draw sequentially.
    return "seed2" in node.attr and "Dataset" not in node.op


_log = logging.getLogger(__name__)
