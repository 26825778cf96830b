"""Stacked weights as arrays of their own, a layer each: the form that decoding reads."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayersApart:
    """A stacked weight, taken apart along its first dim.

    A loop that takes a layer out of a stack copies it, in decoding for each token; an array of its
    own, [...] without the stacked dim, it reads where that lies.
    """

    layers: list[Any]


def is_apart(x: Any) -> bool:
    """Returns True for a weight whose layers are apart; to be `is_leaf` of `jax.tree`."""
    return isinstance(x, LayersApart)


def has_layers_apart(tree: PyTree) -> bool:
    """Returns True if a weight in the tree has its layers apart."""
    return any(map(is_apart, jax.tree.leaves(tree, is_leaf=is_apart)))


def apart_like(
    like: PyTree, tree: PyTree,
    layers_of: Callable[[Any, list[Any]], list[Any]] = lambda stack, like: list(stack),
) -> PyTree:
    """Returns a tree whose stacks are taken apart where those of another tree are.

    Args:
      like: with a `LayersApart` of any leaves for each stack to take apart.
      tree: of arrays, JAX's or NumPy's.
      layers_of: takes a stack and the leaves that are like its layers, and returns its layers.
    """
    return jax.tree.map(
        lambda like, x: LayersApart(layers_of(x, like.layers)) if is_apart(like) else x,
        like, tree, is_leaf=is_apart,
    )
