"""The forms of a pipeline's weights: by layer, as a Repeat's, and by stage."""

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError

# R repeats, S stages, P layers of one stage in one repeat, L layers.

PyTree = Any


def to_repeated(params: PyTree, *, num_stacked: int = 3) -> PyTree:
    """Returns a Pipeline's variables, [R, S, P, ...], as those of a Repeat, [L, ...].

    Args:
      params: a Pipeline's part of `mdl_vars["params"]`, of gradients, of a cache.
      num_stacked: 2 of a Pipeline whose stages have unequal layers, [R, L / R, ...].
    """
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[num_stacked:]), params)


def from_repeated(params: PyTree, *, num_stages: int, circular_repeat: int = 1) -> PyTree:
    """Returns a Repeat's variables, [L, ...], as those of a Pipeline.

    Raises:
      ConfigError: the repeats do not divide the layers.
    """
    num_layers = jax.tree.leaves(params)[0].shape[0]
    if num_layers % circular_repeat:
        raise ConfigError(
            f"from_repeated: {num_layers} layers do not divide over circular_repeat "
            f"{circular_repeat}. Make num_layers a multiple of it."
        )
    return in_stages_form(params, stack_shape(num_layers, num_stages, circular_repeat))


def stack_shape(num_layers: int, num_stages: int, circular_repeat: int) -> tuple[int, ...]:
    """Returns the shape of a Pipeline's stack: [R, S, P], or [R, L / R] if layers are unequal."""
    if num_layers % (circular_repeat * num_stages):
        return circular_repeat, num_layers // circular_repeat
    return circular_repeat, num_stages, num_layers // (circular_repeat * num_stages)


def in_stages_form(tree: PyTree, stack_shape: tuple[int, ...]) -> PyTree:
    """Returns [L, ...] as [*stack_shape, ...]."""
    return jax.tree.map(lambda a: a.reshape(*stack_shape, *a.shape[1:]), tree)


def with_free_places(tree: PyTree, num_stages: int) -> PyTree:
    """Returns [R, L / R, ...] as [R, S, P, ...]; the places behind the last layer have zeros."""

    def placed(a: jax.Array) -> jax.Array:
        num_places = -(-a.shape[1] // num_stages)
        padding = (0, num_stages * num_places - a.shape[1])
        a = jnp.pad(a, [(0, 0), padding, *[(0, 0)] * (a.ndim - 2)])
        return a.reshape(a.shape[0], num_stages, num_places, *a.shape[2:])

    return jax.tree.map(placed, tree)


def without_free_places(tree: PyTree, num_layers: int) -> PyTree:
    """Returns the inverse of `with_free_places`, for so many layers of a repeat."""
    return jax.tree.map(
        lambda a: a.reshape(a.shape[0], -1, *a.shape[3:])[:, :num_layers], tree
    )
