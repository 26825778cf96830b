"""How each weight enters a `jax.shard_map`: whole or in blocks, and how its blocks are gathered."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.collectives.vmapped_axes import axes_by_hand
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.models.model import ShardedWeight
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.padding import padded_shape
from praxis_lite.core.sharding.split_dims import constrain, without_axes


def gather_of(
    path: str, shape: Sequence[int], spec: PartitionSpec, manual_axes: Sequence[str],
    axis_sizes: Mapping[str, int],
) -> Callable[[jax.Array], jax.Array]:
    """Returns `ShardedWeight.gather` of a weight.

    JAX's own derivative of `all_gather` is `psum_scatter`: what each device makes of the whole is
    summed, and each keeps its block of the sum. The compiler still splits the whole over the axes
    that are not manual.

    Args:
      path: of the weight, for the message.
      shape: of the whole weight, stacked dims included.
      spec: extended to its rank; a dim splits over manual axes or over others, not both.
      manual_axes: those of the `jax.shard_map`.
      axis_sizes: devices along each mesh axis.

    The function raises a ConfigError if it gets one layer of a dim that is split by hand or padded.
    """
    shape, rank = tuple(shape), len(shape)
    by_hand = {
        dim: axes for dim, axes in enumerate(map(axes_of, spec)) if set(axes) & set(manual_axes)
    }
    padded = padded_shape(shape, spec, axis_sizes)
    left = without_axes(spec, manual_axes)
    left_axes = {axis for entry in left for axis in axes_of(entry)}

    def gather(block: jax.Array) -> jax.Array:
        # A scan over layers, or a vmap, has taken the leading dims.
        num_taken = rank - block.ndim
        for dim in range(num_taken):
            if dim in by_hand or padded[dim] != shape[dim]:
                raise ConfigError(
                    f"{path}: dim {dim} of {shape} is split over {axes_of(spec[dim])}, but the "
                    "model reads one layer of that dim at a time. Split another dim."
                )

        def all_gather(block: jax.Array) -> jax.Array:
            for dim, axes in by_hand.items():
                block = jax.lax.all_gather(block, axes, axis=dim - num_taken, tiled=True)
            return block

        own_left = PartitionSpec(*left[num_taken:])
        if by_hand and left_axes:
            # XLA gathers over all axes what it finds in an all-gather over some: these by hand too.
            all_gather = jax.shard_map(
                all_gather, in_specs=own_left, out_specs=own_left,
                axis_names=axes_by_hand(left_axes),
            )
        whole = all_gather(block) if by_hand else block
        if whole.shape != shape[num_taken:]:
            whole = whole[tuple(map(slice, shape[num_taken:]))]
        return constrain(whole, tuple(own_left)) if left_axes else whole

    return gather


@dataclasses.dataclass(frozen=True)
class MappedWeight:
    """How a weight enters a `jax.shard_map`.

    Attributes:
      path: of the weight.
      layers: its leading dims, those that are stacked layers.
      spec: on the whole mesh.
      mapped_spec: the manual axes of it alone.
      gather: of `gather_of`; None: each device has it whole and without padding.
    """

    path: str
    layers: tuple[int, ...]
    spec: PartitionSpec
    mapped_spec: PartitionSpec
    gather: Callable[[jax.Array], jax.Array] | None


def mapped_weight(
    path: str, shape: Sequence[int], num_layers: int, spec: PartitionSpec,
    manual_axes: Sequence[str], axis_sizes: Mapping[str, int],
) -> MappedWeight:
    """Returns how a weight enters; the arguments are those of `gather_of`.

    Raises:
      ConfigError: a dim splits over manual axes and others, or stacked layers over manual ones.
    """
    shape = tuple(shape)
    for dim, entry in enumerate(spec):
        axes = set(axes_of(entry))
        by_hand = axes & set(manual_axes)
        if by_hand and by_hand != axes:
            raise ConfigError(
                f"{path}: dim {dim} of {shape} is split over {entry}, of which only "
                f"{sorted(by_hand)} is in data_axes {tuple(manual_axes)}. Split two dims, or put "
                "all of these axes, or none, in data_axes."
            )
        if by_hand and dim < num_layers:
            raise ConfigError(
                f"{path}: the layers of a stack (dim {dim} of {shape}) are split over {entry}, "
                "which is in data_axes: each device would run its own layers. Split another dim, "
                "or take the axis out of data_axes."
            )
    others = {axis for entry in spec for axis in axes_of(entry)} - set(manual_axes)
    mapped_spec = without_axes(spec, tuple(others))
    # JAX takes no uneven split at this boundary either: padding goes in, and is cut off inside.
    is_block, is_padded = any(mapped_spec), padded_shape(shape, spec, axis_sizes) != shape
    has_gather = is_block or is_padded
    gather = gather_of(path, shape, spec, manual_axes, axis_sizes) if has_gather else None
    return MappedWeight(path, shape[:num_layers], spec, mapped_spec, gather)


def sharded(blocks: Any, weights: Any) -> Any:
    """Returns blocks as a model gets them: arrays that are whole, and ShardedWeights.

    Args:
      blocks: tree of arrays, as they are inside the `jax.shard_map`.
      weights: the same tree of MappedWeight.
    """

    def one(block: jax.Array, weight: MappedWeight) -> jax.Array | ShardedWeight:
        if block.shape[: len(weight.layers)] != weight.layers:
            # A loop over layers must not read padding.
            block = block[tuple(map(slice, weight.layers))]
        return ShardedWeight(block, weight.gather, weight.path) if weight.gather else block

    return jax.tree.map(one, blocks, weights)
