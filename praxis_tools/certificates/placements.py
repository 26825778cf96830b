"""Creates the meshes on which steps are re-run, and moves arrays to them.

A step is re-run on the same mesh with reordered devices, and on a different valid mesh with the
same devices.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, batch_spec
from praxis_lite.core.sharding.devices.axis_types import mesh_of

PyTree = Any
_NUM_SUMMED = 1000  # Number of elements per device that `has_order_independent_sums` sums.
COPIES = "copies"  # Axis over which everything except the rows of input batches is replicated.


def reorder_devices(mesh: Mesh, order: Sequence[int]) -> Mesh:
    """Returns a mesh of the same shape in which device i is device order[i] in `mesh`."""
    devices = mesh.devices.reshape(-1)[list(order)].reshape(mesh.devices.shape)
    return mesh_of(devices, mesh.axis_names)


def rotated_order(positions: Sequence[int], num_devices: int, shift: int = 1) -> list[int]:
    """Returns an order that only rotates the devices at the given positions."""
    order = list(range(num_devices))
    for i, position in enumerate(positions):
        order[position] = positions[(i + shift) % len(positions)]
    return order


def has_order_independent_sums(mesh: Mesh, reordered: Mesh) -> bool:
    """Returns whether all-reduces produce the same bits on both meshes.

    Args:
      mesh: The job's mesh.
      reordered: A mesh with the same shape and the same devices in a different order.
    """
    return _sums(mesh) == _sums(reordered)


def _sums(mesh: Mesh) -> bytes:
    """Returns the bits of all-reduces over each axis, and of a reduce-scatter over all axes."""
    axes, split = mesh.axis_names, PartitionSpec(mesh.axis_names)
    # Sums of random numbers have different bits if the order of summation differs.
    values = np.random.default_rng(0).normal(size=(mesh.size, mesh.size * _NUM_SUMMED))
    x = jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, split), lambda index: values[index].astype(np.float32)
    )

    def on_each_device(x: jax.Array) -> jax.Array:
        split_axes = [axis for axis in axes if mesh.shape[axis] > 1]
        sums = [jax.lax.psum(x, axis) for axis in split_axes] + [jax.lax.psum(x, axes)]
        scattered = jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)
        return jnp.concatenate([*sums, jnp.tile(scattered, (1, mesh.size))])[None]

    run = jax.jit(
        jax.shard_map(on_each_device, mesh=mesh, in_specs=split, out_specs=split),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    return np.asarray(run(x)).tobytes()


def reshape_mesh(mesh: Mesh, shape: Sequence[int]) -> Mesh:
    """Returns a mesh with the same devices in the same order, but different axis sizes."""
    return mesh_of(mesh.devices.reshape(tuple(shape)), mesh.axis_names)


def other_meshes(mesh: Mesh) -> list[Mesh]:
    """Returns other meshes with the same devices, most different first.

    If the mesh has only one axis, a second axis is added, over which everything is replicated. On
    the last mesh, all arrays are replicated, so that each device computes everything.
    """
    own, size = mesh.devices.shape, mesh.size
    divisors = [n for n in range(1, size + 1) if size % n == 0]

    def with_copies(*shape: int) -> Mesh:
        return mesh_of(mesh.devices.reshape(shape), (*mesh.axis_names, COPIES))

    replicated = with_copies(*(1,) * len(own), size)
    if len(own) == 1:
        # The smallest divisor above 1 splits the devices into the largest groups.
        return [*(with_copies(size // n, n) for n in divisors[1:2]), replicated]
    shapes = [
        shape
        for shape in itertools.product(divisors, repeat=len(own))
        if math.prod(shape) == size and shape != own
    ]

    # Meshes that split the same axes, or to the same sizes, are similar and come last.
    def similarity(shape: tuple[int, ...]) -> tuple:
        num_equal = sum(a == b for a, b in zip(own, shape, strict=True) if b > 1)
        num_split_in_both = sum(min(a, b) > 1 for a, b in zip(own, shape, strict=True))
        num_split = sum(size > 1 for size in shape)
        return num_equal, num_split_in_both, -num_split, tuple(-x for x in shape)

    return [*(reshape_mesh(mesh, shape) for shape in sorted(shapes, key=similarity)), replicated]


class MeshTransfer:
    """Moves arrays to a different mesh with the same devices, and pads the arrays for that mesh.

    The target mesh must have either the same device order or the same shape.

    Args:
      source: Layout of the arrays on `mesh`.
      mesh: Mesh on which the arrays are placed.
      target: Layout of the arrays on `target_mesh`.
      target_mesh: Mesh to move the arrays to.
    """

    def __init__(self, source: StateLayout, mesh: Mesh, target: StateLayout, target_mesh: Mesh):
        self._shardings = target.shardings(target_mesh)
        self._is_reordered = list(mesh.devices.flat) != list(target_mesh.devices.flat)
        transfer: Callable[[PyTree], PyTree]
        if self._is_reordered:
            transfer, in_shardings = _block_sender(mesh, target_mesh, target.specs), self._shardings
        else:
            transfer = lambda tree: target.pad(source.unpad(tree))  # noqa: E731
            in_shardings = source.shardings(mesh)
        self._jitted = jax.jit(
            transfer, in_shardings=(in_shardings,), out_shardings=self._shardings
        )
        self._run: Callable[[PyTree], PyTree] = self._jitted
        self._abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            source.padded_shapes,
            in_shardings,
        )

    def compile(self) -> None:
        """Compiles the transfer before the first call."""
        self._run = self._jitted.lower(self._abstract).compile()

    def __call__(self, tree: PyTree) -> PyTree:
        if self._is_reordered:
            # Reinterpret the blocks as an array on the target mesh, where they are in the wrong
            # positions. The transfer then permutes them.
            tree = jax.tree.map(_with_sharding, tree, self._shardings)
        return self._run(tree)


def _with_sharding(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array with the same blocks on the same devices, but a new device order."""
    blocks = {shard.device: shard.data for shard in x.addressable_shards}
    # Arrays of random keys are only assembled from blocks in the order of the devices.
    ordered = [blocks[device] for device in sharding.mesh.devices.flat if device in blocks]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, ordered)


