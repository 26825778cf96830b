"""Reads the declared sharding of an NNX variable from its metadata, set by Flax or our layers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.models.model import named_dims
from praxis_lite.core.models.nnx_variables import Leaf, value_of
from praxis_lite.core.sharding.logical_axes import MeshAxes
from praxis_lite.core.sharding.memory_spaces import DEVICE
from praxis_lite.core.sharding.weight_spec import WeightSpec

# Flax 0.12.8 reads "optimizer_sharding" (`nnx.training.optimizer.to_opt_state`); the proposal calls
# this key "opt_sharding".
_SLOT_KEYS = ("opt_sharding", "optimizer_sharding")


def declared_spec(path: str, leaf: Leaf) -> WeightSpec:
    """Returns the WeightSpec that a variable declares, without resolving names to mesh axes.

    Flax's `out_sharding` (set by `nnx.with_partitioning`, `nnx.with_metadata` and
    `nnx.Param(..., out_sharding=)`; previously `sharding=`) becomes `logical_axes`. The entries are
    either mesh axes or logical names, which can be told apart only with the rules and the mesh.
    `sharding_rules` becomes `logical_axis_rules`, and `optimizer_sharding` becomes `slot_axes`. A
    split-dims mapping from one of our layers takes precedence.

    Args:
      path: Path of the variable, for messages.
      leaf: The variable or plain array.

    Raises:
      ConfigError: `out_sharding` or `optimizer_sharding` is not a sequence of names, or is longer
        than the weight's rank; or `sharding_rules` are not pairs.
    """
    metadata = leaf.get_metadata() if isinstance(leaf, nnx.Variable) else {}
    shape, stack = tuple(value_of(leaf).shape), metadata.get("stack_split_dims_mapping", ())
    own_rank = len(metadata.get("dim_names", shape[len(stack) :]))
    # Leading dims that are missing from the layer's declaration stack layers, for example because
    # of `nnx.vmap`.
    in_front = (None,) * (len(shape) - len(stack) - own_rank)
    spec = WeightSpec(
        shape,
        value_of(leaf).dtype,
        metadata.get("split_dims_mapping"),
        (*in_front, *stack),
        num_unstackable_dims=0 if in_front else metadata.get("num_unstackable_dims", 0),
        matrix=metadata.get("matrix"),
        memory_kind=metadata.get("memory_kind", DEVICE),
        logical_axis_rules=_rules(path, metadata.get("sharding_rules")),
    )

    def axes(key: str) -> tuple[MeshAxes, ...]:
        names = _names(path, key, metadata[key])
        local = named_dims(path, f"{key} {names}", names, shape[len(stack) :])
        return (*(None,) * len(stack), *local)

    # Flax also treats an empty entry as absent.
    for key in filter(metadata.get, _SLOT_KEYS):
        spec = dataclasses.replace(spec, slot_axes=axes(key))
    if spec.split_dims_mapping is not None or not metadata.get("out_sharding"):
        return spec
    names = _names(path, "out_sharding", metadata["out_sharding"])
    return dataclasses.replace(
        spec, logical_axes=axes("out_sharding"), declared_by=f"nnx out_sharding {names}"
    )


def _names(path: str, key: str, out_sharding: Any) -> tuple[MeshAxes, ...]:
    """Returns the entries of a sequence, a PartitionSpec, or the spec of a NamedSharding."""
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    is_sequence = isinstance(spec, PartitionSpec | Sequence) and not isinstance(spec, str)
    entries = tuple(spec) if is_sequence else (object(),)
    if not all(_is_entry(entry) for entry in entries):
        raise ConfigError(
            f"{path}: {key} is {out_sharding!r}; expected a name or None per dimension, such as "
            "(None, 'model')."
        )
    free = PartitionSpec.UNCONSTRAINED
    return tuple(None if entry is free else entry for entry in entries)


def _is_entry(entry: Any) -> bool:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED or isinstance(entry, str):
        return True
    return isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry)


def _rules(path: str, sharding_rules: Any) -> tuple[tuple[str, Any], ...]:
    try:
        return tuple((name, axes) for name, axes in sharding_rules or ())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: sharding_rules are {sharding_rules!r}; expected pairs of a name and its "
            "mesh axes, such as (('embed', None), ('hidden', 'model'))."
        ) from error
