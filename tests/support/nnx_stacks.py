"""Stacks of layers in plain Flax NNX, with or without graph mode."""

from collections.abc import Callable
from typing import Any

from flax import nnx


def in_vmap(make: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Returns `nnx.vmap` of a function that creates a module; the stacked dims get an axis name."""
    if name is None:
        return nnx.vmap(make)
    if nnx.set_graph_mode.current_value():
        return nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: name})
    # With trees, nnx.vmap does not change metadata.
    return nnx.vmap(nnx.transform_metadata(make, partition=name))
