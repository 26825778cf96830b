"""Weight declarations in Flax Linen's boxes, and initialization without sharding constraints."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta

from praxis_lite.core.models.model import named_dims
from praxis_lite.core.sharding.devices.axis_types import abstract_mesh_of
from praxis_lite.core.sharding.logical_axes import MeshAxes
from praxis_lite.core.sharding.weight_spec import WeightSpec

PyTree = Any
# Shapes of weights in their layers, without stacked dims, keyed by path.
OwnShapes = dict[tuple[str, ...], tuple[int, ...]]


def boxed_spec(path: str, leaf: Any, own_shape: tuple[int, ...] | None) -> WeightSpec:
    """Returns the WeightSpec that a boxed shape declares.

    Args:
      path: Path of the leaf, for error messages.
      leaf: A shape, which may be boxed.
      own_shape: Shape of the weight in its layer; additional leading dims are stacked layers.
    """
    value = unbox(leaf)
    spec = WeightSpec(tuple(value.shape), value.dtype)
    num_stacked = 0
    # Dims before the shape that the layer declares are stacked.
    if own_shape is not None and spec.shape[value.ndim - len(own_shape) :] == own_shape:
        num_stacked = value.ndim - len(own_shape)
    if not isinstance(leaf, meta.Partitioned):
        return dataclasses.replace(spec, stack_split_dims_mapping=(None,) * num_stacked)
    names: tuple[MeshAxes, ...] = tuple(leaf.names)
    is_logical = isinstance(leaf, nn.LogicallyPartitioned)
    function = "nn.with_logical_partitioning" if is_logical else "nn.with_partitioning"
    by = f"{function} {names}"
    names = named_dims(path, by, names, spec.shape)
    stacked, local = names[:num_stacked], names[num_stacked:]
    if not isinstance(leaf, nn.LogicallyPartitioned):
        return dataclasses.replace(
            spec, split_dims_mapping=local, stack_split_dims_mapping=stacked, declared_by=by
        )
    return dataclasses.replace(
        spec,
        logical_axes=names,
        logical_axis_rules=tuple(leaf.rules or ()),
        declared_by=by,
        # The job's rules map the names of stacked dims.
        stack_split_dims_mapping=(None,) * num_stacked,
    )


def is_box(x: Any) -> bool:
    """Returns whether `x` is one of Flax's boxes, which add metadata to a value."""
    return isinstance(x, meta.AxisMetadata)


def unbox(tree: PyTree) -> PyTree:
    """Removes Flax's boxes from a tree. Unlike Flax's `unbox`, it adds no sharding constraints."""

    def unbox_leaf(x: Any) -> Any:
        while is_box(x):
            x = x.unbox(apply_constraint=False) if isinstance(x, meta.Partitioned) else x.unbox()
        return x

    return jax.tree.map(unbox_leaf, tree, is_leaf=is_box)


def _check_box(path: str, leaf: Any) -> None:
    """Checks a box before Flax constrains its sharding, because JAX's errors would be less clear.

    Raises:
      ConfigError: The box's names do not match the weight's dims, or the axes of the current mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(leaf, meta.Partitioned):
        spec = boxed_spec(path, leaf, None)
        if spec.logical_axes is None and not mesh.empty:
            spec.partition_spec(mesh.axis_names, path)


def initialize_off_mesh(own_shapes: OwnShapes | None = None) -> Callable:
    """Returns a method interceptor under which initializers run without a mesh.

    An initializer's box constrains the sharding of its array, and Flax calls the initializer in
    every pass to check the shape of each weight. DenseGeneral flattens its kernel first, so its
    box may have three names for a kernel with two dims. JAX rejects such a box if a mesh is set.

    Args:
      own_shapes: Output dict that maps the path of each weight to its shape in its layer. May be
        None.

    Raises:
      ConfigError: When called: an initializer's box does not match its weight or the mesh.
    """

    def intercept(call: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        scope = context.module.scope
        # An earlier method of the same module has replaced `param` already.
        if scope is None or "param" in vars(scope):
            return call(*args, **kwargs)
        flax_param = scope.param

        def param(name: str, initializer: Callable, *args: Any, **kwargs: Any) -> Any:
            def initialize(*args: Any, **kwargs: Any) -> Any:
                # Without a mesh, a box does not constrain its array.
                with jax.sharding.use_abstract_mesh(abstract_mesh_of((), ())):
                    boxed = initializer(*args, **kwargs)
                _check_box("/".join(("params", *scope.path, name)), boxed)
                return boxed

            value = flax_param(name, initialize, *args, **kwargs)
            array = unbox(value)
            if own_shapes is not None and hasattr(array, "shape"):
                own_shapes["params", *scope.path, name] = tuple(array.shape)
            return value

        scope.param = param
        return call(*args, **kwargs)

    return intercept