def _block_sender(mesh: Mesh, target: Mesh, specs: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns a function that sends each block to the device at its position in `target`.

    `jax.device_put` would do the same, but XLA warns about such a transfer if there are several
    processes.
    """
    position_of = {device: position for position, device in enumerate(target.devices.flat)}
    permutation = [
        (position_of[device], position) for position, device in enumerate(mesh.devices.flat)
    ]

    def send(x: jax.Array) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jax.lax.ppermute(jax.random.key_data(x), target.axis_names, permutation)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.lax.ppermute(x, target.axis_names, permutation)

    return jax.shard_map(
        lambda tree: jax.tree.map(send, tree),
        mesh=target,
        in_specs=(specs,),
        out_specs=specs,
        check_vma=False,
    )


def row_selector(mesh: Mesh, num_rows: int) -> Callable[[GlobalBatch, Any], PyTree]:
    """Returns a jitted function that takes (batch, row numbers) and returns these rows."""
    padded = math.ceil(num_rows / mesh.size) * mesh.size

    def select(batch: GlobalBatch, rows: jax.Array) -> PyTree:
        def select_leaf(x: jax.Array) -> jax.Array:
            if x.ndim:
                x = jnp.take(x, rows, axis=0)
                x = jnp.pad(x, [(0, padded - num_rows)] + [(0, 0)] * (x.ndim - 1))
            spec = batch_spec(x.ndim, mesh.axis_names)
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        return GlobalBatch(jax.tree.map(select_leaf, batch.inputs), num_rows)

    return jax.jit(select)


def batch_transfer(batch: GlobalBatch, mesh: Mesh, target: Mesh) -> MeshTransfer:
    """Returns a function that moves batches shaped like `batch` to a mesh with the same devices."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def layout(mesh: Mesh) -> StateLayout:
        specs = jax.tree.map(lambda x: batch_spec(x.ndim, mesh.axis_names), shapes)
        return StateLayout(shapes, specs, dict(mesh.shape))

    return MeshTransfer(layout(mesh), mesh, layout(target), target)
