"""Moves arrays between device memory and host memory.

Arrays in host memory are sharded like arrays on devices: each device's shard is stored in its
host's memory, in pinned pages that the device can read (`pinned_host`). In a traced function, the
memory space is part of an array's type, and arrays must be moved to the device before use.
"""

from typing import Any

import jax

__all__ = ("to_device",)

PyTree = Any

DEVICE, HOST = "device", "pinned_host"


def is_on_host(x: Any) -> bool:
    """Returns whether an array or tracer is in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """Moves all arrays in a traced tree to device memory."""
    space = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, space) if is_on_host(x) else x, tree)


def to_host(x: jax.Array) -> jax.Array:
    """Moves a traced array to host memory."""
    return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)
