"""Where a step is made again: on the same devices in another order, and on another legal mesh."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.inputs import GlobalBatch, batch_spec

PyTree = Any
COPIES = "copies"  # An axis that splits nothing but the rows of a batch on their way in.


def reordered(mesh: Mesh, order: Sequence[int]) -> Mesh:
    """Returns a mesh of the same shape, with device order[i] of the mesh at place i."""
    devices = mesh.devices.reshape(-1)[list(order)].reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def rolled(places: Sequence[int], num_devices: int, by: int = 1) -> list[int]:
    """Returns the order in which the devices at some places go round, and the others stay."""
    order = list(range(num_devices))
    for i, place in enumerate(places):
        order[place] = places[(i + by) % len(places)]
    return order


def reshaped(mesh: Mesh, shape: Sequence[int]) -> Mesh:
    """Returns a mesh of the same devices, in the same order, with other sizes of the axes."""
    return Mesh(mesh.devices.reshape(tuple(shape)), mesh.axis_names, axis_types=mesh.axis_types)


def other_meshes(mesh: Mesh) -> list[Mesh]:
    """Returns other meshes of the same devices, those first that share no split.

    A mesh of one axis gets a second one, along which all is computed alike.
    """
    own, size = mesh.devices.shape, mesh.size
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    if len(own) == 1:
        shape, names = (size // divisors[1], divisors[1]), (*mesh.axis_names, COPIES)
        devices = mesh.devices.reshape(shape)
        return [Mesh(devices, names, axis_types=(*mesh.axis_types, mesh.axis_types[0]))]
    shapes = [
        shape for shape in itertools.product(divisors, repeat=len(own))
        if math.prod(shape) == size and shape != own
    ]

    def unlike(shape: tuple[int, ...]) -> tuple:
        same = sum(a == b for a, b in zip(own, shape, strict=True) if b > 1)
        both = sum(min(a, b) > 1 for a, b in zip(own, shape, strict=True))
        return same, both, -sum(size > 1 for size in shape), tuple(-x for x in shape)

    return [reshaped(mesh, shape) for shape in sorted(shapes, key=unlike)]


def bytes_of_weights(layout: StateLayout) -> int:
    """Returns how many bytes of the weights each device holds."""
    return sum(x.bytes_per_device for x in layout.leaves() if x.path.startswith("mdl_vars/"))


def legal_meshes(
    mesh: Mesh, build: Callable[[Mesh], Partitioner], refusals: tuple[type[Exception], ...]
) -> Iterator[Partitioner]:
    """Yields the task on each other mesh of these devices that it can be put on, in their order."""
    for other in other_meshes(mesh):
        try:
            yield build(other)
        except refusals:
            continue


class Mover:
    """Weights of a mesh, put on another mesh of the same devices, padded for that.

    Args:
      source, target: of the weights; the target's devices may be in another order.
    """

    def __init__(self, source: Partitioner, target: Partitioner):
        of_source, of_target = (x.layout.select("mdl_vars") for x in (source, target))
        self._shardings = of_target.shardings(target.mesh)
        # Programs have one order of devices: what changes it comes after.
        self._is_reordered = list(source.mesh.devices.flat) != list(target.mesh.devices.flat)
        of_order = target.mesh
        if self._is_reordered:
            devices = source.mesh.devices.reshape(target.mesh.devices.shape)
            of_order = Mesh(devices, target.mesh.axis_names, axis_types=target.mesh.axis_types)
        self._jitted = None
        if dict(source.mesh.shape) != dict(target.mesh.shape):
            self._jitted = jax.jit(
                lambda tree: of_target.pad(of_source.unpad(tree)),
                in_shardings=(of_source.shardings(source.mesh),),
                out_shardings=of_target.shardings(of_order),
            )
        self._abstract = of_source.abstract(source.mesh)

    def compile(self) -> None:
        """Compiles what moves the weights, before it is called."""
        if self._jitted is not None:
            self._jitted = self._jitted.lower(self._abstract).compile()

    def __call__(self, mdl_vars: PyTree) -> PyTree:
        if self._jitted is not None:
            mdl_vars = self._jitted(mdl_vars)
        return jax.device_put(mdl_vars, self._shardings) if self._is_reordered else mdl_vars


def chosen_rows(batch: GlobalBatch, num_rows: int, seed: Sequence[int]) -> np.ndarray:
    """Returns the numbers of some rows of a batch, a function of the seed."""
    rows = np.random.default_rng(list(seed)).choice(batch.num_rows, num_rows, replace=False)
    return np.sort(rows).astype(np.int32)


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


def batch_on(batch: GlobalBatch, mesh: Mesh) -> GlobalBatch:
    """Returns a batch on another mesh of the same devices, each row by its place in the order."""
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, batch_spec(x.ndim, mesh.axis_names)), batch
    )
    return jax.device_put(batch, shardings)
