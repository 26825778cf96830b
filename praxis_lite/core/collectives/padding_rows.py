"""Pads a batch with rows of weight 0 until it divides over devices or microbatches."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.batch_sharding import num_rows_of

PyTree = Any


def num_missing_rows(inputs: Mapping[str, PyTree], multiple: int, parts: str) -> int:
    """Returns the number of rows that a batch needs to be a multiple.

    Args:
      inputs: arrays [B, ...], or their shapes.
      parts: what its rows are divided over, for the message, such as "4 microbatches".

    Raises:
      ConfigError: it needs rows, and has no leaf "weights" to give them weight 0.
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
    """Appends copies of the first row with `weights` 0 to a batch.

    With rows of zeros a loss may be NaN, and so may its gradient, as 0 times NaN is NaN.
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
    """Returns the sum of a batch's weights if all are 1: the size of `weights`, or its rows."""
    return inputs["weights"].size if "weights" in inputs else num_rows_of(inputs)
