"""Weights in the form that a state keeps, made of whole ones that were read; and the way back."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.core.sharding.memory_spaces import DEVICE
from praxis_lite.layers.whole_model.packed_weights import PackedForm

__all__ = ("whole_layout",)


def whole_layout(layout: StateLayout) -> StateLayout:
    """Returns the layout with the weights as their layers declare them: a leaf for each."""
    axis_names = tuple(layout.axis_sizes)

    def replaced(tree: Any, of: Any, path: str = "") -> Any:
        if path in layout.forms:
            return of(path, layout.forms[path])
        if isinstance(tree, Mapping):
            return {
                name: replaced(child, of, f"{path}/{name}".lstrip("/"))
                for name, child in tree.items()
            }
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):  # A TrainState.
            names = [field.name for field in dataclasses.fields(tree)]
            return dataclasses.replace(
                tree, **{name: replaced(getattr(tree, name), of, name) for name in names}
            )
        return tree

    def shape(path: str, form: PackedForm) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(form.spec.shape, form.spec.dtype)

    return dataclasses.replace(
        layout, shapes=replaced(layout.shapes, shape), forms={},
        specs=replaced(
            layout.specs, lambda path, form: form.spec.partition_spec(axis_names, path)
        ),
        memory_kinds=layout.memory_kinds and replaced(layout.memory_kinds, lambda *_: DEVICE),
    )


def kept_paths(layout: StateLayout, paths: Collection[str]) -> set[str]:
    """Returns the paths in a layout of weights, given those in `whole_layout`."""
    return {
        part for path in paths
        for part in (
            [f"{path}/{name}" for name in layout.forms[path].parts] if path in layout.forms
            else [path]
        )
    }


def in_kept_form(
    layout: StateLayout, path: str, weight: jax.Array, mesh: Mesh
) -> dict[str, jax.Array]:
    """Returns the arrays by path that a layout keeps of a weight, padded and in their shards.

    Args:
      path: in `whole_layout(layout)`.
      weight: padded and split as there; it is deleted where another form is kept.
    """
    if path not in layout.forms:
        return {path: weight}
    form = layout.forms[path]
    leaf_of = {leaf.path: leaf for leaf in layout.leaves()}
    local = {name: leaf_of[f"{path}/{name}"] for name in form.parts}
    true = tuple(slice(size) for size in form.spec.shape)

    def kept(x: jax.Array) -> dict[str, jax.Array]:
        return {name: _padded(part, local[name]) for name, part in form.to_parts(x[true]).items()}

    shardings = {name: NamedSharding(mesh, leaf.spec) for name, leaf in local.items()}
    parts = jax.block_until_ready(jax.jit(kept, out_shardings=shardings)(weight))
    weight.delete()
    return {f"{path}/{name}": part for name, part in parts.items()}


def whole_arrays(
    layout: StateLayout, arrays: Mapping[str, jax.Array], mesh: Mesh
) -> dict[str, jax.Array]:
    """Returns arrays by path as `whole_layout` has them, given those of a layout."""
    leaf_of = {leaf.path: leaf for leaf in layout.leaves()}
    whole_leaf = {leaf.path: leaf for leaf in whole_layout(layout).leaves()}
    result = dict(arrays)
    for path, form in layout.forms.items():
        local = {name: leaf_of[f"{path}/{name}"] for name in form.parts}

        def whole(
            parts: Mapping[str, jax.Array], form: PackedForm = form,
            local: Mapping[str, LeafLayout] = local, leaf: LeafLayout = whole_leaf[path],
        ) -> jax.Array:
            logical = {name: x[tuple(map(slice, local[name].shape))] for name, x in parts.items()}
            return _padded(form.from_parts(logical).astype(form.spec.dtype), leaf)

        parts = {name: result.pop(f"{path}/{name}") for name in form.parts}
        sharding = NamedSharding(mesh, whole_leaf[path].spec)
        result[path] = jax.jit(whole, out_shardings=sharding)(parts)
    return result


def _padded(x: jax.Array, leaf: LeafLayout) -> jax.Array:
    sizes = zip(leaf.shape, leaf.padded_shape, strict=True)
    return jax.numpy.pad(x, [(0, padded - size) for size, padded in sizes])
