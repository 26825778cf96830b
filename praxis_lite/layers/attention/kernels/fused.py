"""Attention with cuDNN, and a function that runs kernels on each device."""

import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import SplitDims, to_partition_spec, without_axes
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.head_parts import pad_heads
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.base_layer import pad_to_multiple
from praxis_lite.layers.base.foreign_kernels import without_vma

# B batch, T queries, S keys, N query heads, G key/value heads, K dims per head.


def cudnn_attention(
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: AttentionMask,
    options: LogitOptions,
    *,
    split: SplitDims = None,
) -> jax.Array:
    """Computes attention outputs [B, T, N, K] with cuDNN's flash attention (arXiv:2307.08691).

    Supports 16-bit inputs, without a mask or with a causal mask that may have a window. Each device
    processes its shard of the batch and heads; `split` is the sharding of [B, T, N, K].
    """
    window = None if mask.left_context is None else (mask.left_context - 1, 0)

    def on_one_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=options.scale,
            is_causal=mask.right_context == 0,
            local_window_size=window,
            implementation="cudnn",
        )

    return per_device(on_one_device, q_BTNK, k_BSGK, v_BSGK, (), split)


def per_device(
    attend: Callable[..., jax.Array],
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    rest: tuple[jax.Array, ...],
    split: SplitDims,
) -> jax.Array:
    """Runs `attend(q, k, v, *rest)` on each device's shard of the batch and heads.

    XLA cannot partition a custom kernel, and would gather its operands. Batch and heads are padded
    to multiples of the number of devices.

    Args:
      attend: Kernel for one device.
      q_BTNK: Queries.
      k_BSGK: Keys.
      v_BSGK: Values.
      rest: Other arrays [B, ...].
      split: Sharding of queries [B, T, N, K].
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto_axes = set(mesh.axis_names) - set(mesh.manual_axes)
    # Without a mesh, or inside a shard_map over all of its axes, the arrays are local already.
    if mesh.empty or not auto_axes:
        return attend(q_BTNK, k_BSGK, v_BSGK, *rest)
    spec = to_partition_spec(split or (), mesh.axis_names, rank=4)
    rows, _, heads, _ = without_axes(spec, mesh.manual_axes)
    num_row_shards, num_head_shards = (
        math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in (rows, heads)
    )
    B, _, N, _ = q_BTNK.shape
    q, k, v = (
        pad_to_multiple(x, num_row_shards, dim=0)
        for x in pad_heads(q_BTNK, k_BSGK, v_BSGK, num_head_shards)
    )
    rest = tuple(pad_to_multiple(x, num_row_shards, dim=0) for x in rest)
    head_spec = PartitionSpec(rows, None, heads, None)
    rest_specs = tuple(PartitionSpec(rows) for _ in rest)
    mapped = without_vma(attend, (head_spec,) * 3, rest_specs, head_spec, auto_axes)
    outputs = mapped(q, k, v, *rest)
    return outputs[:B, :, :N]
