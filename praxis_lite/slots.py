"""Where an optimizer's slots live: which dims of its weight each slot has, and so how it splits.

No table of optimizers: the optimizer itself is asked. `init` is traced on weights whose dims all
have different sizes, and a slot's dims are recognised by their sizes. A slot of the weight's own
shape splits as the weight; a factored one drops the reduced dim's axis; scalars are replicated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.learner import group_by_stack
from praxis_lite.weights import WeightSpec

PyTree = Any
Shape = tuple[int, ...]
Path = tuple[str, ...]


def slot_specs(
    init: Callable[[PyTree], PyTree], weight_specs: PyTree, partition_specs: PyTree
) -> dict[str, PyTree]:
    """Returns the PartitionSpec of every slot, per stack group as `Learner.init` groups them.

    Args:
      init: the optimizer's init, of one layer's (unstacked) weights.
      weight_specs: nested dict of WeightSpec.
      partition_specs: the same tree of specs of the weights, extended to their ranks.
    """
    spec_groups = group_by_stack(partition_specs, weight_specs)
    return {
        name: _group_slot_specs(init, group, spec_groups[name][1], len(stack_shape))
        for name, (stack_shape, group) in group_by_stack(weight_specs, weight_specs).items()
    }


def _group_slot_specs(
    init: Callable[[PyTree], PyTree], weight_specs: PyTree, partition_specs: PyTree, stack_rank: int
) -> PyTree:
    weights = {
        _dict_path(path): (weight.shape[stack_rank:], tuple(spec))
        for (path, weight), spec in zip(
            jax.tree_util.tree_flatten_with_path(weight_specs, is_leaf=_is_weight_spec)[0],
            jax.tree.leaves(partition_specs, is_leaf=_is_partition_spec),
            strict=True,
        )
    }

    def slots_if(resize: Callable[[Shape], Shape]) -> tuple[list[tuple[tuple, Any]], Any]:
        structs = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(resize(w.shape[stack_rank:]), w.dtype),
            weight_specs,
            is_leaf=_is_weight_spec,
        )
        return jax.tree_util.tree_flatten_with_path(jax.eval_shape(init, structs))

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
        own = [None if dim is None else spec[stack_rank + dim] for dim in dims]
        specs.append(PartitionSpec(*spec[:stack_rank], *own))
    return jax.tree.unflatten(treedef, specs)


def _recognise(
    slot_shape: Shape, shape: Shape, candidates: Sequence[tuple[Shape, Shape]]
) -> Sequence[int | None]:
    """Returns for each of a slot's dims the weight's dim it is, or None for one of its own."""
    if slot_shape == shape:
        return range(len(shape))
    for probed_slot, probed in candidates:
        dims = [probed.index(size) if size in probed else None for size in probed_slot]
        # A dim of the slot's own has its size whatever the weight's sizes. Where it has not, the
        # optimizer decides otherwise at the probed sizes (whether to factor).
        wanted = [own if d is None else shape[d] for d, own in zip(dims, probed_slot, strict=True)]
        if wanted == list(slot_shape):
            return dims
    return [None] * len(slot_shape)


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
