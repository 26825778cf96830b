"""Specs of an optimizer's slots: each dim of a slot is split as the dim of its weight it follows.

There is no table of optimizers. Instead `init` is traced on weights whose dims all have different
sizes, and the dims of a slot are recognized by their sizes. A slot with the weight's shape is split
as the weight, a factored slot drops the axes of the reduced dim, and scalars are replicated.

With `slot_mesh_axes`, slots are split over more axes than their weights. A weight may also declare
a separate split of its slots, as with Flax's `optimizer_sharding` (`extended_specs`). The slots of
weights that match `host_slots` are in host memory (`slot_memory`).
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.learner.weight_groups import Group
from praxis_lite.core.sharding.leaf_paths import path_of
from praxis_lite.core.sharding.logical_axes import axes_of, entry_of
from praxis_lite.core.sharding.memory_spaces import DEVICE, HOST
from praxis_lite.core.sharding.padding import padded_shape
from praxis_lite.core.sharding.split_dims import to_partition_spec
from praxis_lite.core.sharding.weight_spec import WeightSpec, spec_items

PyTree = Any
Shape = tuple[int, ...]
Path = tuple[str, ...]


def extended_specs(
    weight_specs: PyTree, slot_mesh_axes: Sequence[str], axis_sizes: Mapping[str, int]
) -> PyTree:
    """Returns each weight's spec, or that of its `slot_axes`, extended by `slot_mesh_axes`.

    Slots, averages, gradients and the updated weights have these specs during an update. If the
    weights are replicated over the axes, this is ZeRO-1 (Rajbhandari et al. 2020), or the sharded
    weight update of Xu et al. 2020 (https://arxiv.org/abs/2004.13336).

    The axes that the weight's spec does not use yet are appended to those of one dim, so that a
    device's shard of a slot is part of its shard of the weight. The dim is the one that then has
    the least padding, and the largest of several. Stacked dims are used only if no other dim fits,
    because gradients are computed layer by layer. A weight without a dim of as many elements as
    devices is not extended.

    Args:
      weight_specs: Nested dict of WeightSpec.
      slot_mesh_axes: Names of mesh axes.
      axis_sizes: Number of devices along each mesh axis, in the mesh's order.

    Raises:
      ConfigError: An axis is not in the mesh, or is listed twice.
    """
    # Validated as the mapping of a single dim that is split over all of them.
    (entry,) = to_partition_spec(
        [tuple(slot_mesh_axes)], tuple(axis_sizes), path="Learner.slot_mesh_axes"
    )

    def extended(path: tuple[Any, ...], weight: WeightSpec) -> PartitionSpec:
        name = path_of(path)
        if weight.slot_axes is None:
            spec = weight.partition_spec(tuple(axis_sizes), name)
        else:
            spec = to_partition_spec(
                weight.slot_axes, tuple(axis_sizes), rank=len(weight.shape), path=name
            )
        return _extended(spec, weight, axes_of(entry), axis_sizes)

    return jax.tree_util.tree_map_with_path(extended, weight_specs, is_leaf=_is_weight_spec)


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
        candidate = PartitionSpec(*spec[:dim], entry_of(axes), *spec[dim + 1 :])
        padded_size = math.prod(padded_shape(weight.shape, candidate, axis_sizes))
        candidates.append(((dim < stack_rank, padded_size, -size, dim), candidate))
    return min(candidates)[1] if candidates else spec


def slot_specs(
    groups: Mapping[str, Group], weight_specs: PyTree, partition_specs: PyTree
) -> dict[str, PyTree]:
    """Returns the PartitionSpec of every slot, by group, in the structure of `Learner.init`.

    Args:
      groups: Groups of WeightGroups by name.
      weight_specs: Nested dict of WeightSpec.
      partition_specs: Tree of PartitionSpecs extended to the weights' ranks.
    """
    return {
        name: _group_slot_specs(group, group.select(weight_specs), group.select(partition_specs))
        for name, group in groups.items()
    }


def slot_memory(opt_shapes: Mapping[str, PyTree], on_host: Collection[str]) -> dict[str, PyTree]:
    """Returns the memory kind of each slot and each average.

    Args:
      opt_shapes: Shapes of the result of `BoundLearner.init`.
      on_host: Paths of weights whose slots are in host memory.
    """
    paths = {tuple(path.split("/")) for path in on_host}

    def kind(keys: tuple[Any, ...], slot: jax.ShapeDtypeStruct) -> str:
        path = _names(keys)
        is_listed = any(path[start:] in paths for start in range(len(path)))
        return HOST if is_listed else DEVICE

    trees = {name: opt_shapes[name] for name in ("slots", "ema") if name in opt_shapes}
    kinds: dict[str, PyTree] = jax.tree.map_with_path(kind, trees)
    return kinds


def _group_slot_specs(group: Group, weight_specs: PyTree, partition_specs: PyTree) -> PyTree:
    stack_rank = len(group.stack_shape)
    split = dict(_leaves(partition_specs))
    weights = {
        path: (weight.shape[stack_rank:], tuple(split[path]))
        for path, weight in spec_items(weight_specs)
    }

    def slots_if(resize: Callable[[Shape], Shape]) -> PyTree:
        structs = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(resize(w.shape[stack_rank:]), w.dtype), weight_specs,
            is_leaf=_is_weight_spec,
        )
        return jax.eval_shape(group.optimizer.init, structs)

    slots = slots_if(lambda shape: shape)
    # The second probe is traced only for slots that the first does not explain.
    probes = [(functools.cache(lambda resize=resize: jax.tree.leaves(slots_if(resize))), resize)
              for resize in (_distinct_above, _distinct_below)]
    specs = []
    for i, (path, slot) in enumerate(_leaves(slots)):
        # A slot's path ends with that of its weight, unless it belongs to the optimizer as a whole.
        ends = (path[start:] for start in range(len(path)))
        weight = next((weights[end] for end in ends if end in weights), None)
        if weight is None:
            specs.append(PartitionSpec(*(None,) * (stack_rank + slot.ndim)))
            continue
        shape, spec = weight
        candidates = ((probe()[i].shape, resize(shape)) for probe, resize in probes)
        dims = _recognise(slot.shape, shape, candidates)
        # If a slot has the same dim twice, as a preconditioner [d, d], only the first is split,
        # because an axis cannot split two dims.
        local = [
            None if dim is None or dim in dims[:position] else spec[stack_rank + dim]
            for position, dim in enumerate(dims)
        ]
        specs.append(PartitionSpec(*spec[:stack_rank], *local))
    return jax.tree.unflatten(jax.tree.structure(slots), specs)


def _recognise(
    slot_shape: Shape, shape: Shape, candidates: Iterable[tuple[Shape, Shape]]
) -> Sequence[int | None]:
    """Maps each slot dim to the weight dim it follows, or None if it follows none."""
    for probed_slot, probed in candidates:
        dims = [probed.index(size) if size in probed else None for size in probed_slot]
        # A dim that follows no weight dim has the same size for any weight. Otherwise the optimizer
        # behaves differently at the probed sizes, for example in whether to factor.
        expected = [
            size if dim is None else shape[dim]
            for dim, size in zip(dims, probed_slot, strict=True)
        ]
        if expected == list(slot_shape):
            return dims
    return range(len(shape)) if slot_shape == shape else [None] * len(slot_shape)


def _distinct_above(shape: Shape) -> Shape:
    """Raises sizes minimally until they differ and exceed 1, keeping their order."""
    sizes, floor = list(shape), 2
    for dim in sorted(range(len(shape)), key=lambda d: (shape[d], d)):
        sizes[dim] = max(shape[dim], floor)
        floor = sizes[dim] + 1
    return tuple(sizes)


def _distinct_below(shape: Shape) -> Shape:
    """Lowers sizes minimally until they differ, keeping their order."""
    sizes, ceiling = list(shape), max(shape, default=0)
    for dim in sorted(range(len(shape)), key=lambda d: (shape[d], d), reverse=True):
        sizes[dim] = min(shape[dim], ceiling)
        ceiling = sizes[dim] - 1
    return tuple(sizes) if min(sizes, default=2) > 1 else _distinct_above(shape)


def _leaves(tree: PyTree) -> list[tuple[Path, Any]]:
    """Returns the leaves with the dict keys on their paths."""
    return [(_names(keys), leaf) for keys, leaf in jax.tree.leaves_with_path(tree)]


def _names(keys: tuple[Any, ...]) -> Path:
    return tuple(str(part.key) for part in keys if isinstance(part, jax.tree_util.DictKey))


def _is_weight_spec(x: Any) -> bool:
    return isinstance(x, WeightSpec)
