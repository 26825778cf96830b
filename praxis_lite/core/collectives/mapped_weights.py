"""Passes weights to a `jax.shard_map`: replicated, or as blocks that are gathered when read."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.collectives.vmapped_axes import manual_axes_for
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.models.model import ShardedWeight
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.padding import padded_shape
from praxis_lite.core.sharding.split_dims import constrain, without_axes


def gather_of(
    path: str,
    shape: Sequence[int],
    spec: PartitionSpec,
    manual_axes: Sequence[str],
    axis_sizes: Mapping[str, int],
) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that gathers a weight from its blocks, for `ShardedWeight.gather`.

    The derivative of `all_gather` is `psum_scatter`: the gradients from all devices are summed, and
    each device keeps its block of the sum. The compiler still splits the gathered weight over axes
    that are not manual.

    Args:
      path: Path of the weight, for messages.
      shape: Shape of the complete weight, including stacked dims.
      spec: PartitionSpec of the weight, extended to its rank. A dim may be split over manual axes
        or over other axes, but not over both.
      manual_axes: Manual axes of the `jax.shard_map`.
      axis_sizes: Number of devices along each mesh axis.

    Returns:
      The gather function. It raises ConfigError if it is called with a single layer of a stack
      whose stacked dim is split over manual axes or padded.
    """
    shape, rank = tuple(shape), len(shape)
    # Dims to gather here, with their axes. The compiler handles dims that are split over other
    # axes.
    manual = {
        dim: axes for dim, axes in enumerate(map(axes_of, spec)) if set(axes) & set(manual_axes)
    }
    padded = padded_shape(shape, spec, axis_sizes)
    auto_spec = without_axes(spec, manual_axes)
    auto_axes = {axis for entry in auto_spec for axis in axes_of(entry)}

    def gather(block: jax.Array) -> jax.Array:
        # A scan over layers or a vmap removes leading dims.
        num_removed = rank - block.ndim
        for dim in range(num_removed):
            if dim in manual or padded[dim] != shape[dim]:
                raise ConfigError(
                    f"{path}: dim {dim} of {shape} is split over {axes_of(spec[dim])}, but the "
                    "model reads one layer of this dim at a time. Split a different dim."
                )

        def all_gather(block: jax.Array) -> jax.Array:
            for dim, axes in manual.items():
                block = jax.lax.all_gather(block, axes, axis=dim - num_removed, tiled=True)
            return block

        local_spec = PartitionSpec(*auto_spec[num_removed:])
        if manual and auto_axes:
            # Make the other axes manual, too. Otherwise, XLA gathers a dim over all axes that split
            # it, including those outside this all-gather.
            all_gather = jax.shard_map(
                all_gather,
                in_specs=local_spec,
                out_specs=local_spec,
                axis_names=manual_axes_for(auto_axes),
            )
        weight = all_gather(block) if manual else block
        # Remove the padding that an uneven split added.
        if weight.shape != shape[num_removed:]:
            weight = weight[tuple(map(slice, shape[num_removed:]))]
        return constrain(weight, tuple(local_spec)) if auto_axes else weight

    return gather


@dataclasses.dataclass(frozen=True)
class MappedWeight:
    """Describes how a weight is passed to a `jax.shard_map`.

    Attributes:
      path: Path of the weight.
      layers: Sizes of the leading dims that stack layers.
      spec: PartitionSpec on the complete mesh.
      mapped_spec: PartitionSpec with only the manual axes.
      gather: Result of `gather_of`, or None if the weight is replicated over manual axes and
        unpadded.
    """

    path: str
    layers: tuple[int, ...]
    spec: PartitionSpec
    mapped_spec: PartitionSpec
    gather: Callable[[jax.Array], jax.Array] | None


def mapped_weight(
    path: str,
    shape: Sequence[int],
    num_layers: int,
    spec: PartitionSpec,
    manual_axes: Sequence[str],
    axis_sizes: Mapping[str, int],
) -> MappedWeight:
    """Returns the description of how a weight is passed to a `jax.shard_map`.

    Args:
      path: Path of the weight, for messages.
      shape: Shape of the complete weight.
      num_layers: Number of leading dims that stack layers.
      spec: PartitionSpec of the weight, extended to its rank.
      manual_axes: Manual axes of the `jax.shard_map`.
      axis_sizes: Number of devices along each mesh axis.

    Raises:
      ConfigError: A dim is split over both manual and other axes, or a dim that stacks layers is
        split over manual axes.
    """
    shape = tuple(shape)
    for dim, entry in enumerate(spec):
        axes = set(axes_of(entry))
        manual = axes & set(manual_axes)
        if manual and manual != axes:
            raise ConfigError(
                f"{path}: dim {dim} of {shape} is split over {entry}, but only {sorted(manual)} is "
                f"in data_axes {tuple(manual_axes)}. Split two dims, or put all or none of these "
                "axes in data_axes."
            )
        if manual and dim < num_layers:
            raise ConfigError(
                f"{path}: dim {dim} of {shape} stacks layers and is split over {entry}, but "
                f"{entry} is in data_axes, so each device would run different layers. Split "
                "a different dim, or remove the axis from data_axes."
            )
    others = {axis for entry in spec for axis in axes_of(entry)} - set(manual_axes)
    mapped_spec = without_axes(spec, tuple(others))
    # JAX rejects uneven shardings here as well, so weights are padded outside and sliced inside.
    is_block, is_padded = any(mapped_spec), padded_shape(shape, spec, axis_sizes) != shape
    has_gather = is_block or is_padded
    gather = gather_of(path, shape, spec, manual_axes, axis_sizes) if has_gather else None
    return MappedWeight(path, shape[:num_layers], spec, mapped_spec, gather)


def sharded(blocks: Any, weights: Any) -> Any:
    """Wraps each block that the model must gather in a ShardedWeight; other leaves stay arrays.

    Args:
      blocks: Tree of arrays inside the `jax.shard_map`.
      weights: Tree of MappedWeight with the same structure.
    """

    def wrap(block: jax.Array, weight: MappedWeight) -> jax.Array | ShardedWeight:
        if block.shape[: len(weight.layers)] != weight.layers:
            # Remove padding layers, because a loop over layers must not run them.
            block = block[tuple(map(slice, weight.layers))]
        return ShardedWeight(block, weight.gather, weight.path) if weight.gather else block

    return jax.tree.map(wrap, blocks, weights)
