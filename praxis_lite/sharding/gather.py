"""Explicit collectives: a weight of which each device holds a block, gathered when it is used."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from praxis_lite.errors import ConfigError
from praxis_lite.sharding.logical_axes import axes_of
from praxis_lite.sharding.padding import padded_shape
from praxis_lite.sharding.split_dims import constrain, without_axes


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A device's block of a weight, inside `jax.shard_map`.

    Attributes:
      block: this device's part, padding included.
      gather: from the block, or one layer's part of it where the weight is stacked, to the whole
        of true shape; the gradient comes back as this device's part of the sum over devices.
      path: of the weight, for --mode=explain.
    """

    block: jax.Array
    gather: Callable[[jax.Array], jax.Array]
    path: str = "weights"

    def whole(self) -> jax.Array:
        """Returns the weight, gathered here and not where a layer reads it."""
        with jax.named_scope(self.path):
            return self.gather(self.block)


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
      shape: true shape of the whole weight, stacked dims included.
      spec: extended to its rank; a dim splits over manual axes or over others, not both.
      manual_axes: those of the `jax.shard_map`.
      axis_sizes: devices along each mesh axis.

    Raises:
      ConfigError: when called with a layer's part of a weight whose stacked dim is split by hand,
        or padded.
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
                all_gather, in_specs=own_left, out_specs=own_left, axis_names=left_axes,
                check_vma=False,
            )
        whole = all_gather(block) if by_hand else block
        if whole.shape != shape[num_taken:]:
            whole = whole[tuple(slice(size) for size in shape[num_taken:])]
        return constrain(whole, tuple(own_left)) if left_axes else whole

    return gather
