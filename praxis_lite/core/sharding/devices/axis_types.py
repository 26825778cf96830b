"""The types of mesh axes: Auto, which XLA splits by, or Explicit, which JAX's types of arrays name.

Every mesh of the library is made here, with the type of each axis stated: JAX's own functions
differ in what they take by default (`jax.make_mesh` Explicit, `Mesh` Auto).

Arrays are on meshes of Auto axes when they cross a program's boundary, because JAX has no type for
an array that its devices do not divide. A mesh with Explicit axes makes them types inside the
steps that are typed (`TaskOnMesh.typed`), by `jax.sharding.explicit_axes`.
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

__all__ = ("STATED", "explicit_axes_of", "mesh_of", "untyped")

PyTree = Any
# As `MeshConfig.axis_types` names them.
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}

# The scope of what states a type, by which a traced program shows where arrays are moved.
STATED = "stated"


class UnevenType(ConfigError):
    """An array has no type, for Explicit axes do not divide a dim that is split over them."""


def mesh_of(
    devices: np.ndarray, axis_names: Sequence[str], axis_types: Sequence[AxisType] | None = None
) -> Mesh:
    """Returns a mesh over devices [size of each axis]; without `axis_types` all axes are Auto."""
    types = (AxisType.Auto,) * devices.ndim if axis_types is None else tuple(axis_types)
    return Mesh(devices, tuple(axis_names), axis_types=types)


def abstract_mesh_of(sizes: Sequence[int], axis_names: Sequence[str]) -> AbstractMesh:
    """Returns a mesh of Auto axes without devices."""
    return AbstractMesh(tuple(sizes), tuple(axis_names), axis_types=(AxisType.Auto,) * len(sizes))


def explicit_axes_of(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the names of a mesh's Explicit axes."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def is_typed() -> bool:
    """Returns True while a program is traced in which JAX types arrays over Explicit axes."""
    return bool(explicit_axes_of(jax.sharding.get_abstract_mesh()))


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh of the same devices with Auto axes, which the state is on."""
    return mesh_of(mesh.devices, mesh.axis_names) if explicit_axes_of(mesh) else mesh


def only_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Returns a spec of the same rank whose dims split over `axes` alone."""
    left = (tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec)
    return PartitionSpec(*map(entry_of, left))


def stated(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns `x` with a layout stated: to XLA over Auto axes, as its type over Explicit ones.

    Args:
      spec: without manual axes.

    Raises:
      ConfigError: Explicit axes do not divide a dim that the spec splits over them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = explicit_axes_of(mesh)
    if not explicit:
        return jax.lax.with_sharding_constraint(x, spec)
    check_divides(x.shape, spec, "An activation", mesh, explicit)
    with jax.named_scope(STATED):
        x = jax.sharding.reshard(x, _still_reduced(x, only_axes(spec, explicit)))
    left = only_axes(spec, [axis for axis in mesh.axis_names if axis not in explicit])
    return jax.lax.with_sharding_constraint(x, left) if any(left) else x


def _still_reduced(x: jax.Array, spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec with what the type of `x` says of its gradient, see `with_gradient_terms`."""
    used = {axis for entry in spec for axis in axes_of(entry)}
    reduced = set(jax.typeof(x).sharding.spec.reduced) - used
    return spec.update(reduced=reduced) if reduced else spec


def with_gradient_terms(weight: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns a weight whose gradient has a term on each device along `axes`, not yet their sum.

    JAX calls the weight's type `reduced` over these axes, that of the gradient `unreduced`. A
    weight that splits over one of them stays as it is: JAX has no type of a gradient that is
    scattered over one axis and not yet summed over another.
    """
    spec = type_spec(weight)
    is_split = any(axis in axes for entry in spec for axis in axes_of(entry))
    return weight if is_split else jax.sharding.reshard(weight, spec.update(reduced=set(axes)))


def no_terms(of: jax.Array, dtype: Any) -> jax.Array:
    """Returns zeros typed as the gradient of a weight of `with_gradient_terms`."""
    spec = type_spec(of)
    zeros = jnp.zeros(of.shape, dtype, out_sharding=spec)
    reduced = set(jax.typeof(of).sharding.spec.reduced)
    return jax.sharding.reshard(zeros, spec.update(unreduced=reduced)) if reduced else zeros


def summed_terms(x: jax.Array) -> jax.Array:
    """Returns the sum of a gradient's terms; of a weight, one whose gradient has none."""
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, type_spec(x)) if spec.reduced or spec.unreduced else x


