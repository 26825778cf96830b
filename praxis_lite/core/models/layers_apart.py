"""Stacked weights as arrays of their own, a layer each: the form that decoding reads."""

import dataclasses
import functools
from typing import Any

import jax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayersApart:
    """A stacked weight, taken apart along its first dims.

    A loop that takes a layer out of a stack copies it, in decoding for each token; an array of its
    own, [...] without the stacked dims, it reads where that lies.
    """

    layers: list[Any]


def layers_of(blocks: Any, num_layers: int, num_stacked: int = 1) -> list[Any] | None:
    """Returns the layers of a module of stacks, each a module, if they are apart; else None."""
    is_apart = lambda x: isinstance(x, LayersApart)  # noqa: E731
    if not any(map(is_apart, jax.tree.leaves(blocks, is_leaf=is_apart))):
        return None

    def layer(index: int) -> Any:
        return jax.tree.map(
            # What is no weight, such as a layer's sums, is a stack that each pass makes anew.
            lambda x: x.layers[index] if is_apart(x)
            else x.reshape(-1, *x.shape[num_stacked:])[index],
            blocks, is_leaf=is_apart,
        )

    return [layer(index) for index in range(num_layers)]
