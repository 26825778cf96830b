"""Reads stored arrays into shards on a mesh. Each process reads only its own shards."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.checkpoints.steps.manifest import Leaves, check_same, manifest_leaf
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout, TrainState
from praxis_lite.host.object_stores import AnyPath

__all__ = ("read_state",)

# Maximum number of bytes that a process reads at a time, unless a single array is larger. The host
# needs this memory once for the arrays, and again for the decoded chunks.
_MAX_GROUP_BYTES = 1 << 30
# Number of arrays that are read at a time. Each needs memory for its shards and for its decoded
# chunks. In an object store, each read waits for an answer, so more of them are needed.
_NUM_THREADS, _NUM_THREADS_IN_STORE = 4, 32

Bounds = tuple[tuple[int, int], ...]  # (start, stop) in each dim.


class ReadableArray(Protocol):
    """An array whose blocks can be read, from an object store, from disk or from memory."""

    @property
    def is_in_store(self) -> bool:
        """Whether the array is in an object store, so that more arrays are read at a time."""

    def read_block(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a block of the unpadded array."""


def read_state(
    step_dir: AnyPath,
    saved: Leaves,
    arrays: Callable[[], Mapping[str, ReadableArray]],
    layout: StateLayout,
    mesh: Mesh,
    opt_states_keys: Sequence[str] | None = None,
) -> TrainState:
    """Reads a stored state onto a mesh.

    Args:
      step_dir: The step's folder, whose name is the step's number.
      saved: The manifest entries of the stored arrays.
      arrays: Function that returns the stored arrays, keyed by path. It is called after `saved` is
        checked.
      layout: Layout of the complete TrainState.
      opt_states_keys: Keys of the opt_states to check and read, or None for all.

    Raises:
      ConfigError: The stored leaves, unpadded shapes or dtypes differ from the layout, or an array
        cannot be read.
    """
    prefixes: tuple[str, ...] = ("mdl_vars/", "opt_states/")
    if opt_states_keys is not None:
        prefixes = ("mdl_vars/", *(f"opt_states/{key}/" for key in opt_states_keys))
    # Append "/" to each path, because opt_states[key] may be a single leaf.
    saved = {path: leaf for path, leaf in saved.items() if f"{path}/".startswith(prefixes)}
    leaves = {x.path: x for x in layout.leaves() if f"{x.path}/".startswith(prefixes)}
    check_same(step_dir, saved, {path: manifest_leaf(leaf) for path, leaf in leaves.items()})
    read = read_arrays(arrays(), leaves, mesh)
    shapes, opt_shapes = layout.shapes.mdl_vars, layout.shapes.opt_states
    keys = sorted(opt_shapes) if opt_states_keys is None else opt_states_keys
    structure = jax.tree.structure((shapes, {key: opt_shapes[key] for key in keys}))
    step = jax.device_put(np.int32(step_dir.name), NamedSharding(mesh, PartitionSpec()))
    return TrainState(step, *jax.tree.unflatten(structure, read.values()))


def read_arrays(
    arrays: Mapping[str, ReadableArray], leaves: Mapping[str, LeafLayout], mesh: Mesh
) -> dict[str, jax.Array]:
    """Reads arrays into their shards, padded for the mesh.

    Args:
      arrays: The stored arrays, keyed by path. They may include arrays that are not read.
      leaves: The layout of each array to read, keyed by path. Unpadded shapes and dtypes must match
        the stored arrays.
      mesh: The mesh.

    Returns:
      The padded arrays, keyed by path, in the order of `leaves`.

    Raises:
      ConfigError: An array cannot be decoded, or does not fit into host memory.
    """
    by_path: dict[str, jax.Array] = {}
    num_devices = len(mesh.local_devices)
    sizes = {
        path: leaf.bytes_per_device * min(leaf.num_shards, num_devices)
        for path, leaf in leaves.items()
    }
    is_in_store = any(arrays[path].is_in_store for path in leaves)
    for group in in_groups(sizes, _MAX_GROUP_BYTES):
        with ThreadPoolExecutor(_NUM_THREADS_IN_STORE if is_in_store else _NUM_THREADS) as pool:
            read = pool.map(lambda path: _read(arrays[path], leaves[path], mesh), group)
            by_path |= dict(zip(group, read, strict=True))
    return by_path


def in_groups(sizes: Mapping[str, int], max_size: int) -> Iterator[list[str]]:
    """Groups names in order; each group has one name or a total size of at most `max_size`."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > max_size:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _read(array: ReadableArray, leaf: LeafLayout, mesh: Mesh) -> jax.Array:
    """Reads an array into its shards on a mesh."""
    sharding = leaf.sharding(mesh)

    def bounds_of(index: tuple[slice, ...] | None) -> Bounds:
        assert index is not None
        dims = zip(index, leaf.padded_shape, strict=True)
        return tuple(dim_slice.indices(size)[:2] for dim_slice, size in dims)

    @functools.cache
    def read(bounds: Bounds) -> np.ndarray:
        logical = [(min(a, n), min(b, n)) for (a, b), n in zip(bounds, leaf.shape, strict=True)]
        return array.read_block(tuple(slice(a, b) for a, b in logical))

    indices = sharding.addressable_devices_indices_map(leaf.padded_shape).values()
    shards = {bounds_of(index) for index in indices}
    box = tuple(
        (min(a for a, _ in dim), max(b for _, b in dim)) for dim in zip(*shards, strict=True)
    )
    # A read decodes complete chunks, so read all shards of this process at once if they fill a box.
    box_size, *shard_sizes = (prod(b - a for a, b in bounds) for bounds in (box, *shards))
    is_box = box_size == sum(shard_sizes)

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = bounds_of(index)
        outer = box if is_box else bounds
        dims = zip(bounds, outer, strict=True)
        part = tuple(slice(a - start, b - start) for (a, b), (start, _) in dims)
        logical = np.asarray(read(outer)[part])  # Indexing a 0-d array returns a scalar.
        # Pad each shard, because padding the box would need its memory twice.
        pads = [(0, b - a - size) for (a, b), size in zip(bounds, logical.shape, strict=True)]
        return np.pad(logical, pads) if any(pad for _, pad in pads) else logical

    return jax.make_array_from_callback(leaf.padded_shape, sharding, block, dtype=leaf.dtype)
