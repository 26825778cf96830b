"""Types of mesh axes: Auto (XLA chooses shardings) or Explicit (array types contain them).

All meshes in the library are created here, with explicit axis types, because JAX's functions have
different defaults (`jax.make_mesh` Explicit, `Mesh` Auto).

Outside compiled steps, arrays are on meshes of Auto axes, because JAX has no type for an array that
is split unevenly. Inside typed steps (`TaskOnMesh.typed`), `jax.sharding.explicit_axes` makes the
Explicit axes of the mesh part of array types.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.logical_axes import axes_of, entry_of

__all__ = ("RESHARD_SCOPE", "explicit_axes_of", "mesh_of", "untyped")

PyTree = Any
# The values of `MeshConfig.axis_types`.
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}

# Name scope of our reshards, so that a traced step shows where arrays move.
RESHARD_SCOPE = "constrain_type"


class UnevenType(ConfigError):
    """An array has no type, because one of its dims is split unevenly over Explicit axes."""


def mesh_of(
    devices: np.ndarray, axis_names: Sequence[str], axis_types: Sequence[AxisType] | None = None
) -> Mesh:
    """Returns a mesh over an array of devices; all axes are Auto unless `axis_types` are given."""
    types = (AxisType.Auto,) * devices.ndim if axis_types is None else tuple(axis_types)
    return Mesh(devices, tuple(axis_names), axis_types=types)


def abstract_mesh_of(sizes: Sequence[int], axis_names: Sequence[str]) -> AbstractMesh:
    """Returns an abstract mesh of Auto axes."""
    return AbstractMesh(tuple(sizes), tuple(axis_names), axis_types=(AxisType.Auto,) * len(sizes))


def explicit_axes_of(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the names of a mesh's Explicit axes."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def is_typed() -> bool:
    """Returns whether the current mesh has Explicit axes, so that array types contain shardings."""
    return bool(explicit_axes_of(jax.sharding.get_abstract_mesh()))


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns a mesh with the same devices and Auto axes, as the state requires."""
    return mesh_of(mesh.devices, mesh.axis_names) if explicit_axes_of(mesh) else mesh


def only_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Returns a spec of the same rank with all axes except `axes` removed."""
    entries = (tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec)
    return PartitionSpec(*map(entry_of, entries))


def constrain_to_spec(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrains the sharding of `x` over Auto axes, and its type over Explicit axes.

    Args:
      x: A traced array.
      spec: PartitionSpec without manual axes.

    Raises:
      ConfigError: A dim is not divisible by the Explicit axes that the spec splits it over.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = explicit_axes_of(mesh)
    remaining = spec
    if explicit:
        check_even_split(x.shape, spec, "An activation", mesh, explicit)
        with jax.named_scope(RESHARD_SCOPE):
            x = jax.sharding.reshard(x, _keep_reduced(x, only_axes(spec, explicit)))
        # The type contains the Explicit axes now. The constraint below covers the other axes.
        remaining = only_axes(spec, [axis for axis in mesh.axis_names if axis not in explicit])
        if not any(remaining):
            return x
    x = jax.lax.with_sharding_constraint(x, remaining)
    return x


def _keep_reduced(x: jax.Array, spec: PartitionSpec) -> PartitionSpec:
    """Adds the `reduced` axes in the type of `x` to `spec`; see `with_unreduced_gradient`."""
    used = {axis for entry in spec for axis in axes_of(entry)}
    reduced = set(jax.typeof(x).sharding.spec.reduced) - used
    return spec.update(reduced=reduced) if reduced else spec


def with_unreduced_gradient(weight: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns a weight whose gradient stays a partial sum on each device along `axes`.

    In JAX's type system, the weight becomes `reduced` over these axes, and its gradient becomes
    `unreduced`. A weight that is split over one of the axes is returned unchanged, because JAX has
    no type for a gradient that is scattered over one axis and unreduced over another.
    """
    spec = type_spec(weight)
    is_split = any(axis in axes for entry in spec for axis in axes_of(entry))
    return weight if is_split else jax.sharding.reshard(weight, spec.update(reduced=set(axes)))


def zeros_unreduced(weight: jax.Array, dtype: Any) -> jax.Array:
    """Returns zeros with the (unreduced) type of the gradient of `weight`."""
    spec = type_spec(weight)
    zeros = jnp.zeros(weight.shape, dtype, out_sharding=spec)
    reduced = set(jax.typeof(weight).sharding.spec.reduced)
    return jax.sharding.reshard(zeros, spec.update(unreduced=reduced)) if reduced else zeros


