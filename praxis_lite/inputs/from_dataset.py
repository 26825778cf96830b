"""Batches of a tf.data.Dataset that a function of the user's makes."""

import functools
import itertools
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
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
from praxis_lite.inputs.leaves import filled, narrow, narrow_dtype, with_weights
from praxis_lite.inputs.tf.tensorflow_import import tensorflow
from praxis_lite.inputs.tf.tf_determinism import why_nondeterministic

if TYPE_CHECKING:
    import jax

# What to do instead of counting.
_INSTEAD = "num_batches=NUMBER saves this, and .repeat() makes it endless for training"
_SECONDS_BETWEEN_COUNTS = 10.0
_NUM_COMPARED = 2  # Batches: the first with a full shuffle buffer, and the order after it.


class FromDataset(ReplayedPipeline):
    """Batches of a tf.data.Dataset that a function of yours makes, from dicts of tensors.

    The function is called whenever batches are asked for, after `tf.random.set_seed(seed)`, which
    all random operations without a seed of their own follow. tf.data keeps the order of parallel
    operations, so the batches are the same in every run unless the dataset's options say
    otherwise: then `nondeterminism` says why, and so does the job when it starts.

    Batch k is found by reading on from the first: a job that resumes at step k first makes k
    batches (a line says so). Every process makes the whole batch and takes its rows.

    The fingerprint has the function's full name, its arguments, the settings, the number of
    examples, and a hash of the first two batches. It has no paths but those among the arguments.

    `weights` of ones are added if there are none, a weight per label or else per row; numbers of
    64 bits become 32; a last batch that is not full ends in zero rows.

    Args:
        make_dataset: importable; returns the dataset. Configure it as
            `fdl.Partial(make_dataset, split="train")`.
        batch_size: rows of the global batch.
        seed: of all that is random in the dataset.
        is_batched: the dataset's elements are whole global batches, not examples.
        num_batches: of one pass. None: as many as the dataset has; if it cannot tell (TFRecord
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
            told = int(self._dataset.cardinality())  # Below 0: without end, or not known.
            if told >= 0 and self._batches_of(told) < self._wanted_batches:
                raise self._has_fewer("has", self._batches_of(told))
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
                    f"FromDataset: {name!r} has the shape {shape} in {self._name}; all but a "
                    "batch's rows must be known and the same for every example. Pad it, or state "
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
            # Otherwise parallel calls share the two threads that tensorflow is kept to.
            options = type(dataset.options())()
            options.threading.private_threadpool_size = os.cpu_count()
            dataset = dataset.with_options(options)
        num_made = start
        for batch in self._read(dataset.as_numpy_iterator()):
            num_made += 1
            leaves = filled("FromDataset", self._name, batch, self.batch_size)
            yield {name: leaf[rows] for name, leaf in leaves.items()}
        if self._wanted_batches is not None and num_made < self._wanted_batches:
            raise self._has_fewer("ended after", num_made)

    def _read(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Yields the elements; raises ConfigError for what tensorflow cannot read."""
        try:
            yield from elements
        except self._tf.errors.OpError as error:
            words = re.sub(r"\{\{.*?\}\}", "", error.message or str(error)).strip()
            words = shown(words.splitlines()[0], 500).rstrip(".")
            raise ConfigError(
                f"FromDataset: {self._name} cannot be read: {words}. Mend the dataset."
            ) from error

    def _has_fewer(self, verb: str, num_found: int) -> ConfigError:
        return ConfigError(
            f"FromDataset: {self._name} {verb} {num_found} batches, but num_batches is "
            f"{self._wanted_batches}. Lower it, or leave it out, and they are counted."
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
        """Why batches may differ between runs, by the graph and by trying, and a hash of two."""
        first, again = (
            list(itertools.islice(self.batches_from(0, self.whole_or(None)), _NUM_COMPARED))
            for _ in range(2)
        )
        differences = (difference(*pair) for pair in zip(first, again, strict=True))
        result = next((item for item in differences if item), None)
        return why_nondeterministic(self._tf, self._dataset) or result, digest_of(first)

    @functools.cached_property
    def _dataset(self) -> Any:
        """A dataset to examine: its second pass is shuffled in another way."""
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
                f"FromDataset: {self._name} returns a {type(dataset).__name__}; a tf.data.Dataset "
                "was wanted."
            )
        return dataset

    @functools.cached_property
    def _num_elements(self) -> int | None:
        """The number of the dataset's elements, or None if it has no end."""
        result = int(self._dataset.cardinality())
        if result == self._tf.data.UNKNOWN_CARDINALITY:
            result = self._counted()
        if result == 0:
            raise ConfigError(
                f"FromDataset: {self._name} has 0 elements; wanted is one at least. Make it of "
                "more data, or filter less."
            )
        return None if result == self._tf.data.INFINITE_CARDINALITY else result

    def _counted(self) -> int:
        """Returns the number of elements of a pass, after reading them all."""
        _log.info("counting the elements of %s, once through: %s", self._name, _INSTEAD)
        count, said_at = 0, time.monotonic()
        for _ in self._read(iter(self._dataset)):
            count += 1
            if time.monotonic() - said_at > _SECONDS_BETWEEN_COUNTS:
                _log.info("counted %s elements of %s so far", f"{count:,}", self._name)
                said_at = time.monotonic()
        return count

    @functools.cached_property
    def _element(self) -> dict[str, tuple[tuple[int | None, ...], Any]]:
        """The shape and dtype of each leaf of an element."""
        spec = self._dataset.element_spec
        tensors = self._tf.TensorSpec
        if not isinstance(spec, dict) or not all(isinstance(s, tensors) for s in spec.values()):
            raise ConfigError(
                f"FromDataset: the elements of {self._name} are {spec}; wanted is a dict of dense "
                "tensors by name, such as {'ids': ..., 'labels': ...}. End the dataset with a map "
                "that makes one."
            )
        return {
            name: (tuple(item.shape.as_list()), item.dtype.as_numpy_dtype)
            for name, item in spec.items()
        }

    @property
    def _name(self) -> str:
        return function_name(self.make_dataset)


_log = logging.getLogger(__name__)
