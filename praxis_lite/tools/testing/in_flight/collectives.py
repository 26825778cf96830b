"""Whether sums between devices have the same bits when the devices change places."""


import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_ELEMENTS = 1000


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
