"""Per-device digests of a train state.

Replicas have equal digests, and the sum of digests over an array's blocks is the same on every
mesh.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.memory_spaces import to_device
from praxis_tools.certificates import element_hash

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ReplicaMismatch:
    """An array whose replicas differ.

    Attributes:
      leaf: Path of the array.
      positions: Devices whose replica differs from the majority, as positions in the mesh.
      axes: Mesh axes over which the array is replicated.
    """

    leaf: str
    positions: tuple[int, ...]
    axes: tuple[str, ...]


class StateDigests:
    """Computes the digests of states that share a layout and a mesh.

    Args:
      layout: Layout of the states.
      mesh: Mesh on which the states are placed.
    """

    def __init__(self, layout: StateLayout, mesh: Mesh):
        self._mesh, self._leaves = mesh, list(layout.leaves())
        digest_on_each_device = jax.shard_map(
            self._digest_blocks,
            mesh=mesh,
            in_specs=(jax.tree.leaves(layout.specs),),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )
        self._jitted = jax.jit(
            lambda state: digest_on_each_device(jax.tree.leaves(to_device(state))),
            in_shardings=(layout.shardings(mesh),),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        self._run: Callable[[PyTree], jax.Array] = self._jitted
        self._abstract = layout.abstract(mesh)

    def compile(self) -> None:
        """Compiles the computation before the first call."""
        self._run = self._jitted.lower(self._abstract).compile()

    def __call__(self, state: PyTree) -> "Digests":
        """Returns the digests of a state, blocking until the devices have computed them."""
        return Digests(self._mesh, self._leaves, np.asarray(self._run(state)))

    def _digest_blocks(self, blocks: list[jax.Array]) -> jax.Array:
        """Returns the digests of one device's blocks, as uint32 [1, leaves, 2]."""
        digests = []
        for leaf, x in zip(self._leaves, blocks, strict=True):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x = jax.random.key_data(x)
                digests.append(element_hash.digest(x, element_hash.indices(x.shape, x.shape)))
                continue
            entries_and_sizes = zip(leaf.spec, x.shape, strict=True)
            starts = [self._block_start(entry, size) for entry, size in entries_and_sizes]
            index = element_hash.indices(x.shape, leaf.shape, starts)
            digests.append(element_hash.digest(x, index, _logical_mask(leaf, x, starts)))
        return jnp.stack(digests)[None]

    def _block_start(self, entry: Any, size: int) -> jax.Array:
        """Returns the start of this device's block along a dim with the given spec entry."""
        block = jnp.zeros((), jnp.int32)
        for axis in axes_of(entry):
            block = block * self._mesh.shape[axis] + jax.lax.axis_index(axis)
        return block * size


def _logical_mask(leaf: LeafLayout, x: jax.Array, starts: list[jax.Array]) -> jax.Array | None:
    """Returns a mask of the elements that are not padding, or None if the leaf has no padding."""
    mask = None
    for dim, (size, padded_size) in enumerate(zip(leaf.shape, leaf.padded_shape, strict=True)):
        if size != padded_size:
            position = starts[dim] + jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
            mask = position < size if mask is None else mask & (position < size)
    return mask


class Digests:
    """The digests of one state.

    Args:
      mesh: Mesh on which the state is placed.
      leaves: Layout of each array in the state.
      by_device: Digests, uint32 [devices, leaves, 2], with the devices in the mesh's order.
    """

    def __init__(self, mesh: Mesh, leaves: list[LeafLayout], by_device: np.ndarray):
        self._mesh, self._leaves, self._by_device = mesh, leaves, by_device

    @functools.cached_property
    def by_leaf(self) -> dict[str, str]:
        """Maps the path of each array to its digest, which does not depend on the mesh."""
        digests = {}
        for number, leaf in enumerate(self._leaves):
            first_replicas = [positions[0] for positions in self._replica_groups(leaf)]
            total = self._by_device[first_replicas, number].astype(np.uint64).sum(0) % 2**32
            digests[leaf.path] = "".join(f"{x:08x}" for x in total.tolist())
        return digests

    @functools.cached_property
    def of_state(self) -> str:
        """The digest of the entire state, which does not depend on the mesh."""
        return _hash(json.dumps(self.by_leaf, sort_keys=True).encode())

    def by_position(self) -> list[str]:
        """Returns the digest of each device's blocks, in the mesh's order."""
        return [_hash(of_device.tobytes()) for of_device in self._by_device]

    def to_save(self) -> dict[str, Any]:
        """Returns the digests as JSON values to save with the state."""
        return {
            "state": self.of_state,
            "leaves": self.by_leaf,
            "places": self.by_position(),
            "mesh": dict(self._mesh.shape),
        }

    def replica_mismatches(self) -> Iterator[ReplicaMismatch]:
        """Yields a mismatch for each array whose replicas differ."""
        for number, leaf in enumerate(self._leaves):
            wrong: list[int] = []
            for positions in self._replica_groups(leaf):
                values, value_of_position, counts = np.unique(
                    self._by_device[positions, number],
                    axis=0,
                    return_inverse=True,
                    return_counts=True,
                )
                if len(values) > 1:
                    # Without a majority, any replica may be wrong.
                    has_majority = np.sum(counts == counts.max()) == 1
                    majority = np.argmax(counts) if has_majority else -1
                    wrong += [
                        position
                        for position, value in zip(
                            positions, value_of_position.reshape(-1), strict=True
                        )
                        if value != majority
                    ]
            if wrong:
                yield ReplicaMismatch(leaf.path, tuple(sorted(wrong)), self._replicated_axes(leaf))

    def differences_from(self, other: "Digests") -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (path, device positions) for each array that differs from another state."""
        for number, leaf in enumerate(self._leaves):
            differs = (self._by_device[:, number] != other._by_device[:, number]).any(-1)
            if differs.any():
                yield leaf.path, tuple(np.flatnonzero(differs).tolist())

    def _replicated_axes(self, leaf: LeafLayout) -> tuple[str, ...]:
        split = {axis for entry in leaf.spec for axis in axes_of(entry)}
        return tuple(a for a, size in self._mesh.shape.items() if size > 1 and a not in split)

    def _replica_groups(self, leaf: LeafLayout) -> list[list[int]]:
        """Returns the positions of the devices that store each block of an array."""
        devices, names = self._mesh.devices, self._mesh.axis_names
        split = {axis for entry in leaf.spec for axis in axes_of(entry)}
        split_axes_first = sorted(range(len(names)), key=lambda i: names[i] not in split)
        positions = np.arange(devices.size).reshape(devices.shape).transpose(split_axes_first)
        num_blocks = math.prod(self._mesh.shape[axis] for axis in split)
        return positions.reshape(num_blocks, -1).tolist()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
