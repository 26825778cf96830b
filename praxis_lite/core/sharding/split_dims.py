"""Converts a layer's split-dims mapping to a validated PartitionSpec."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.sharding.devices.axis_types import constrain_to_spec
from praxis_lite.core.sharding.logical_axes import MeshAxes, axes_of, entry_of

__all__ = ("SplitDims", "constrain", "num_shards_of", "to_partition_spec")

DimSplit = None | int | str | Sequence[int | str]
# An entry per dim: an axis name or index, a sequence of these, or None. If the complete mapping is
# None, weights are replicated, and activations are not constrained.
SplitDims = Sequence[DimSplit] | None


def to_partition_spec(
    split_dims_mapping: Sequence[DimSplit],
    axis_names: Sequence[str],
    *,
    rank: int | None = None,
    path: str = "split_dims_mapping",
) -> PartitionSpec:
    """Converts a split-dims mapping to a PartitionSpec, extended with None to `rank`.

    Args:
      split_dims_mapping: An entry per dim: an axis name, its index in `axis_names`, or a sequence
        of these. None or a negative index leaves the dim unsplit. Pax's
        `base_layer.to_partition_spec` accepts the same entries.
      axis_names: Axis names of the mesh.
      rank: Rank of the array. If None, the length of the mapping.
      path: Name of the array or setting, for messages.

    Raises:
      ConfigError: An axis is unknown or used twice, or the mapping is longer than `rank`.
    """
    axis_names = tuple(axis_names)
    if isinstance(split_dims_mapping, Mapping) or hasattr(split_dims_mapping, "wt"):
        raise ConfigError(
            f"{path}: split dims {split_dims_mapping!r} have named fields, like `wt` and `out` in "
            "Pax; expected a sequence with an entry per dimension, such as ('data', 'mdl')."
        )
    is_sequence = isinstance(split_dims_mapping, Sequence | PartitionSpec)
    if isinstance(split_dims_mapping, str) or not is_sequence:
        raise ConfigError(
            f"{path}: split dims {split_dims_mapping!r} must be a sequence with an entry per "
            f"dimension, such as ({split_dims_mapping!r},)."
        )
    mapping = tuple(split_dims_mapping)
    message = f"{path}: split dims {mapping}"
    rank = len(mapping) if rank is None else rank
    if len(mapping) > rank:
        raise ConfigError(
            f"{message} have {len(mapping)} entries, but the array has {rank} dimensions. Remove "
            f"{len(mapping) - rank} of them."
        )
    entries = [_axes_named(entry, axis_names, message) for entry in mapping]
    used = [axis for axes in entries for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            raise ConfigError(
                f"{message} use the axis '{axis}' twice, but a mesh axis can split only one "
                f"dimension. The mesh has {axis_names}. Remove one of the two uses."
            )
    return PartitionSpec(*map(entry_of, entries), *(None,) * (rank - len(mapping)))


def _axes_named(entry: DimSplit, axis_names: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Returns the axis names in an entry of a mapping, or () if the dim is not split."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        if entry not in axis_names:
            raise ConfigError(
                f"{text} use the axis '{entry}', but the mesh has {axis_names}."
                f"{did_you_mean(entry, axis_names)} Fix the mapping or mesh.axis_names."
            )
        return (entry,)
    if isinstance(entry, int) and not isinstance(entry, bool):
        if entry >= len(axis_names):
            raise ConfigError(
                f"{text} use the axis index {entry}, but the mesh has the {len(axis_names)} axes "
                f"{axis_names}. Use an index below {len(axis_names)} or a name."
            )
        return () if entry < 0 else (axis_names[entry],)
    if isinstance(entry, Sequence):
        return tuple(axis for part in entry for axis in _axes_named(part, axis_names, text))
    raise ConfigError(
        f"{text} contain {entry!r}; expected one of the axis names {axis_names}, an index, a tuple "
        "of these, or None."
    )


def constrain(x: jax.Array, activation_split_dims_mapping: SplitDims) -> jax.Array:
    """Constrains the sharding of an activation, or its type over Explicit axes.

    If the mapping is None, no constraint is added; if all of its entries are None, the activation
    is replicated. Without a mesh (for example, if a layer is called directly in a notebook), `x` is
    returned unchanged. Inside `jax.shard_map`, manual axes are removed from the mapping, because
    `x` is already a device's block along these axes.

    Raises:
      ConfigError: The mapping is invalid (see `to_partition_spec`), or a dim is not divisible by
        the Explicit axes that split it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if activation_split_dims_mapping is None or mesh.empty:
        return x
    spec = to_partition_spec(
        activation_split_dims_mapping,
        mesh.axis_names,
        rank=x.ndim,
        path=f"activation_split_dims_mapping of an activation of shape {x.shape}",
    )
    if len(mesh.manual_axes) == len(mesh.axis_names):
        return x  # An enclosing vmap would add its own axis to an empty constraint.
    return constrain_to_spec(x, without_axes(spec, mesh.manual_axes))


def without_axes(spec: PartitionSpec | Sequence[MeshAxes], axes: Sequence[str]) -> PartitionSpec:
    """Returns a spec of the same rank with `axes` removed."""
    entries = (tuple(axis for axis in axes_of(entry) if axis not in axes) for entry in spec)
    return PartitionSpec(*map(entry_of, entries))


def num_shards_of(split: DimSplit) -> int:
    """Returns the number of shards of a dim on the current mesh, or 1 without a mesh.

    Manual axes of an enclosing `jax.shard_map` are ignored.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    (entry,) = without_axes(to_partition_spec((split,), mesh.axis_names), mesh.manual_axes)
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))
