"""Pads a batch with rows of weight 0 so that it splits evenly over devices and microbatches."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.batch_sharding import num_rows_of

PyTree = Any


def num_missing_rows(inputs: Mapping[str, PyTree], multiple: int, parts: str) -> int:
    """Returns the number of padding rows that make the batch size a multiple of `multiple`.

    Args:
      inputs: Arrays [B, ...], or their shapes.
      multiple: The number that the padded batch size must be divisible by.
      parts: Describes what the batch is split over, for the error message, such as
        "4 microbatches".

    Raises:
      ConfigError: The batch needs padding rows, but has no leaf "weights" to mark these rows.
    """
    num_rows = num_rows_of(inputs)
    num_missing = -num_rows % multiple
    if num_missing and "weights" not in inputs:
        raise ConfigError(
            f"A batch of {num_rows} rows cannot be split evenly over {parts}, and it cannot be "
            f"padded, because it has no leaf 'weights', only {sorted(inputs)}. Make the batch size "
            f"a multiple of {multiple}, or add a weight of 1.0 per row and use it in the task's "
            "loss."
        )
    return num_missing


def with_padding_rows(inputs: Mapping[str, PyTree], num_missing: int) -> Mapping[str, PyTree]:
    """Appends `num_missing` copies of the first row, with `weights` set to 0.

    Rows of zeros would not be safe: their loss could be NaN, and 0 times NaN is still NaN.
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
    """Returns the size of `weights`, or the batch size if the batch has no `weights`."""
    return inputs["weights"].size if "weights" in inputs else num_rows_of(inputs)
