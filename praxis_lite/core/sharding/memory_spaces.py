"""A device's memory or its host's: where an array lies, and its way from one to the other.

What lies in the host's memory is sharded as on the devices: each device's part is in the memory of
the host that the device hangs on, in pages that the device reads by itself (`pinned_host`). In a
program JAX keeps the two apart by type: an array is moved before anything is computed of it.
"""

from typing import Any

import jax

PyTree = Any

DEVICE, HOST = "device", "pinned_host"


def is_on_host(x: Any) -> bool:
    """Returns True if an array, or a value of a program, lies in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: PyTree) -> PyTree:
    """Returns a tree of a program with all its arrays on the device."""
    space = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, space) if is_on_host(x) else x, tree)


def to_host(x: jax.Array) -> jax.Array:
    """Returns an array of a program, moved to the host."""
    return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)
