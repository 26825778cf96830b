"""Arrays in a device's memory or in its host's, and moves between the two.

Arrays in the host's memory are sharded as on the devices: each device's part is in the memory of
its host, in pages that the device can read (`pinned_host`). In a program the memory is part of
JAX's types: an array has to be moved to the device before it is used.
"""

from typing import Any

import jax

__all__ = ("to_device",)

PyTree = Any

DEVICE, HOST = "device", "pinned_host"


def is_on_host(x: Any) -> bool:
    """Returns True if an array, or a value of a program, is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: PyTree) -> PyTree:
    """Returns a tree of a program with all its arrays on the device."""
    space = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, space) if is_on_host(x) else x, tree)


def to_host(x: jax.Array) -> jax.Array:
    """Returns an array of a program, moved to the host."""
    return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)