def reduce_partial(x: jax.Array) -> jax.Array:
    """Returns `x` without unreduced or reduced axes: an unreduced gradient is summed over them."""
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, type_spec(x)) if spec.reduced or spec.unreduced else x


def check_even_split(
    shape: Sequence[int],
    spec: PartitionSpec,
    what: str,
    mesh: Mesh | AbstractMesh,
    explicit_axes: Sequence[str],
) -> None:
    """Checks that Explicit axes split an array evenly, as JAX's sharding in types requires.

    Args:
      shape: Shape of the array.
      spec: PartitionSpec of the array.
      what: Path of the array, or a description such as "An activation", for messages.
      mesh: The mesh.
      explicit_axes: The mesh's Explicit axes.

    Raises:
      UnevenType: A dim is not divisible by the Explicit axes that the spec splits it over.
    """
    for dim, entry in enumerate(only_axes(spec, explicit_axes)):
        num_shards = math.prod(mesh.shape[axis] for axis in axes_of(entry))
        if shape[dim] % num_shards:
            raise UnevenType(
                f"{what} of shape {tuple(shape)} is split over {entry!r} of the mesh "
                f"{dict(mesh.shape)}, but its dim {dim} is not divisible by {num_shards}. "
                "Explicit axes require even splits. Change the size or the mesh, or set "
                "mesh.axis_types=auto to pad arrays."
            )


def untyped(
    function: Callable[..., Any],
    *args: PyTree,
    out: PartitionSpec | Callable[[PyTree], PyTree],
) -> Any:
    """Calls a function over Auto axes, and reshards its results to types over Explicit axes.

    Use this for functions that JAX cannot type, such as kernels. On a mesh that has only Auto axes,
    `function` is called directly.

    Args:
      function: A function of arrays. It must not close over other arrays.
      args: Trees of arrays.
      out: A PartitionSpec for all results, or a function that maps the results to a tree of
        PartitionSpecs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = explicit_axes_of(mesh)
    if not explicit:
        return function(*args)
    auto = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(auto):
        # This removes the Explicit axes from the types of the arguments.
        args = jax.sharding.reshard(args, jax.tree.map(lambda x: PartitionSpec(), args))
        results = function(*args)
    specs = out(results) if callable(out) else jax.tree.map(lambda _: out, results)
    return jax.sharding.reshard(results, specs)


def is_type_error(error: Exception) -> bool:
    """Returns whether `error` was raised because a result has no type over Explicit axes."""
    # JAX does not export the class of this error, and different errors are raised for the carry of
    # a loop.
    words = ("should be replicated", "aval mesh", "shard", "equal types")
    return (
        isinstance(error, UnevenType)
        or type(error).__name__ == "ShardingTypeError"
        or (
            isinstance(error, ValueError | TypeError | AssertionError)
            and any(word in str(error) for word in words)
            and not isinstance(error, ConfigError)
        )
    )


_notes: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "untyped layers", default=None
)


@contextlib.contextmanager
def collect_untyped_notes(notes: dict[str, str]) -> Iterator[None]:
    """Collects the reasons why layers traced in the body use Auto axes, keyed by layer path."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def note_untyped(path: str, reason: str) -> None:
    """Records the reason why a layer in the traced step uses Auto axes."""
    notes = _notes.get()
    if notes is not None:
        notes.setdefault(path, reason)


def type_spec(x: jax.Array) -> PartitionSpec:
    """Returns the PartitionSpec in an array's type (without Auto axes), extended to its rank."""
    entries = jax.typeof(x).sharding.spec.partitions
    return PartitionSpec(*entries, *(None,) * (x.ndim - len(entries)))


def typed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Reshards `x` to the type of `like`, an array of the same rank; no-op over Auto axes."""
    return jax.sharding.reshard(x, type_spec(like)) if is_typed() else x


def with_common_dim_types(trees: PyTree, num_dims: int) -> PyTree:
    """Reshards arrays to a common type for their first `num_dims` dims, as a vmap requires.

    Each dim is split as in the first array in which it is split.
    """
    if not num_dims or not is_typed():
        return trees
    specs = jax.tree.leaves(jax.tree.map(type_spec, trees))
    first = [next(filter(None, (spec[dim] for spec in specs)), None) for dim in range(num_dims)]
    return jax.tree.map(
        lambda x: jax.sharding.reshard(x, PartitionSpec(*first, *type_spec(x)[num_dims:])), trees
    )
