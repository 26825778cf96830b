"""Where an optimizer's slots live: which dims of its weight each slot has, and so how it splits.

No table of optimizers: the optimizer itself is asked. `init` is traced on weights whose dims all
have different sizes, and a slot's dims are recognised by their sizes. A slot of the weight's own
shape splits as the weight; a factored one drops the reduced dim's axis; scalars are replicated.

With `slot_mesh_axes` slots split as their weights would over more axes (`extended_specs`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.learner.optimizer_groups import Group, spec_items
from praxis_lite.sharding import WeightSpec, padded_shape, to_partition_spec
from praxis_lite.sharding.logical_axes import axes_of

PyTree = Any
Shape = tuple[int, ...]
Path = tuple[str, ...]


def extended_specs(
    weight_specs: PyTree, slot_mesh_axes: Sequence[str], axis_sizes: Mapping[str, int]
) -> PyTree:
    """Returns the PartitionSpec of each weight, split over `slot_mesh_axes` too.

    What an update needs besides weights follows these: slots, averages, gradients, new weights.
    With weights that are replicated over the axes this is ZeRO-1 (Rajbhandari et al. 2020), or the
    sharded weight update of Xu et al. 2020 (https://arxiv.org/abs/2004.13336).

    The axes that the weight's spec does not use yet go to one dim, behind the axes that are there,
    so that a device's part of a slot lies within its part of the weight. It is the dim that then
    has the least padding, the largest of several; a stacked dim only where no other will do, for a
    gradient comes layer by layer. A weight without a dim of as many elements as devices stays as it
    is.

    Args:
      weight_specs: nested dict of WeightSpec.
      slot_mesh_axes: names of mesh axes; (): the weights' own specs.
      axis_sizes: devices along each mesh axis, in the mesh's order.

    Raises:
      ConfigError: an axis that the mesh has not, or one named twice.
    """
    # Checked as the mapping of one dim that splits over all of them.
    (entry,) = to_partition_spec(
        [tuple(slot_mesh_axes)], tuple(axis_sizes), path="Learner.slot_mesh_axes"
    )
    specs: dict[str, Any] = {}
    for path, weight in spec_items(weight_specs):
        node = specs
        for name in path[:-1]:
            node = node.setdefault(name, {})
        spec = weight.partition_spec(tuple(axis_sizes), "/".join(path))
        node[path[-1]] = _extended(spec, weight, axes_of(entry), axis_sizes)
    return specs


def _extended(
    spec: PartitionSpec, weight: WeightSpec, mesh_axes: Sequence[str], axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    entries = [axes_of(entry) for entry in spec]
    used = {axis for axes in entries for axis in axes}
    added = tuple(axis for axis in mesh_axes if axis not in used)
    if not added:
        return spec
    stack_rank = len(weight.stack_shape)
    candidates = []
    for dim, size in enumerate(weight.shape):
        axes = entries[dim] + added
        if size < math.prod(axis_sizes[axis] for axis in axes):
            continue
        candidate = PartitionSpec(*spec[:dim], axes if len(axes) > 1 else axes[0], *spec[dim + 1 :])
        stored = math.prod(padded_shape(weight.shape, candidate, axis_sizes))
        candidates.append(((dim < stack_rank, stored, -size, dim), candidate))
    return min(candidates)[1] if candidates else spec


def split_as_slots(tree: PyTree, weight_specs: PyTree, slot_mesh_axes: Sequence[str]) -> PyTree:
    """Returns `tree` with the layout of `extended_specs` stated to XLA, or as it is.

    Nothing is stated without `slot_mesh_axes`, nor where no mesh is set.

    Args:
      tree: a value of the true shape per weight: gradients, weights.
      weight_specs: nested dict of WeightSpec; it may have weights that `tree` lacks.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not slot_mesh_axes or mesh.empty:
        return tree
    specs = extended_specs(weight_specs, slot_mesh_axes, mesh.shape)

    def constrain(node: Any, spec: Any) -> Any:
        if isinstance(spec, PartitionSpec):
            return jax.lax.with_sharding_constraint(node, spec)
        return {name: constrain(child, spec[name]) for name, child in node.items()}

    return constrain(tree, specs)


def slot_specs(
    weights: Mapping[str, Group], partition_specs: Mapping[str, Group]
) -> dict[str, PyTree]:
    """Returns the PartitionSpec of every slot, by group as `Learner.init` makes them.

    Args:
      weights: the learner's groups of WeightSpecs.
      partition_specs: the same groups of specs, extended to the weights' ranks.
    """
    return {
        name: _group_slot_specs(group, partition_specs[name].weights)
        for name, group in weights.items()
    }


def _group_slot_specs(group: Group, partition_specs: PyTree) -> PyTree:
    stack_rank = len(group.stack_shape)
    weights = {
        _dict_path(path): (weight.shape[stack_rank:], tuple(spec))
        for (path, weight), spec in zip(
            jax.tree_util.tree_flatten_with_path(group.weights, is_leaf=_is_weight_spec)[0],
            jax.tree.leaves(partition_specs, is_leaf=_is_partition_spec),
            strict=True,
        )
    }

    def slots_if(resize: Callable[[Shape], Shape]) -> tuple[list[tuple[tuple, Any]], Any]:
        structs = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(resize(w.shape[stack_rank:]), w.dtype),
            group.weights,
            is_leaf=_is_weight_spec,
        )
        slots = jax.eval_shape(group.optimizer.init, structs)
        return jax.tree_util.tree_flatten_with_path(slots)

    slots, treedef = slots_if(lambda shape: shape)
    probes = [(slots_if(resize)[0], resize) for resize in (_distinct_above, _distinct_below)]
    specs = []
    for i, (path, slot) in enumerate(slots):
        weight = _weight_of(_dict_path(path), weights)
        if weight is None:
            specs.append(PartitionSpec(*(None,) * (stack_rank + slot.ndim)))
            continue
        shape, spec = weight
        candidates = [(probe[i][1].shape, resize(shape)) for probe, resize in probes]
        dims = _recognise(slot.shape, shape, candidates)
        # A dim that comes twice, as in a preconditioner [d, d], splits once: an axis cannot split
        # two dims.
        own = [
            None if dim is None or dim in dims[:position] else spec[stack_rank + dim]
            for position, dim in enumerate(dims)
        ]
        specs.append(PartitionSpec(*spec[:stack_rank], *own))
    return jax.tree.unflatten(treedef, specs)


