"""Split-dims mappings: a layer's mapping, turned into a validated PartitionSpec."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.sharding.devices.axis_types import stated
from praxis_lite.core.sharding.logical_axes import axes_of, entry_of

__all__ = ("SplitDims", "constrain", "num_shards_of", "to_partition_spec")

DimSplit = None | int | str | Sequence[int | str]
# An entry per dim: an axis name or index, several of them, or None; a whole None has two meanings.
SplitDims = Sequence[DimSplit] | None


def to_partition_spec(
    split_dims_mapping: Sequence[DimSplit],
    axis_names: Sequence[str],
    *,
    rank: int | None = None,
    path: str = "split_dims_mapping",
) -> PartitionSpec:
    """Returns the PartitionSpec of a mapping, extended with None to `rank`.

    Args:
      split_dims_mapping: an entry per dimension: an axis name, its index in `axis_names`, a
        sequence of either, or None or any negative index for a dimension that is not split.
        Pax's `base_layer.to_partition_spec` takes the same.
      axis_names: the mesh's axis names.
      rank: the array's number of dimensions; None: the mapping's length.
      path: what is being split, for the messages.

    Raises:
      ConfigError: an unknown axis, one axis on two dimensions, a mapping longer than `rank`.
    """
    axis_names = tuple(axis_names)
    if isinstance(split_dims_mapping, Mapping) or hasattr(split_dims_mapping, "wt"):
        raise ConfigError(
            f"{path}: split dims {split_dims_mapping!r} have names, as Pax's `wt` and `out`; here "
            "wanted is a plain sequence with an entry for each dimension, such as ('data', 'mdl')."
        )
    is_sequence = isinstance(split_dims_mapping, Sequence | PartitionSpec)
    if isinstance(split_dims_mapping, str) or not is_sequence:
        raise ConfigError(
            f"{path}: split dims {split_dims_mapping!r} must be a sequence with an entry for each "
            f"dimension, for instance ({split_dims_mapping!r},)."
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
                f"{message} use the axis '{axis}' twice, but a mesh axis can split one dimension "
                f"only. The mesh has {axis_names}."
            )
    return PartitionSpec(*map(entry_of, entries), *(None,) * (rank - len(mapping)))


def _axes_named(entry: DimSplit, axis_names: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Returns the axis names that an entry of a mapping stands for, () for not split."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        if entry not in axis_names:
            raise ConfigError(
                f"{text} name the axis '{entry}', but the mesh has {axis_names}."
                f"{did_you_mean(entry, axis_names)} Fix the mapping or mesh.axis_names."
            )
        return (entry,)
    if isinstance(entry, int) and not isinstance(entry, bool):
        if entry >= len(axis_names):
            raise ConfigError(
                f"{text} have the axis index {entry}, but the mesh has the {len(axis_names)} axes "
                f"{axis_names}. Use an index below {len(axis_names)} or a name."
            )
        return () if entry < 0 else (axis_names[entry],)
    if isinstance(entry, Sequence):
        return tuple(axis for part in entry for axis in _axes_named(part, axis_names, text))
    raise ConfigError(
        f"{text} have the entry {entry!r}. An entry is an axis name of {axis_names}, an index, a "
        "tuple of them, or None."
    )


def constrain(x: jax.Array, activation_split_dims_mapping: SplitDims) -> jax.Array:
    """Returns `x` with its layout stated, to XLA or as its type (`axis_types`), or as it is.

    A mapping of None states nothing; a mapping of all None forces replication. Where no mesh is
    set (a layer run by itself in a notebook) nothing is stated either. Inside `jax.shard_map` its
    manual axes are left out: `x` is a device's part along them already.

    Raises:
      ConfigError: as `to_partition_spec`; or an Explicit axis does not divide its dim.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if activation_split_dims_mapping is None or mesh.empty:
        return x
    spec = to_partition_spec(
        activation_split_dims_mapping, mesh.axis_names, rank=x.ndim,
        path=f"activation_split_dims_mapping of an activation of shape {x.shape}",
    )
    if len(mesh.manual_axes) == len(mesh.axis_names):
        return x  # There is nothing left to state, to which a vmap over an axis would add its own.
    return stated(x, without_axes(spec, mesh.manual_axes))


def without_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Returns a spec of the same rank whose dims no longer split over `axes`."""
    left = (tuple(axis for axis in axes_of(entry) if axis not in axes) for entry in spec)
    return PartitionSpec(*map(entry_of, left))


def num_shards_of(split: DimSplit) -> int:
    """Returns into how many parts the mesh splits a dim; 1 if no mesh is set.

    Inside `jax.shard_map` its manual axes are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    (entry,) = without_axes(to_partition_spec((split,), mesh.axis_names), mesh.manual_axes)
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))
