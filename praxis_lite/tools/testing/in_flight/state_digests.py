"""Digests of a state by device: equal where replicas are equal, and on every mesh the same sum."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.memory_spaces import to_device
from praxis_lite.tools.testing.in_flight import bits

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Stale:
    """A device that holds other bits than it should.

    Attributes:
      leaf: the path of the array.
      places: of the devices, in the mesh's order; those that differ from most.
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
                digests.append(bits.digest(x, bits.indices(x.shape, x.shape)))
                continue
            along = zip(leaf.spec, x.shape, strict=True)
            starts = [self._start(entry, size) for entry, size in along]
            index = bits.indices(x.shape, leaf.shape, starts)
            digests.append(bits.digest(x, index, _is_true(leaf, x, starts)))
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
      mesh: on which it lies.
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
        """The digest of the whole state, the same on every mesh."""
        total = np.uint64(0)
        for place, (path, text) in enumerate(sorted(self.by_leaf.items())):
            word = np.uint64(int(text, 16)) ^ np.uint64(hash_of(path))
            total = _mixed(total ^ _mixed(word + np.uint64(place)))
        return f"{int(total):016x}"

    def by_place(self) -> list[str]:
        """Returns a digest of what each device holds, in the mesh's order."""
        numbers = np.arange(1, len(self._leaves) + 1, dtype=np.uint64)[None, :, None]
        with np.errstate(over="ignore"):
            mixed = _mixed(self._by_device.astype(np.uint64) + (numbers << np.uint64(33)))
            total = mixed.sum((1, 2), dtype=np.uint64)
        return [f"{int(x):016x}" for x in total]

    def to_save(self) -> dict[str, Any]:
        """Returns the digests as values for JSON, to lie beside the state on disk."""
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
        sizes = self._mesh.devices.shape
        split = {axis for entry in leaf.spec for axis in axes_of(entry)}
        kept = [place for place, axis in enumerate(self._mesh.axis_names) if axis in split]
        blocks: dict[tuple[int, ...], list[int]] = {}
        for place in range(self._mesh.size):
            where = np.unravel_index(place, sizes)
            blocks.setdefault(tuple(int(where[i]) for i in kept), []).append(place)
        return list(blocks.values())


def differing(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the keys under which two sets of digests differ, of those that both have."""
    return [key for key, text in saved.items() if key in now and now[key] != text]


def hash_of(text: str) -> int:
    """Returns a number of 64 bits of a text, the same in every process (FNV-1a)."""
    result = 0xCBF29CE484222325
    for byte in text.encode():
        result = (result ^ byte) * 0x100000001B3 % 2**64
    return result


def _mixed(x: Any) -> Any:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        return x ^ (x >> np.uint64(33))
