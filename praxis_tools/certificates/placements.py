"""Where a step is re-run: on the same devices in another order, and on another legal mesh."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, batch_spec
from praxis_lite.core.sharding.devices.axis_types import mesh_of

PyTree = Any
_ELEMENTS = 1000  # Of each device, that `are_repeatable` sums.
COPIES = "copies"  # An axis that splits nothing but the rows of a batch on their way in.


def reordered(mesh: Mesh, order: Sequence[int]) -> Mesh:
    """Returns a mesh of the same shape, with device order[i] of the mesh at place i."""
    devices = mesh.devices.reshape(-1)[list(order)].reshape(mesh.devices.shape)
    return mesh_of(devices, mesh.axis_names)


def rolled(places: Sequence[int], num_devices: int, by: int = 1) -> list[int]:
    """Returns the order in which the devices at some places are rotated, and the others stay."""
    order = list(range(num_devices))
    for i, place in enumerate(places):
        order[place] = places[(i + by) % len(places)]
    return order


def are_repeatable(mesh: Mesh, moved: Mesh) -> bool:
    """Returns True if sums over each axis, and over all, are the same bits on both meshes.

    Args:
      moved: of the same shape and devices, in another order.
    """
    return _sums(mesh) == _sums(moved)


def _sums(mesh: Mesh) -> list[bytes]:
    axes, split = mesh.axis_names, PartitionSpec(mesh.axis_names)
    drawn = np.random.default_rng(0).normal(size=(mesh.size, mesh.size * _ELEMENTS))
    x = jax.make_array_from_callback(
        drawn.shape, NamedSharding(mesh, split), lambda index: drawn[index].astype(np.float32)
    )

    def on_each_device(x: jax.Array) -> jax.Array:
        over = [axis for axis in axes if mesh.shape[axis] > 1]
        sums = [jax.lax.psum(x, axis) for axis in over] + [jax.lax.psum(x, axes)]
        scattered = jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)
        return jnp.concatenate([*sums, jnp.tile(scattered, (1, mesh.size))])[None]

    run = jax.jit(
        jax.shard_map(on_each_device, mesh=mesh, in_specs=split, out_specs=split),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    return [np.asarray(run(x)).tobytes()]


def reshaped(mesh: Mesh, shape: Sequence[int]) -> Mesh:
    """Returns a mesh of the same devices, in the same order, with other sizes of the axes."""
    return mesh_of(mesh.devices.reshape(tuple(shape)), mesh.axis_names)


def other_meshes(mesh: Mesh) -> list[Mesh]:
    """Returns other meshes of the same devices, those first that share no split.

    A mesh of one axis gets a second one, along which everything is replicated. The last mesh splits
    nothing: each device computes everything.
    """
    own, size = mesh.devices.shape, mesh.size
    divisors = [n for n in range(1, size + 1) if size % n == 0]

    def with_copies(*shape: int) -> Mesh:
        return mesh_of(mesh.devices.reshape(shape), (*mesh.axis_names, COPIES))

    replicated = with_copies(*(1,) * len(own), size)
    if len(own) == 1:
        return [with_copies(size // divisors[1], divisors[1]), replicated]
    shapes = [
        shape for shape in itertools.product(divisors, repeat=len(own))
        if math.prod(shape) == size and shape != own
    ]

    def unlike(shape: tuple[int, ...]) -> tuple:
        same = sum(a == b for a, b in zip(own, shape, strict=True) if b > 1)
        both = sum(min(a, b) > 1 for a, b in zip(own, shape, strict=True))
        return same, both, -sum(size > 1 for size in shape), tuple(-x for x in shape)

    return [*(reshaped(mesh, shape) for shape in sorted(shapes, key=unlike)), replicated]


class Mover:
    """Arrays of a mesh, put on another mesh of the same devices, padded for that.

    The other mesh has the devices in the same order, or the same shape.

    Args:
      source, target: the layouts of the arrays on either.
      mesh, target_mesh: the meshes.
    """

    def __init__(self, source: StateLayout, mesh: Mesh, target: StateLayout, target_mesh: Mesh):
        self._shardings = target.shardings(target_mesh)
        self._is_reordered = list(mesh.devices.flat) != list(target_mesh.devices.flat)
        move = _sent(mesh, target_mesh, target.specs) if self._is_reordered else (
            lambda tree: target.pad(source.unpad(tree))
        )
        given = self._shardings if self._is_reordered else source.shardings(mesh)
        self._run = jax.jit(move, in_shardings=(given,), out_shardings=self._shardings)
        self._abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            source.padded_shapes, given,
        )

    def compile(self) -> None:
        """Compiles what moves the arrays, before it is called."""
        self._run = self._run.lower(self._abstract).compile()

    def __call__(self, tree: PyTree) -> PyTree:
        if self._is_reordered:
            tree = jax.tree.map(_relabelled, tree, self._shardings)
        return self._run(tree)


def _relabelled(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array of the same blocks on the same devices, which have other places."""
    blocks = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, blocks)


def _sent(mesh: Mesh, target: Mesh, specs: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns a function that sends each block to the device that now has its place.

    `jax.device_put` does it too, but XLA warns of it where devices are of several processes.
    """
    place_of = {device: place for place, device in enumerate(target.devices.flat)}
    pairs = [(place_of[device], place) for place, device in enumerate(mesh.devices.flat)]

    def send(x: jax.Array) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            sent = jax.lax.ppermute(jax.random.key_data(x), target.axis_names, pairs)
            return jax.random.wrap_key_data(sent, impl=jax.random.key_impl(x))
        return jax.lax.ppermute(x, target.axis_names, pairs)

    return jax.shard_map(
        lambda tree: jax.tree.map(send, tree), mesh=target, in_specs=(specs,), out_specs=specs,
        check_vma=False,
    )


def take_rows(mesh: Mesh, num_rows: int) -> Callable[[GlobalBatch, Any], PyTree]:
    """Returns a compiled function of a batch and row numbers: the rows, as a batch on the mesh."""
    padded = math.ceil(num_rows / mesh.size) * mesh.size

    def taken(batch: GlobalBatch, rows: jax.Array) -> PyTree:
        def one(x: jax.Array) -> jax.Array:
            if x.ndim:
                x = jnp.take(x, rows, axis=0)
                x = jnp.pad(x, [(0, padded - num_rows)] + [(0, 0)] * (x.ndim - 1))
            spec = batch_spec(x.ndim, mesh.axis_names)
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        return GlobalBatch(jax.tree.map(one, batch.inputs), num_rows)

    return jax.jit(taken)


def mover_of_batches(batch: GlobalBatch, mesh: Mesh, target: Mesh) -> Mover:
    """Returns a function that puts batches of these shapes on another mesh of the same devices."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    layouts = [
        StateLayout(
            shapes, jax.tree.map(lambda x, at=at: batch_spec(x.ndim, at.axis_names), shapes),
            dict(at.shape),
        )
        for at in (mesh, target)
    ]
    return Mover(layouts[0], mesh, layouts[1], target)


def mover_of_weights(source: Partitioner, target: Partitioner) -> Mover:
    """Returns a function that puts weights on another partitioner's mesh of the same devices."""
    layouts = [item.layout.select("mdl_vars") for item in (source, target)]
    return Mover(layouts[0], source.mesh, layouts[1], target.mesh)
