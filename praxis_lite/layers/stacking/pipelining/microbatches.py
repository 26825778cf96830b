"""Divides a batch into microbatches."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.layers.base.calls import require_positive

# M microbatches.


def check_microbatches(
    layer: Any, num_microbatches: int | None, microbatch_size: int | None
) -> None:
    """Raises ConfigError unless exactly one of the two settings is a positive number."""
    if (num_microbatches is None) == (microbatch_size is None):
        raise ConfigError(
            "Pipeline requires exactly one of num_microbatches and microbatch_size, but "
            f"num_microbatches is {num_microbatches} and microbatch_size is {microbatch_size}."
        )
    if num_microbatches is not None:
        require_positive(layer, num_microbatches=num_microbatches)
    if microbatch_size is not None:
        require_positive(layer, microbatch_size=microbatch_size)


def num_microbatches_of(
    num_rows: int,
    num_microbatches: int | None,
    microbatch_size: int | None,
    *,
    must_divide: bool = False,
) -> int:
    """Returns the number of microbatches for a batch.

    Args:
      num_rows: Batch size.
      num_microbatches: See Pipeline; None if microbatch_size is set.
      microbatch_size: See Pipeline; None if num_microbatches is set.
      must_divide: Whether to reject batches that need padding rows, because the blocks assign
        variables, which padding rows would affect.

    Raises:
      ConfigError: must_divide is set, and the batch needs padding rows.
    """
    by_size = num_microbatches is None
    name = "microbatch_size" if by_size else "num_microbatches"
    actual = microbatch_size if by_size else num_microbatches
    assert actual is not None
    if must_divide and num_rows % actual:
        raise ConfigError(
            f"Pipeline.{name} is {actual}; expected a divisor of the batch size {num_rows}, "
            "because the blocks update variables, and padding rows in the last microbatches "
            f"would change these updates. Change {name} or the batch size."
        )
    return -(-num_rows // actual) if by_size else actual


def arrays_of(inputs: Mapping[str, Any], num_rows: int) -> tuple[dict, dict]:
    """Splits inputs into arrays with a batch dim and all others (None, flags, scalars).

    Raises:
      ConfigError: The first dim of an array is neither `num_rows` nor 1.
    """
    arrays: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in inputs.items():
        leaves = jax.tree.leaves(value)
        has_rows = leaves and all(jnp.ndim(leaf) > 0 for leaf in leaves)
        (arrays if has_rows else others)[name] = value
        for leaf in leaves if has_rows else ():
            if leaf.shape[0] not in (1, num_rows):
                raise ConfigError(
                    f"Pipeline's input {name!r} has shape {leaf.shape}; expected its first dim to "
                    f"be {num_rows}, the batch size of x, or 1."
                )
    return arrays, others


def to_microbatches(x: jax.Array, num_microbatches: int, num_streams: int) -> jax.Array:
    """Splits rows [rows, ...] into microbatches [M, rows / M, ...], padded with copies of row 0.

    A microbatch consists of every M-th row, so that each device contributes rows to every
    microbatch.
    """
    if num_padding := -x.shape[0] % num_microbatches:
        x = jnp.concatenate([x, jnp.broadcast_to(x[:1], (num_padding, *x.shape[1:]))])
    shape = num_streams, x.shape[0] // num_microbatches, num_microbatches // num_streams
    x = jnp.swapaxes(x.reshape(*shape, *x.shape[1:]), 1, 2)
    return x.reshape(num_microbatches, shape[1], *x.shape[3:])


def to_rows(x_M: jax.Array, num_streams: int) -> jax.Array:
    """Reshapes microbatches [M, rows / M, ...] to [rows, ...], in the original order of rows."""
    num_microbatches, microbatch_size = x_M.shape[:2]
    shape = num_streams, num_microbatches // num_streams, microbatch_size
    x = jnp.swapaxes(x_M.reshape(*shape, *x_M.shape[2:]), 1, 2)
    return x.reshape(num_microbatches * microbatch_size, *x_M.shape[2:])
