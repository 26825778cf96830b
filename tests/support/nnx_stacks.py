"""Stacks of layers as users of Flax make them, with its graph mode or without."""

from collections.abc import Callable
from typing import Any

from flax import nnx


def in_vmap(make: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Returns `nnx.vmap` of a function that makes a module, whose stacks of weights have a name."""
    if name is None:
        return nnx.vmap(make)
    if nnx.set_graph_mode.current_value():
        return nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: name})
    # Of trees nnx.vmap leaves metadata alone.
    return nnx.vmap(nnx.transform_metadata(make, partition=name))
