"""Pads a batch with rows of weight 0, so that devices or microbatches divide its rows."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.batch_sharding import num_rows_of

PyTree = Any


def num_missing_rows(inputs: Mapping[str, PyTree], multiple: int, parts: str) -> int:
    """Returns the number of rows to add so that the number of rows is a multiple of `multiple`.

    Args:
      inputs: Arrays [B, ...], or their shapes.
      multiple: The required divisor.
      parts: What the rows are divided over, for the message, such as "4 microbatches".

    Raises:
      ConfigError: Rows must be added, but there is no leaf "weights" to give them weight 0.
    """
    num_rows = num_rows_of(inputs)
    num_missing = -num_rows % multiple
    if num_missing and "weights" not in inputs:
        raise ConfigError(
            f"A batch has {num_rows} rows, which {parts} do not divide, and it has no leaf "
            f"'weights' to mark padding rows, only {sorted(inputs)}. Make the batch size a "
            f"multiple of {multiple}, or add a weight (1.0) per row that the task's loss uses."
        )
    return num_missing


def with_padding_rows(inputs: Mapping[str, PyTree], num_missing: int) -> Mapping[str, PyTree]:
    """Appends copies of a batch's first row with `weights` 0.

    Not rows of zeros: their loss could be NaN, and so could its gradient, as 0 times NaN is NaN.
    """
    if not num_missing:
        return inputs

    def pad(name: str, x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        rows = jnp.broadcast_to(x[:1], (num_missing, *x.shape[1:]))
        return jnp.concatenate([x, jnp.zeros_like(rows) if name == "weights" else rows])

    return {name: jax.tree.map(functools.partial(pad, name), x) for name, x in inputs.items()}


def num_weights_of(inputs: Mapping[str, PyTree]) -> int:
    """Returns the sum of a batch's weights if all are 1: the size of `weights`, or of the batch."""
    return inputs["weights"].size if "weights" in inputs else num_rows_of(inputs)