def _recognise(
    slot_shape: Shape, shape: Shape, candidates: Sequence[tuple[Shape, Shape]]
) -> Sequence[int | None]:
    """Returns for each of a slot's dims the weight's dim it is, or None for one of its own."""
    for probed_slot, probed in candidates:
        dims = [probed.index(size) if size in probed else None for size in probed_slot]
        # A dim of the slot's own has its size whatever the weight's sizes. Where it has not, the
        # optimizer decides otherwise at the probed sizes (whether to factor).
        wanted = [own if d is None else shape[d] for d, own in zip(dims, probed_slot, strict=True)]
        if wanted == list(slot_shape):
            return dims
    return range(len(shape)) if slot_shape == shape else [None] * len(slot_shape)
def _distinct_above(shape: Shape) -> Shape:
    """Returns the sizes, raised as little as makes them differ, in the same order, none 1."""
    sizes, floor = list(shape), 2
    for dim in sorted(range(len(shape)), key=lambda d: (shape[d], d)):
        sizes[dim] = max(shape[dim], floor)
        floor = sizes[dim] + 1
    return tuple(sizes)


def _distinct_below(shape: Shape) -> Shape:
    """Returns the sizes, lowered as little as makes them differ, in the same order."""
    sizes, ceiling = list(shape), max(shape, default=0)
    for dim in sorted(range(len(shape)), key=lambda d: (shape[d], d), reverse=True):
        sizes[dim] = min(shape[dim], ceiling)
        ceiling = sizes[dim] - 1
    return tuple(sizes) if min(sizes, default=2) > 1 else _distinct_above(shape)


def _weight_of(path: Path, weights: dict[Path, tuple[Shape, tuple]]) -> tuple[Shape, tuple] | None:
    """Returns the weight whose path a slot's path ends with; None for the optimizer's own state."""
    for start in range(len(path)):
        if path[start:] in weights:
            return weights[path[start:]]
    return None


def _dict_path(path: tuple) -> Path:
    return tuple(str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey))


def _is_weight_spec(x: Any) -> bool:
    return isinstance(x, WeightSpec)


def _is_partition_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
