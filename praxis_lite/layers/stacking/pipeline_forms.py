"""The forms that a pipeline gives arrays: weights by stage, batches by microbatch, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError

# R repeats, S stages, P layers of one stage in one repeat, L = R S P layers, M microbatches.

PyTree = Any


def to_repeated(params: PyTree) -> PyTree:
    """Returns a Pipeline's variables, [R, S, P, ...], as those of a Repeat, [L, ...].

    Args:
      params: a Pipeline's part of `mdl_vars["params"]`, of gradients, of a cache.
    """
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), params)


def from_repeated(params: PyTree, *, num_stages: int, circular_repeat: int = 1) -> PyTree:
    """Returns a Repeat's variables, [L, ...], as those of a Pipeline, [R, S, L / (R S), ...].

    Raises:
      ConfigError: the stages and repeats do not divide the layers.
    """
    num_layers = jax.tree.leaves(params)[0].shape[0]
    num_chunks = circular_repeat * num_stages
    if num_layers % num_chunks:
        raise ConfigError(
            f"from_repeated: {num_layers} layers do not divide over num_stages {num_stages} x "
            f"circular_repeat {circular_repeat}. Make num_layers a multiple of {num_chunks}."
        )
    return in_stages_form(params, (circular_repeat, num_stages, num_layers // num_chunks))


def in_stages_form(tree: PyTree, stack_shape: tuple[int, int, int]) -> PyTree:
    """Returns [L, ...] as [R, S, P, ...]."""
    return jax.tree.map(lambda a: a.reshape(*stack_shape, *a.shape[1:]), tree)


def arrays_of(inputs: Mapping[str, Any], num_rows: int) -> tuple[dict, dict]:
    """Returns the inputs that have rows, and the others (None, flags).

    Raises:
      ConfigError: an array has neither `num_rows` rows nor one; names it.
    """
    arrays, others = {}, {}
    for name, value in inputs.items():
        leaves = jax.tree.leaves(value)
        has_rows = leaves and all(jnp.ndim(leaf) > 0 for leaf in leaves)
        (arrays if has_rows else others)[name] = value
        for leaf in leaves if has_rows else ():
            if leaf.shape[0] not in (1, num_rows):
                raise ConfigError(
                    f"Pipeline's input {name!r} has the shape {leaf.shape}; wanted is x's "
                    f"{num_rows} rows, or 1, as its first dim, so that microbatches can be cut."
                )
    return arrays, others


def to_microbatches(x: jax.Array, num_microbatches: int, num_streams: int) -> jax.Array:
    """Returns [rows, ...] as [M, rows / M, ...].

    The rows of one microbatch are far apart: rows that are split over a mesh axis then give each
    microbatch its share from every device.
    """
    shape = num_streams, x.shape[0] // num_microbatches, num_microbatches // num_streams
    x = jnp.swapaxes(x.reshape(*shape, *x.shape[1:]), 1, 2)
    return x.reshape(num_microbatches, shape[1], *x.shape[3:])


def to_rows(x_M: jax.Array, num_streams: int) -> jax.Array:
    """Returns the inverse of `to_microbatches`."""
    num_microbatches, microbatch_size = x_M.shape[:2]
    shape = num_streams, num_microbatches // num_streams, microbatch_size
    x = jnp.swapaxes(x_M.reshape(*shape, *x_M.shape[2:]), 1, 2)
    return x.reshape(num_microbatches * microbatch_size, *x_M.shape[2:])
