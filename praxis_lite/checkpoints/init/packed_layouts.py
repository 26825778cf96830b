"""Converts weights between their declared layout and the packed layout in a stored state."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.core.sharding.memory_spaces import DEVICE
from praxis_lite.layers.whole_model.packed_weights import PackedForm

__all__ = ("unpacked_layout",)


def unpacked_layout(layout: StateLayout) -> StateLayout:
    """Returns the layout with each packed weight replaced by the leaf that its layer declares."""
    axis_names = tuple(layout.axis_sizes)

    # In the trees of a layout, a packed weight is a subtree of parts. Replace it by a single leaf.
    def replace_packed(tree: Any, leaf_for: Any, path: str = "") -> Any:
        if path in layout.forms:
            return leaf_for(path, layout.forms[path])
        if isinstance(tree, Mapping):
            return {
                name: replace_packed(child, leaf_for, f"{path}/{name}".lstrip("/"))
                for name, child in tree.items()
            }
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):  # A TrainState.
            names = [field.name for field in dataclasses.fields(tree)]
            return dataclasses.replace(
                tree,
                **{name: replace_packed(getattr(tree, name), leaf_for, name) for name in names},
            )
        return tree

    def shape(path: str, form: PackedForm) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(form.spec.shape, form.spec.dtype)

    return dataclasses.replace(
        layout,
        shapes=replace_packed(layout.shapes, shape),
        forms={},
        specs=replace_packed(
            layout.specs, lambda path, form: form.spec.partition_spec(axis_names, path)
        ),
        memory_kinds=(
            layout.memory_kinds and replace_packed(layout.memory_kinds, lambda *_: DEVICE)
        ),
    )


def packed_paths(layout: StateLayout, paths: Collection[str]) -> set[str]:
    """Converts paths of weights in `unpacked_layout(layout)` to their paths in `layout`."""
    return {
        part
        for path in paths
        for part in (
            [f"{path}/{name}" for name in layout.forms[path].parts]
            if path in layout.forms
            else [path]
        )
    }


def pack_weight(
    layout: StateLayout, path: str, weight: jax.Array, mesh: Mesh
) -> dict[str, jax.Array]:
    """Converts a weight to the arrays that a layout stores for the weight.

    Args:
      layout: The layout of the state.
      path: Path of the weight in `unpacked_layout(layout)`.
      weight: The weight, padded and sharded as in `unpacked_layout(layout)`. It is deleted if the
        layout packs it.
      mesh: The mesh.

    Returns:
      The padded arrays, keyed by their paths in `layout`.
    """
    if path not in layout.forms:
        return {path: weight}
    form = layout.forms[path]
    leaf_by_path = {leaf.path: leaf for leaf in layout.leaves()}
    part_leaves = {name: leaf_by_path[f"{path}/{name}"] for name in form.parts}
    logical = tuple(slice(size) for size in form.spec.shape)

    def pack(x: jax.Array) -> dict[str, jax.Array]:
        parts = form.to_parts(x[logical])
        return {name: _padded(part, part_leaves[name]) for name, part in parts.items()}

    shardings = {name: NamedSharding(mesh, leaf.spec) for name, leaf in part_leaves.items()}
    # Free the weight before the next one is read, to limit the peak memory.
    parts = jax.block_until_ready(jax.jit(pack, out_shardings=shardings)(weight))
    weight.delete()
    return {f"{path}/{name}": part for name, part in parts.items()}


def unpacked_arrays(
    layout: StateLayout, arrays: Mapping[str, jax.Array], mesh: Mesh
) -> dict[str, jax.Array]:
    """Converts arrays of a layout to those of `unpacked_layout(layout)`, keyed by path."""
    leaf_by_path = {leaf.path: leaf for leaf in layout.leaves()}
    unpacked_leaves = {leaf.path: leaf for leaf in unpacked_layout(layout).leaves()}
    unpacked = dict(arrays)
    for path, form in layout.forms.items():
        part_leaves = {name: leaf_by_path[f"{path}/{name}"] for name in form.parts}

        def unpack(
            parts: Mapping[str, jax.Array],
            form: PackedForm = form,
            part_leaves: Mapping[str, LeafLayout] = part_leaves,
            leaf: LeafLayout = unpacked_leaves[path],
        ) -> jax.Array:
            # The parts are unpadded before they are combined, because their padding may differ.
            logical = {
                name: x[tuple(map(slice, part_leaves[name].shape))] for name, x in parts.items()
            }
            return _padded(form.from_parts(logical).astype(form.spec.dtype), leaf)

        parts = {name: unpacked.pop(f"{path}/{name}") for name in form.parts}
        sharding = NamedSharding(mesh, unpacked_leaves[path].spec)
        unpacked[path] = jax.jit(unpack, out_shardings=sharding)(parts)
    return unpacked


def _padded(x: jax.Array, leaf: LeafLayout) -> jax.Array:
    sizes = zip(leaf.shape, leaf.padded_shape, strict=True)
    return jax.numpy.pad(x, [(0, padded - size) for size, padded in sizes])
