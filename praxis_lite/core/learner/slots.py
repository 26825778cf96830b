"""Infers the PartitionSpecs for optimizer slots from the specs of their weights.

This works for any optimizer: its `init` is traced on weights whose dims all have different sizes,
so that each slot dim can be matched with a weight dim by its size. A slot dim is split like the
matching weight dim. A slot with the weight's shape is thus split like the weight, a factored slot
drops the axes of the reduced dim, and scalars are replicated.

With `slot_mesh_axes`, slots are split over more axes than their weights, and with
`stacked_slot_mesh_axes`, slots of stacked layers are split by layer. A weight may also declare
separate axes for its slots, like Flax's `optimizer_sharding` (`extended_specs`). The slots of
weights that match `host_slots` are stored in host memory (`slot_memory`).
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import warn_once
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
    weight_specs: PyTree,
    slot_mesh_axes: Sequence[str],
    axis_sizes: Mapping[str, int],
    stacked_slot_mesh_axes: Sequence[str] = (),
) -> PyTree:
    """Extends the spec of each weight, or the spec of its `slot_axes`, by `slot_mesh_axes`.

    Slots, averages, gradients and the updated weights have these specs during an update. If the
    weights are replicated over the axes, this is ZeRO-1 (Rajbhandari et al. 2020), also known as a
    sharded weight update (Xu et al. 2020, https://arxiv.org/abs/2004.13336).

    The axes that a weight's spec does not already use are appended to the axes of one dim, so that
    a device's shard of a slot is part of its shard of the weight. The dim is chosen to minimize
    padding; among equally good dims, the largest is used. Stacked dims are used only if no other
    dim is suitable, because gradients are computed layer by layer. A spec is not extended if every
    dim of its weight would have fewer elements than shards.

    Before that, the axes in `stacked_slot_mesh_axes` are moved from the other dims of a stacked
    weight to its first dim. If there is no stack, or it has fewer layers than shards, nothing is
    moved, and a warning is logged.

    Args:
      weight_specs: Nested dict of WeightSpec.
      slot_mesh_axes: Names of mesh axes.
      axis_sizes: Number of devices along each mesh axis, in the mesh's order.
      stacked_slot_mesh_axes: Names of mesh axes that split stacked weights by layer.

    Raises:
      ConfigError: An axis is not in the mesh, or is listed twice.
    """

    # Validate the axes as if they split a single dim.
    def checked(axes: Sequence[str], path: str) -> tuple[str, ...]:
        (entry,) = to_partition_spec([tuple(axes)], tuple(axis_sizes), path=path)
        return axes_of(entry)

    added = checked(slot_mesh_axes, "Learner.slot_mesh_axes")
    by_layer = checked(stacked_slot_mesh_axes, "Learner.stacked_slot_mesh_axes")

    if by_layer and not any(weight.stack_shape for _, weight in spec_items(weight_specs)):
        warn_once(
            f"Learner.stacked_slot_mesh_axes={by_layer} has no effect, because the model has no "
            "stacked layers. Stack its layers with Repeat, or use slot_mesh_axes instead."
        )

    def extended(path: tuple[Any, ...], weight: WeightSpec) -> PartitionSpec:
        name = path_of(path)
        if weight.slot_axes is None:
            spec = weight.partition_spec(tuple(axis_sizes), name)
        else:
            spec = to_partition_spec(
                weight.slot_axes, tuple(axis_sizes), rank=len(weight.shape), path=name
            )
        return _extended(_by_layer(spec, weight, by_layer, axis_sizes), weight, added, axis_sizes)

    return jax.tree_util.tree_map_with_path(extended, weight_specs, is_leaf=_is_weight_spec)


def _by_layer(
    spec: PartitionSpec, weight: WeightSpec, mesh_axes: Sequence[str], axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    """Moves mesh axes from the other dims of a stacked weight to its first dim."""
    if not weight.stack_shape or not mesh_axes:
        return spec
    first, *others = (
        tuple(axis for axis in axes_of(entry) if axis not in mesh_axes) for entry in spec
    )
    first += tuple(mesh_axes)
    num_layers, num_shards = weight.shape[0], math.prod(axis_sizes[axis] for axis in first)
    if num_layers < num_shards:
        warn_once(
            f"Learner.stacked_slot_mesh_axes={tuple(mesh_axes)} has no effect on a stack of "
            f"{num_layers} layers, because its slots would be split into {num_shards} shards over "
            f"the mesh axes {first}. They are split like the weights. Use axes with at most "
            f"{num_layers} devices."
        )
        return spec
    return PartitionSpec(entry_of(first), *map(entry_of, others))


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
        # With fewer elements than shards, some shards would contain only padding.
        if size < math.prod(axis_sizes[axis] for axis in axes):
            continue
        candidate = PartitionSpec(*spec[:dim], entry_of(axes), *spec[dim + 1 :])
        padded_size = math.prod(padded_shape(weight.shape, candidate, axis_sizes))
        # Prefer dims that are not stacked, then little padding, then large dims.
        candidates.append(((dim < stack_rank, padded_size, -size, dim), candidate))
    return min(candidates)[1] if candidates else spec


def slot_specs(
    groups: Mapping[str, Group], weight_specs: PyTree, partition_specs: PyTree
) -> dict[str, PyTree]:
    """Returns the PartitionSpecs for the "slots" that `BoundLearner.init` returns, keyed by group.

    Args:
      groups: The groups of a `WeightGroups`, keyed by name.
      weight_specs: Nested dict of WeightSpec.
      partition_specs: Tree of PartitionSpecs, extended to the ranks of the weights.
    """
    return {
        name: _group_slot_specs(group, group.select(weight_specs), group.select(partition_specs))
        for name, group in groups.items()
    }


def slot_memory(opt_shapes: Mapping[str, PyTree], on_host: Collection[str]) -> dict[str, PyTree]:
    """Returns the memory kind for each slot and each moving average.

    Args:
      opt_shapes: Shapes of the result of `BoundLearner.init`.
      on_host: Paths of the weights whose slots are stored in host memory.
    """
    paths = {tuple(path.split("/")) for path in on_host}

    def kind(keys: tuple[Any, ...], slot: jax.ShapeDtypeStruct) -> str:
        path = _names(keys)
        # The path of a slot ends with the path of its weight.
        is_listed = any(path[start:] in paths for start in range(len(path)))
        return HOST if is_listed else DEVICE

    trees = {name: opt_shapes[name] for name in ("slots", "ema") if name in opt_shapes}
    kinds: dict[str, PyTree] = jax.tree.map_with_path(kind, trees)
    return kinds


def _group_slot_specs(group: Group, weight_specs: PyTree, partition_specs: PyTree) -> PyTree:
    """Returns the specs for a group's slots, with the stacked dims in front.

    The optimizer's `init` is traced with the real shapes to find the slots. It is also traced with
    up to two sets of probe shapes, in which all dims of a weight have different sizes, to match the
    dims of slots with dims of weights. In the second set, if possible, no dim is larger than its
    real size, because some optimizers treat large weights differently.
    """
    stack_rank = len(group.stack_shape)
    split = dict(_leaves(partition_specs))
    weights = {
        path: (weight.shape[stack_rank:], tuple(split[path]))
        for path, weight in spec_items(weight_specs)
    }

    def probe_slots(resize: Callable[[Shape], Shape]) -> PyTree:
        structs = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(resize(w.shape[stack_rank:]), w.dtype),
            weight_specs,
            is_leaf=_is_weight_spec,
        )
        return jax.eval_shape(group.optimizer.init, structs)

    slots = probe_slots(lambda shape: shape)
    # Trace the second probe only for slots whose dims the first probe does not match.
    probes = [
        (functools.cache(lambda resize=resize: jax.tree.leaves(probe_slots(resize))), resize)
        for resize in (_distinct_above, _distinct_below)
    ]
    specs = []
    for i, (path, slot) in enumerate(_leaves(slots)):
        # The path of a slot ends with the path of its weight, unless the slot belongs to no weight.
        ends = (path[start:] for start in range(len(path)))
        weight = next((weights[end] for end in ends if end in weights), None)
        if weight is None:
            specs.append(PartitionSpec(*(None,) * (stack_rank + slot.ndim)))
            continue
        shape, spec = weight
        candidates = ((probe()[i].shape, resize(shape)) for probe, resize in probes)
        dims = _recognize(slot.shape, shape, candidates)
        # If two dims of a slot match the same weight dim, as in a preconditioner [d, d], split only
        # the first, because an axis cannot split two dims.
        local = [
            None if dim is None or dim in dims[:position] else spec[stack_rank + dim]
            for position, dim in enumerate(dims)
        ]
        specs.append(PartitionSpec(*spec[:stack_rank], *local))
    return jax.tree.unflatten(jax.tree.structure(slots), specs)


def _recognize(
    slot_shape: Shape, shape: Shape, candidates: Iterable[tuple[Shape, Shape]]
) -> Sequence[int | None]:
    """Maps each slot dim to the matching weight dim, or to None if no weight dim matches."""
    for probed_slot, probed in candidates:
        dims = [probed.index(size) if size in probed else None for size in probed_slot]
        # A slot dim without a matching weight dim must have the same size as in the probe.
        # Otherwise the optimizer behaves differently at the probed sizes; for example, it may
        # factor only large weights.
        expected = [
            size if dim is None else shape[dim] for dim, size in zip(dims, probed_slot, strict=True)
        ]
        if expected == list(slot_shape):
            return dims
    return range(len(shape)) if slot_shape == shape else [None] * len(slot_shape)


def _distinct_above(shape: Shape) -> Shape:
    """Increases sizes minimally until they differ and exceed 1, keeping their order."""
    sizes, floor = list(shape), 2
    for dim in sorted(range(len(shape)), key=lambda d: (shape[d], d)):
        # `floor` is the smallest size above 1 and above all sizes assigned so far.
        sizes[dim] = max(shape[dim], floor)
        floor = sizes[dim] + 1
    return tuple(sizes)


def _distinct_below(shape: Shape) -> Shape:
    """Decreases sizes minimally until they differ, keeping their order."""
    sizes, ceiling = list(shape), max(shape, default=0)
    for dim in sorted(range(len(shape)), key=lambda d: (shape[d], d), reverse=True):
        # `ceiling` is the largest size below all sizes assigned so far.
        sizes[dim] = min(shape[dim], ceiling)
        ceiling = sizes[dim] - 1
    return tuple(sizes) if min(sizes, default=2) > 1 else _distinct_above(shape)


def _leaves(tree: PyTree) -> list[tuple[Path, Any]]:
    """Returns (dict keys on the path, leaf) for each leaf."""
    return [(_names(keys), leaf) for keys, leaf in jax.tree.leaves_with_path(tree)]


def _names(keys: tuple[Any, ...]) -> Path:
    return tuple(str(part.key) for part in keys if isinstance(part, jax.tree_util.DictKey))


def _is_weight_spec(x: Any) -> bool:
    return isinstance(x, WeightSpec)
