"""What Flax Linen's boxes declare of a weight, and how it is drawn without their constraints."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta

from praxis_lite.core.models.model import named_dims
from praxis_lite.core.sharding.devices.axis_types import abstract_mesh_of
from praxis_lite.core.sharding.weight_spec import WeightSpec

PyTree = Any
# The shape of a weight as its layer sees it, without the dims of stacks, by path.
OwnShapes = dict[tuple[str, ...], tuple[int, ...]]


def boxed_spec(path: str, leaf: Any, own_shape: tuple[int, ...] | None) -> WeightSpec:
    """Returns the declaration of a leaf of boxed shapes.

    Args:
      path: of the leaf, for the message.
      leaf: a shape, perhaps boxed.
      own_shape: the shape that its layer gave it; dims in front of that are layers of a stack.
    """
    value = unboxed(leaf)
    spec = WeightSpec(tuple(value.shape), value.dtype)
    num_stacked = 0
    if own_shape is not None and spec.shape[value.ndim - len(own_shape) :] == own_shape:
        num_stacked = value.ndim - len(own_shape)
    if not isinstance(leaf, meta.Partitioned):
        return dataclasses.replace(spec, stack_split_dims_mapping=(None,) * num_stacked)
    names = tuple(leaf.names)
    is_logical = isinstance(leaf, nn.LogicallyPartitioned)
    function = "nn.with_logical_partitioning" if is_logical else "nn.with_partitioning"
    by = f"{function} {names}"
    names = named_dims(path, by, names, spec.shape)
    stacked, local = names[:num_stacked], names[num_stacked:]
    if not is_logical:
        return dataclasses.replace(
            spec, split_dims_mapping=local, stack_split_dims_mapping=stacked, declared_by=by
        )
    return dataclasses.replace(
        spec, logical_axes=names, logical_axis_rules=tuple(leaf.rules or ()), declared_by=by,
        # The job's rules say what the name of a stack's dim means.
        stack_split_dims_mapping=(None,) * num_stacked,
    )


def is_box(x: Any) -> bool:
    """Returns True if `x` is metadata around a value."""
    return isinstance(x, meta.AxisMetadata)


def unboxed(tree: PyTree) -> PyTree:
    """Returns the boxes' contents. Flax's own `unbox` states the layout too, even of shapes."""

    def value(x: Any) -> Any:
        while is_box(x):
            x = x.unbox(apply_constraint=False) if isinstance(x, meta.Partitioned) else x.unbox()
        return x

    return jax.tree.map(value, tree, is_leaf=is_box)


def _check_box(path: str, leaf: Any) -> None:
    """Checks a box before Flax states its layout, which JAX refuses in words of its own.

    Raises:
      ConfigError: its names do not fit the weight's dims, or the axes of the mesh that is set.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(leaf, meta.Partitioned):
        spec = boxed_spec(path, leaf, None)
        if spec.logical_axes is None and not mesh.empty:
            spec.partition_spec(mesh.axis_names, path)


def drawing_off_mesh(own_shapes: OwnShapes | None = None) -> Callable:
    """Returns an interceptor of methods under which initializers run as if there were no mesh.

    An initializer's box states the layout of what it made, and Flax calls it in every pass to
    check the shape of each weight. But DenseGeneral flattens its kernel first, and three names on
    a kernel of two dims are an error of JAX as soon as a mesh is set.

    Args:
      own_shapes: filled with the shape of each weight, by path, as its layer sees it.

    Raises:
      ConfigError: when an initializer's box does not fit its weight or the mesh; names the weight.
    """

    def intercepted(call: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        scope = context.module.scope
        if scope is None or "param" in vars(scope):
            return call(*args, **kwargs)
        flax_param = scope.param

        def param(name: str, initializer: Callable, *args: Any, **kwargs: Any) -> Any:
            def off_mesh(*args: Any, **kwargs: Any) -> Any:
                with jax.sharding.use_abstract_mesh(abstract_mesh_of((), ())):
                    made = initializer(*args, **kwargs)
                _check_box("/".join(("params", *scope.path, name)), made)
                return made

            value = flax_param(name, off_mesh, *args, **kwargs)
            array = unboxed(value)
            if own_shapes is not None and hasattr(array, "shape"):
                own_shapes["params", *scope.path, name] = tuple(array.shape)
            return value

        scope.param = param
        return call(*args, **kwargs)

    return intercepted
