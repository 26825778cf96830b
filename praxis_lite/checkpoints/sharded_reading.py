"""Stored arrays read into the shards of a mesh: each process reads what its devices hold."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.checkpoints.steps.manifest import Leaves, check_same, manifest_leaf
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout, TrainState

__all__ = ("read_state",)

# Bytes that are read at a time: the host's share of a large state must not be in memory twice.
_MOST_BYTES_AT_ONCE = 4 * 10**9
_NUM_THREADS = 16


class ReadableArray(Protocol):
    """An array whose parts can be read, from disk or from memory."""

    def read_block(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part that lies within the unpadded array."""


def read_state(
    step_dir: Path, saved: Leaves, arrays: Callable[[], Mapping[str, ReadableArray]],
    layout: StateLayout, mesh: Mesh, opt_states_keys: Sequence[str] | None = None,
) -> TrainState:
    """Returns a state that was stored, on a mesh.

    Args:
      step_dir: ends with the step's number; the rest says in messages where it is.
      saved: a manifest's entries of what is stored.
      arrays: returns it, by path; called once it was compared.
      layout: of the whole TrainState.
      opt_states_keys: of its opt_states, those that are compared and read; None: all.

    Raises:
      ConfigError: it has other leaves, unpadded shapes or dtypes, or cannot be read.
    """
    kept = ("mdl_vars/", "opt_states/")
    if opt_states_keys is not None:
        kept = ("mdl_vars/", *(f"opt_states/{key}/" for key in opt_states_keys))
    saved = {path: leaf for path, leaf in saved.items() if f"{path}/".startswith(kept)}
    leaves = {x.path: x for x in layout.leaves() if f"{x.path}/".startswith(kept)}
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
    """Returns padded arrays in the order of `leaves`, each in its shards.

    Args:
      arrays: by path; more than are wanted.
      leaves: how each is wanted, by path; its unpadded shape and dtype are those stored.

    Raises:
      ConfigError: an array cannot be decoded, or does not fit into the host's memory.
    """
    result = {}
    sizes = {
        path: prod(leaf.padded_shape) * leaf.dtype.itemsize for path, leaf in leaves.items()
    }
    for batch in in_groups(sizes, _MOST_BYTES_AT_ONCE):
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            read = pool.map(lambda path: _read(arrays[path], leaves[path], mesh), batch)
            result |= dict(zip(batch, read, strict=True))
    return result


def in_groups(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yields the names in order, in groups of at most this size, or of a single name."""
    group, total = [], 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _read(array: ReadableArray, leaf: LeafLayout, mesh: Mesh) -> jax.Array:
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # Replicas are read once.

    def block(index: tuple[slice, ...]) -> np.ndarray:
        ends = tuple(
            item.indices(size)[:2] for item, size in zip(index, leaf.padded_shape, strict=True)
        )
        if ends not in blocks:
            inner = [(min(a, n), min(b, n)) for (a, b), n in zip(ends, leaf.shape, strict=True)]
            read = array.read_block(tuple(slice(a, b) for a, b in inner))
            pads = [(0, b - a - size) for (a, b), size in zip(ends, read.shape, strict=True)]
            blocks[ends] = np.pad(read, pads) if any(pad for _, pad in pads) else read
        return blocks[ends]

    return jax.make_array_from_callback(
        leaf.padded_shape, leaf.sharding(mesh), block, dtype=leaf.dtype
    )
