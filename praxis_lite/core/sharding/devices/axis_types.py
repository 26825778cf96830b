"""Types of mesh axes: Auto (XLA chooses shardings) or Explicit (array types contain them).

All meshes of the library are created here, with explicit axis types, because JAX's functions have
different defaults (`jax.make_mesh` Explicit, `Mesh` Auto).

At a program's boundary, arrays are on meshes of Auto axes, because JAX has no type for an array
that its devices do not divide. Inside typed steps (`TaskOnMesh.typed`),
`jax.sharding.explicit_axes` makes the Explicit axes of the mesh part of array types.
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

# Name scope of our constraints on types, by which a traced program shows where arrays move.
RESHARD_SCOPE = "stated"


class UnevenType(ConfigError):
    """An array that has no type, because Explicit axes do not divide a dim split over them."""


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
    """Returns whether the current mesh has Explicit axes, so that array types have shardings."""
    return bool(explicit_axes_of(jax.sharding.get_abstract_mesh()))


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh of the same devices with Auto axes, on which the state is stored."""
    return mesh_of(mesh.devices, mesh.axis_names) if explicit_axes_of(mesh) else mesh


def only_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Returns a spec of the same rank with only `axes` left."""
    left = (tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec)
    return PartitionSpec(*map(entry_of, left))


def constrain_to_spec(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrains the sharding of `x` over Auto axes, and its type over Explicit axes.

    Args:
      x: A traced array.
      spec: Spec without manual axes.

    Raises:
      ConfigError: Explicit axes do not divide a dim that the spec splits over them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = explicit_axes_of(mesh)
    left = spec
    if explicit:
        check_divides(x.shape, spec, "An activation", mesh, explicit)
        with jax.named_scope(RESHARD_SCOPE):
            x = jax.sharding.reshard(x, _keep_reduced(x, only_axes(spec, explicit)))
        left = only_axes(spec, [axis for axis in mesh.axis_names if axis not in explicit])
        if not any(left):
            return x
    x = jax.lax.with_sharding_constraint(x, left)
    return x


def _keep_reduced(x: jax.Array, spec: PartitionSpec) -> PartitionSpec:
    """Returns `spec` with the `reduced` axes of the type of `x`; see `with_unreduced_gradient`."""
    used = {axis for entry in spec for axis in axes_of(entry)}
    reduced = set(jax.typeof(x).sharding.spec.reduced) - used
    return spec.update(reduced=reduced) if reduced else spec


def with_unreduced_gradient(weight: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns a weight whose gradient is a partial sum on each device along `axes`.

    In JAX's types the weight is `reduced` over these axes, and its gradient `unreduced`. A weight
    that is split over one of them is returned unchanged, because JAX has no type for a gradient
    that is scattered over one axis and unreduced over another.
    """
    spec = type_spec(weight)
    is_split = any(axis in axes for entry in spec for axis in axes_of(entry))
    return weight if is_split else jax.sharding.reshard(weight, spec.update(reduced=set(axes)))


def zeros_unreduced(weight: jax.Array, dtype: Any) -> jax.Array:
    """Returns zeros with the unreduced type of that weight's gradient."""
    spec = type_spec(weight)
    zeros = jnp.zeros(weight.shape, dtype, out_sharding=spec)
    reduced = set(jax.typeof(weight).sharding.spec.reduced)
    return jax.sharding.reshard(zeros, spec.update(unreduced=reduced)) if reduced else zeros


def reduce_partial(x: jax.Array) -> jax.Array:
    """Sums an unreduced gradient over its axes; undoes `with_unreduced_gradient` for a weight."""
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, type_spec(x)) if spec.reduced or spec.unreduced else x


def check_divides(
    shape: Sequence[int], spec: PartitionSpec, what: str, mesh: Mesh | AbstractMesh,
    explicit_axes: Sequence[str],
) -> None:
    """Checks that JAX has a type for an array over Explicit axes.

    Args:
      shape: Shape of the array.
      spec: Its spec.
      what: The array's path, or a noun with its article, for the message.
      mesh: Mesh of the axes.
      explicit_axes: The mesh's Explicit axes.

    Raises:
      UnevenType: Explicit axes do not divide a dim that the spec splits over them.
    """
    for dim, entry in enumerate(only_axes(spec, explicit_axes)):
        if shape[dim] % math.prod(mesh.shape[axis] for axis in axes_of(entry)):
            raise UnevenType(
                f"{what} of shape {tuple(shape)} splits its dim {dim} of {shape[dim]} over "
                f"{entry!r} of the mesh {dict(mesh.shape)}, which does not divide it. JAX has "
                "types only for even splits. Change the size or the mesh, or set "
                "mesh.axis_types=auto, which pads every size."
            )


def untyped(
    function: Callable[..., Any], *args: PyTree, out: PartitionSpec | Callable[[PyTree], PyTree],
) -> Any:
    """Returns `function(*args)`, computed over Auto axes and then given types again.

    For functions that JAX cannot type, such as kernels. On a mesh of only Auto axes this is
    `function(*args)`.

    Args:
      function: A function of arrays; it must not close over any.
      args: Trees of arrays.
      out: A PartitionSpec for all results; or a function that returns a tree of specs for them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = explicit_axes_of(mesh)
    if not explicit:
        return function(*args)
    auto = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(auto):
        args = jax.sharding.reshard(args, jax.tree.map(lambda x: PartitionSpec(), args))
        results = function(*args)
    specs = out(results) if callable(out) else jax.tree.map(lambda _: out, results)
    return jax.sharding.reshard(results, specs)


def is_type_error(error: Exception) -> bool:
    """Returns whether JAX raised `error` because a result has no type over Explicit axes."""
    # JAX exports no class for this error, and loops raise other errors about their carry.
    words = ("should be replicated", "aval mesh", "shard", "equal types")
    return isinstance(error, UnevenType) or type(error).__name__ == "ShardingTypeError" or (
        isinstance(error, ValueError | TypeError | AssertionError)
        and any(word in str(error) for word in words) and not isinstance(error, ConfigError)
    )


_notes: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "untyped layers", default=None
)


@contextlib.contextmanager
def collect_untyped_notes(notes: dict[str, str]) -> Iterator[None]:
    """Collects, by path, why layers traced in the body are computed over Auto axes."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def note_untyped(path: str, reason: str) -> None:
    """Records why a layer of the step being traced has no types inside."""
    notes = _notes.get()
    if notes is not None:
        notes.setdefault(path, reason)


def type_spec(x: jax.Array) -> PartitionSpec:
    """Returns the spec in an array's type, extended to its rank; it has no Auto axes."""
    entries = jax.typeof(x).sharding.spec.partitions
    return PartitionSpec(*entries, *(None,) * (x.ndim - len(entries)))


def typed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Reshards `x` to the type of `like`, an array of the same rank; a no-op over Auto axes."""
    return jax.sharding.reshard(x, type_spec(like)) if is_typed() else x


def with_common_dim_types(trees: PyTree, num_dims: int) -> PyTree:
    """Reshards arrays so that their first `num_dims` dims have a common type, as a vmap needs.

    The common type of a dim is that of the first array that splits it.
    """
    if not num_dims or not is_typed():
        return trees
    specs = jax.tree.leaves(jax.tree.map(type_spec, trees))
    first = [next(filter(None, (spec[dim] for spec in specs)), None) for dim in range(num_dims)]
    return jax.tree.map(
        lambda x: jax.sharding.reshard(x, PartitionSpec(*first, *type_spec(x)[num_dims:])), trees
    )
