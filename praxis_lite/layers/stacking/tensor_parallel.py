"""Tensor parallelism with explicit collectives, turned on by a layer's `tensor_parallel`.

The layer is the same, with the same weights. Each device runs it as if it were alone, with its part
of the heads or hidden dims, on tokens that come to it; the outputs are summed over the mesh axis
that splits these. The compiler alone gathers and sums everything at once, and computes meanwhile
nothing.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.collectives.vmapped_axes import axes_by_hand
from praxis_lite.core.errors import require
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import DimSplit, to_partition_spec, without_axes
from praxis_lite.layers.base.calls import check_way
from praxis_lite.layers.stacking.half_blocks import (
    HalfBlock,
    filled,
    left_out,
    of_shape,
    parts_of_weights,
)
from praxis_lite.layers.stacking.rings import gathered_and_scattered, in_ring

# What moves along the axis, by the name of the setting.
TENSOR_PARALLEL = {
    "gather": "tokens: all of a group are gathered, and the outputs' sums scattered",
    "ring": "tokens, a piece at a time, while the device computes on the one before",
    "two_way_ring": "as ring, half of each piece each way round",
    "weights": "the weights: they are gathered, and a device keeps its tokens",
}


def check_tensor_parallel(layer: object, setting: str | None, unable: Mapping[str, bool]) -> None:
    """Checks the setting `tensor_parallel` of a layer, as `check_way`, with its errors."""
    check_way(layer, "tensor_parallel", setting, TENSOR_PARALLEL, unable, "the layer")


def axis_by_hand(layer: Any, features_split: DimSplit) -> str | None:
    """Returns the mesh axis along which a layer is run by hand, or None if it is not.

    It is not where no mesh is set, where the axis has one device, and inside a `jax.shard_map` that
    has taken the axis already.

    Args:
      layer: with the setting `tensor_parallel`.
      features_split: of the dim that tensor parallelism splits, heads or hidden dims.

    Raises:
      ConfigError: the features are split over no axis, or over several.
    """
    setting, mesh = layer.tensor_parallel, jax.sharding.get_abstract_mesh()
    if setting is None or mesh.empty:
        return None
    axes = axes_of(to_partition_spec((features_split,), mesh.axis_names)[0])
    require(
        len(axes) == 1, f"The split of heads or hidden dims of {type(layer).__name__}",
        features_split, f"one mesh axis with tensor_parallel={setting!r}",
        "Name one in weight_split_dims_mapping, or set tensor_parallel=None.",
    )
    return None if mesh.shape[axes[0]] == 1 or axes[0] in mesh.manual_axes else axes[0]


def by_hand(
    half: HalfBlock, axis: str, x: jax.Array, rows: Mapping[str, jax.Array | None]
) -> jax.Array:
    """Returns `half.function(layer, x, rows)`, [B, T, D], summed by hand over a mesh axis.

    All axes that split x or a weight are taken: a weight that is split over others, too (fully
    sharded data parallelism), is cast to the dtype of x, gathered, its gradient reduce-scattered.
    Weights' gradients of several pieces are added in the dtype of x. Filler rows, tokens, heads and
    hidden dims, of zeros, make divide what does not.

    Args:
      half: the layer, and what it is called with.
      axis: of `axis_by_hand`.
      x: [B, T, D].
      rows: by name [B or 1, ...], or [B, T] of a layer that does not read sequences; or None.

    Raises:
      ConfigError: x or a weight is not split as the setting needs it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    how, (B, T, _) = half.how, x.shape
    spec = to_partition_spec(half.split or (), mesh.axis_names, rank=x.ndim)
    dim = _dim_of_tokens(half, axis, spec)
    spec = without_axes(spec, left_out())
    weights, layer_of = parts_of_weights(half, axis, x.dtype)
    # A device has the rows of its group, all devices along the axis, unless it keeps its tokens.
    rows_spec = (spec if how == "weights" else without_axes(spec, (axis,)))[:half.num_row_dims]
    x = filled(x, spec)
    rows = {name: row for name, row in rows.items() if row is not None}
    specs = {
        name: PartitionSpec(*(
            None if n == 1 else entry for n, entry in zip(row.shape, rows_spec, strict=False)
        ))
        for name, row in rows.items()
    }
    expected = x.shape[: half.num_row_dims]
    rows = {
        name: of_shape(row, [
            n if n == 1 or d >= len(expected) else expected[d] for d, n in enumerate(row.shape)
        ])
        for name, row in rows.items()
    }

    def on_a_device(
        blocks: list[jax.Array], x: jax.Array, rows: Mapping[str, jax.Array]
    ) -> jax.Array:
        layer = layer_of(blocks)

        def term(x: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
            return half.function(layer, x, rows)

        if how == "weights":
            return term(x, rows)
        if how == "gather":
            length = T if half.reads_sequences and dim == 1 else None
            return gathered_and_scattered(term, x, rows, axis, dim, length)
        halved_dim = 0 if half.reads_sequences else 1
        return in_ring(term, x, rows, axis, dim, halved_dim if how == "two_way_ring" else None)

    weight_specs = [weight.spec for weight in weights]
    axes = {axis, *(item for p in (spec, *weight_specs) for entry in p for item in axes_of(entry))}
    is_inside = bool(mesh.manual_axes)
    # JAX (0.10 to 0.12) cannot lower a shard_map inside another that hands values on to its own
    # gradient: inside and around it they are computed again.
    computed_again = jax.checkpoint if is_inside else lambda function: function
    mapped = jax.shard_map(
        computed_again(on_a_device),
        in_specs=(weight_specs, spec, specs), out_specs=spec, axis_names=axes_by_hand(axes),
        # Inside one that checks, it must; elsewhere kernels of Pallas do not say what varies.
        check_vma=is_inside,
    )
    return computed_again(mapped)([weight.array for weight in weights], x, rows)[:B, :T]


def _dim_of_tokens(half: HalfBlock, axis: str, spec: PartitionSpec) -> int | None:
    """Returns the dim of x that the axis splits, rows (0) or time (1), or None."""
    how, name = half.how, half.name
    dims = [dim for dim, entry in enumerate(spec) if axis in axes_of(entry)]
    dim = dims[0] if dims else None
    message = f"inputs and outputs that split as {tuple(spec)}"
    require(
        how == "gather" or dim is not None, name, how,
        f"'gather' for {message}, of which {axis!r} splits nothing",
        f"Or split their rows over {axis!r} too: residual_batch in a preset.",
    )
    others = [entry for entry in spec[1:2] if set(axes_of(entry)) - {axis}]
    is_right = dim in (None, 0) or (dim == 1 and (how == "gather" or not half.reads_sequences))
    require(
        is_right and not (half.reads_sequences and others) and spec[2] is None, name, how,
        f"None for {message}: time is to be whole here" if half.reads_sequences else
        f"None for {message}: {axis!r} is to split rows or time",
        f"Or split the rows over {axis!r}, not time: residual_batch in a preset.",
    )
    require(
        dim is None or axes_of(spec[dim])[-1] == axis, name, how,
        f"None for {message}, where {axis!r} is not the last axis of its dim",
        "Or name it last.",
    )
    return dim
