"""Digests of a state by device: equal where replicas are equal, and on every mesh the same sum."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
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
class Stale:
    """An array whose copies differ.

    Attributes:
      leaf: the path of the array.
      places: of the devices that differ from the majority, in the mesh's order.
      axes: along which the array has copies, and the copies differ.
    """

    leaf: str
    places: tuple[int, ...]
    axes: tuple[str, ...]


class StateDigests:
    """Digests of states that share a layout and a mesh, compiled once."""

    def __init__(self, layout: StateLayout, mesh: Mesh):
        self._mesh, self._leaves = mesh, list(layout.leaves())
        axes = mesh.axis_names
        one = jax.shard_map(
            self._of_device, mesh=mesh, in_specs=(jax.tree.leaves(layout.specs),),
            out_specs=PartitionSpec(axes), check_vma=False,
        )
        self._run = jax.jit(
            lambda state: one(jax.tree.leaves(to_device(state))),
            in_shardings=(layout.shardings(mesh),),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        self._abstract = layout.abstract(mesh)

    def compile(self) -> None:
        """Compiles the program, before it is called."""
        self._run = self._run.lower(self._abstract).compile()

    def __call__(self, state: PyTree) -> "Digests":
        """Returns the digests of a state; waits for the devices."""
        return Digests(self._mesh, self._leaves, np.asarray(self._run(state)))

    def _of_device(self, blocks: list[jax.Array]) -> jax.Array:
        digests = []
        for leaf, x in zip(self._leaves, blocks, strict=True):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x = jax.random.key_data(x)
                digests.append(element_hash.digest(x, element_hash.indices(x.shape, x.shape)))
                continue
            along = zip(leaf.spec, x.shape, strict=True)
            starts = [self._start(entry, size) for entry, size in along]
            index = element_hash.indices(x.shape, leaf.shape, starts)
            digests.append(element_hash.digest(x, index, _is_true(leaf, x, starts)))
        return jnp.stack(digests)[None]

    def _start(self, entry: Any, size: int) -> jax.Array:
        """Returns where a device's block begins along a dim."""
        place = jnp.zeros((), jnp.int32)
        for axis in axes_of(entry):
            place = place * self._mesh.shape[axis] + jax.lax.axis_index(axis)
        return place * size


def _is_true(leaf: LeafLayout, x: jax.Array, starts: list[jax.Array]) -> jax.Array | None:
    """Returns where a block has no padding; None: nowhere has it any."""
    counts = None
    for dim, (true, padded) in enumerate(zip(leaf.shape, leaf.padded_shape, strict=True)):
        if true != padded:
            along = starts[dim] + jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
            counts = along < true if counts is None else counts & (along < true)
    return counts


class Digests:
    """The digests of a state.

    Args:
      mesh: on which it is placed.
      leaves: its arrays.
      by_device: uint32 [devices, leaves, 2], in the mesh's order.
    """

    def __init__(self, mesh: Mesh, leaves: list[LeafLayout], by_device: np.ndarray):
        self._mesh, self._leaves, self._by_device = mesh, leaves, by_device

    @functools.cached_property
    def by_leaf(self) -> dict[str, str]:
        """The digest of each array, by its path: the same on every mesh."""
        result = {}
        for number, leaf in enumerate(self._leaves):
            first = [places[0] for places in self._copies(leaf)]
            total = self._by_device[first, number].astype(np.uint64).sum(0) % 2**32
            result[leaf.path] = "".join(f"{x:08x}" for x in total.tolist())
        return result

    @functools.cached_property
    def of_state(self) -> str:
        """The digest of the complete state, the same on every mesh."""
        return _hash(json.dumps(self.by_leaf, sort_keys=True).encode())

    def by_place(self) -> list[str]:
        """Returns a digest of what each device holds, in the mesh's order."""
        return [_hash(np.ascontiguousarray(of_device)) for of_device in self._by_device]

    def to_save(self) -> dict[str, Any]:
        """Returns the digests as values for JSON, to be saved next to the state."""
        return {
            "state": self.of_state, "leaves": self.by_leaf, "places": self.by_place(),
            "mesh": dict(self._mesh.shape),
        }

    def stale(self) -> Iterator[Stale]:
        """Yields the arrays whose copies differ, with the devices that differ from most."""
        for number, leaf in enumerate(self._leaves):
            wrong: list[int] = []
            for places in self._copies(leaf):
                seen = self._by_device[places, number]
                kinds, which, counts = np.unique(
                    seen, axis=0, return_inverse=True, return_counts=True
                )
                if len(kinds) > 1:
                    # Of two that differ nobody can say which is wrong.
                    usual = np.argmax(counts) if np.sum(counts == counts.max()) == 1 else -1
                    wrong += [
                        x for x, kind in zip(places, which.reshape(-1), strict=True)
                        if kind != usual
                    ]
            if wrong:
                yield Stale(leaf.path, tuple(sorted(wrong)), self._axes_of_copies(leaf))

    def apart(self, other: "Digests") -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the arrays that differ from another state's, with the devices that differ."""
        for number, leaf in enumerate(self._leaves):
            differs = (self._by_device[:, number] != other._by_device[:, number]).any(-1)
            if differs.any():
                yield leaf.path, tuple(np.flatnonzero(differs).tolist())

    def _axes_of_copies(self, leaf: LeafLayout) -> tuple[str, ...]:
        split = {axis for entry in leaf.spec for axis in axes_of(entry)}
        return tuple(a for a, size in self._mesh.shape.items() if size > 1 and a not in split)

    def _copies(self, leaf: LeafLayout) -> list[list[int]]:
        """Returns the places of the devices that hold the same block, for each block."""
        devices, names = self._mesh.devices, self._mesh.axis_names
        split = {axis for entry in leaf.spec for axis in axes_of(entry)}
        along_split_axes_first = sorted(range(len(names)), key=lambda i: names[i] not in split)
        places = np.arange(devices.size).reshape(devices.shape).transpose(along_split_axes_first)
        num_blocks = math.prod(self._mesh.shape[axis] for axis in split)
        return places.reshape(num_blocks, -1).tolist()


def differing(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the keys under which two sets of digests differ, of those that both have."""
    return [key for key, text in saved.items() if key in now and now[key] != text]


def _hash(data: bytes | np.ndarray) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
