"""A batch's weights, and rows without one by which it divides over devices or microbatches."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.inputs import num_rows_of

PyTree = Any


def num_missing_rows(inputs: Mapping[str, PyTree], multiple: int, parts: str) -> int:
    """Returns the rows that a batch lacks to a multiple.

    Args:
      inputs: arrays [B, ...], or their shapes.
      parts: what its rows are divided over, for the message: "4 microbatches".

    Raises:
      ConfigError: it lacks some, and has no leaf "weights" to say that they count for nothing.
    """
    num_rows = num_rows_of(inputs)
    num_missing = -num_rows % multiple
    if num_missing and "weights" not in inputs:
        raise ConfigError(
            f"A batch has {num_rows} rows, which {parts} do not divide, and no leaf 'weights' to "
            f"mark rows that fill it up: it has {sorted(inputs)}. Make the batch size a multiple "
            f"of {multiple}, or give each row a weight (1.0) that the task's loss is weighted by."
        )
    return num_missing


def with_padding_rows(inputs: Mapping[str, PyTree], num_missing: int) -> Mapping[str, PyTree]:
    """Returns a batch with so many copies of its first row behind it, of which `weights` are 0.

    Of rows of zeros a loss may be NaN, and 0 times NaN is NaN in a gradient.
    """
    if not num_missing:
        return inputs

    def filled(name: str, x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        rows = jnp.broadcast_to(x[:1], (num_missing, *x.shape[1:]))
        return jnp.concatenate([x, jnp.zeros_like(rows) if name == "weights" else rows])

    return {name: jax.tree.map(functools.partial(filled, name), x) for name, x in inputs.items()}


def num_weights_of(inputs: Mapping[str, PyTree]) -> int:
    """Returns the sum of a batch's weights if each is 1: the size of `weights`, or its rows."""
    return inputs["weights"].size if "weights" in inputs else num_rows_of(inputs)