def check_divides(
    shape: Sequence[int], spec: PartitionSpec, what: str, mesh: Mesh | AbstractMesh,
    explicit_axes: Sequence[str],
) -> None:
    """Checks that an array has a type.

    Args:
      what: it is, for the message: a path, or a noun with its article.

    Raises:
      UnevenType: Explicit axes do not divide a dim that the spec splits over them.
    """
    for dim, entry in enumerate(only_axes(spec, explicit_axes)):
        if shape[dim] % math.prod(mesh.shape[axis] for axis in axes_of(entry)):
            raise UnevenType(
                f"{what} of shape {tuple(shape)} splits its dim {dim} of {shape[dim]} over "
                f"{entry!r} of the mesh {dict(mesh.shape)}, which do not divide it. JAX has types "
                "of even splits only. Change the size or the mesh, or say mesh.axis_types=auto, "
                "with which every size is padded."
            )


def untyped(
    function: Callable[..., Any], *args: PyTree, out: PartitionSpec | Callable[[PyTree], PyTree],
) -> Any:
    """Returns `function(*args)`, computed as over Auto axes, its results typed again.

    For what JAX cannot type, such as a kernel. Over Auto axes alone it is `function(*args)`.

    Args:
      args: trees of arrays; of what `function` closes over nothing is an array.
      out: a PartitionSpec for all results; or a function of the results, which returns one each.
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


def has_no_type(error: Exception) -> bool:
    """Returns True if JAX raised `error` because it has no type of a result over Explicit axes."""
    # JAX exports no class of it. A loop says it of what it reads or carries as another error.
    words = ("should be replicated", "aval mesh", "shard", "equal types")
    return isinstance(error, UnevenType) or type(error).__name__ == "ShardingTypeError" or (
        isinstance(error, ValueError | TypeError | AssertionError)
        and any(word in str(error) for word in words) and not isinstance(error, ConfigError)
    )


_notes: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "what has no types", default=None
)


@contextlib.contextmanager
def noting(notes: dict[str, str]) -> Iterator[None]:
    """Fills `notes` with the reason, by a layer's path, why it is computed as over Auto axes."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def note_untyped(path: str, reason: str) -> None:
    """Notes, for the report of the step that is traced, why a layer has no types inside."""
    notes = _notes.get()
    if notes is not None:
        notes.setdefault(path, reason)


def type_spec(x: jax.Array) -> PartitionSpec:
    """Returns the spec of an array's type, extended to its rank; Auto axes are not in it."""
    entries = jax.typeof(x).sharding.spec.partitions
    return PartitionSpec(*entries, *(None,) * (x.ndim - len(entries)))


def typed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `x`, of the rank of `like`, with its type; over Auto axes `x` itself."""
    return jax.sharding.reshard(x, type_spec(like)) if is_typed() else x


def typed_alike(trees: PyTree, num_dims: int) -> PyTree:
    """Returns arrays whose first dims have the type of the first that splits them, for a vmap."""
    if not num_dims or not is_typed():
        return trees
    specs = jax.tree.leaves(jax.tree.map(type_spec, trees))
    first = [next(filter(None, (spec[dim] for spec in specs)), None) for dim in range(num_dims)]
    return jax.tree.map(
        lambda x: jax.sharding.reshard(x, PartitionSpec(*first, *type_spec(x)[num_dims:])), trees
    )
