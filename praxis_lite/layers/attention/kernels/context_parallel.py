"""Context parallelism: attention over sequences that are sharded along time.

Each device has a part of the sequence, and its queries also attend to keys on other devices:

  gather: Keys and values are gathered from all devices (Llama 3, arXiv:2407.21783).
  ring: Keys and values circulate in a ring. A device attends to one part while receiving the next
    (arXiv:2310.01889).
  all_to_all: Each device receives some heads of the complete sequence, attends, and sends the
    outputs back (DeepSpeed Ulysses, arXiv:2309.14509). Heads are padded with zeros if necessary.
  all_to_all+ring: Devices swap heads in groups whose size divides the number of heads, and the
    groups form a ring (arXiv:2405.07719). If the number of heads is a multiple of the number of
    devices, there is only one group and no ring.

With a causal mask, the device with the last part of the sequence would do most of the work. With
`ring` and `gather`, each device therefore has two pieces of equal length, one from each half of the
sequence (zig-zag). Time and heads are padded to multiples of the number of devices; no query
attends to the padding.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.core.sharding.split_dims import (
    SplitDims,
    num_shards_of,
    to_partition_spec,
    without_axes,
)
from praxis_lite.layers.attention.kernels.chunks import apply_sinks, attention_with_log_sums
from praxis_lite.layers.attention.kernels.head_parts import pad_heads
from praxis_lite.layers.attention.kernels.ring_attention import (
    BlockAttention,
    ChunkedBlocks,
    mask_of_queries,
    ring_attention,
)
from praxis_lite.layers.attention.kernels.ring_groups import Ring
from praxis_lite.layers.attention.kernels.ring_splash import (
    SplashBlocks,
    length_multiple,
    unsupported_feature,
)
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.kernels.splash import (
    SPLASHES,
    splash_is_installed,
    splash_of,
)
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.base_layer import pad_to_multiple
from praxis_lite.layers.base.calls import check_collectives_setting
from praxis_lite.layers.base.foreign_kernels import without_vma

# B batch, T queries, S keys, N query heads, G key/value heads, R query heads per key/value head,
# K dims per head.

# Values of the setting, with a description of the data that is communicated.
CONTEXT_PARALLEL = {
    "gather": "keys and values, gathered from all devices",
    "ring": "keys and values, in a ring",
    "all_to_all": "heads: each device receives some heads of the complete sequence",
    "all_to_all+ring": "heads within groups of devices, keys and values in a ring of groups",
}
_UNSUPPORTED = ("atten_dropout_prob", "relative_bias_tpl", "tensor_parallel")
Kernel = Callable[..., jax.Array]


def check_context_parallel(
    layer: object, settings: AttentionSettings, uses: Mapping[str, bool]
) -> None:
    """Checks a layer's `context_parallel` setting and the layer's kernel.

    Args:
      layer: The layer, for error messages.
      settings: The layer's settings.
      uses: Maps the layer's other settings to whether they are used.

    Raises:
      ConfigError: See `check_collectives_setting`; or the kernel does not support context
        parallelism.
    """
    method = settings.context_parallel
    unsupported = {name: uses.get(name, False) for name in _UNSUPPORTED}
    check_collectives_setting(
        layer, "context_parallel", method, CONTEXT_PARALLEL, unsupported, "attention by time"
    )
    if method in ("gather", "ring"):
        _check_kernel(type(layer).__name__, settings)


def _check_kernel(
    name: str, settings: AttentionSettings, context: str = "", cannot: str = ""
) -> None:
    method, kernel = settings.context_parallel, settings.kernel
    able = ["chunked", "auto"] if method == "gather" else ["chunked", *SPLASHES, "auto"]
    if kernel not in able:
        cannot = "it"
    able = [name for name in able if name != kernel]
    if cannot:
        raise ConfigError(
            f"{name}.context_parallel is {method!r}{context}, but atten_kernel is "
            f"{kernel!r}, which does not support {cannot}. Set atten_kernel to one of "
            f"{able}, or context_parallel='all_to_all', which supports any kernel."
        )


def _block_attention(
    settings: AttentionSettings,
    context: str,
    mask: AttentionMask,
    ring: Ring,
    num_queries: int,
    num_keys: int,
) -> BlockAttention:
    """Chooses how to attend to one group's keys: splash if set or on TPU, otherwise chunked.

    Raises:
      ConfigError: The settings select splash, which does not support the mask.
    """
    kernel, options = settings.kernel, settings.options
    in_chunks = ChunkedBlocks(options, settings.chunk_size)
    if settings.context_parallel == "gather" or kernel == "chunked":
        return in_chunks
    cannot = unsupported_feature(mask, num_queries, num_keys)
    is_tpu = compiled_platform() == "tpu"
    if kernel in SPLASHES:
        _check_kernel("DotProductAttention", settings, context, cannot)
        return SplashBlocks(options, not is_tpu, splash_of(kernel))
    is_short = min(num_queries, num_keys) < length_multiple(ring.num_groups)
    if cannot or not is_tpu or is_short or not splash_is_installed("splash"):
        return in_chunks
    return SplashBlocks(options, not is_tpu, splash_of("splash"))


def is_context_parallel(method: str | None, split: SplitDims) -> bool:
    """Returns whether `method` is set and time is sharded over several devices.

    Args:
      method: A name in CONTEXT_PARALLEL, or None.
      split: Sharding of queries [B, T, N, K].
    """
    return method is not None and split is not None and num_shards_of((*split, None)[1]) > 1


def context_parallel_attention(
    settings: AttentionSettings,
    q_BTNK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: AttentionMask,
    kernel: Kernel,
    *,
    split: SplitDims,
    sinks_N: jax.Array | None = None,
    residual_name: str | None = None,
) -> jax.Array:
    """Computes attention outputs [B, T, N, K] if time is sharded over mesh axes.

    On each device, heads are first exchanged within the group (`Ring.by_heads`), and tokens are
    rearranged into zig-zag pieces. Then the device attends to the gathered or circulating keys, and
    both rearrangements are undone. Sinks and means of values are applied outside the
    `jax.shard_map`, to the complete outputs and their logsumexp.

    Arguments that are not listed are those of `einsum_attention`.

    Args:
      settings: The layer's settings, with `context_parallel`.
      mask: A mask without indices.
      kernel: Attention on one device; takes (q, k, v, mask, sinks_N=) for complete sequences.
      split: Sharding of q.
      residual_name: Checkpoint name of the residuals, or None.

    Raises:
      ConfigError: A ring is needed, but the selected kernel does not support it.
    """
    method, options = settings.context_parallel, settings.options
    assert method is not None, "See `is_context_parallel`."
    mesh = jax.sharding.get_abstract_mesh()
    spec = to_partition_spec(split or (), mesh.axis_names, rank=4)
    rows, time, heads, _ = without_axes(spec, mesh.manual_axes)
    num_row_shards, num_time_shards, num_head_shards = (
        math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in (rows, time, heads)
    )
    (B, T, N, K), (S, G) = q_BTNK.shape, k_BSGK.shape[1:3]
    ring = _ring_of(method, axes_of(time), num_time_shards, -(-N // num_head_shards), mask)
    # With one group and no gather, a device receives complete sequences for some heads, and any
    # kernel can attend to them. Otherwise a device has only its queries, and needs chunked or
    # splash blocks.
    is_by_time = method == "gather" or ring.num_groups > 1
    # A zig-zag needs two pieces per device.
    multiple = 2 * num_time_shards
    if is_by_time:
        is_grouped = ring.group_size > 1
        context = f" and {N} heads require a ring of {ring.num_groups} groups" if is_grouped else ""
        _check_kernel("DotProductAttention", settings, context)
        block_attention = _block_attention(settings, context, mask, ring, T, S)
        if isinstance(block_attention, SplashBlocks):
            multiple = math.lcm(multiple, length_multiple(ring.num_groups))
    # Sinks, the extra logit and the mean for fully masked queries depend on the logsumexp over all
    # keys, so they are applied at the end. A kernel for complete sequences applies them itself.
    may_see_none = options.averages and sinks_N is None and (mask.may_hide_all or T != S)
    returns_log_sums = is_by_time and (
        may_see_none or sinks_N is not None or options.extra is not None
    )

    def pad(x: jax.Array) -> jax.Array:
        return pad_to_multiple(pad_to_multiple(x, multiple, dim=1), num_row_shards, dim=0)

    q, k, v = map(pad, pad_heads(q_BTNK, k_BSGK, v_BSGK, num_head_shards * ring.group_size))
    if k.shape[1] > S and mask.right_context != 0 and mask.kv_visible_BS is None:
        # Hide the padding keys. A causal mask hides them anyway, because they come last.
        mask = dataclasses.replace(mask, kv_visible_BS=jnp.ones((B, S), bool))
    mask_arrays, mask_structure = jax.tree.flatten(mask.mapped(pad, pad))
    sinks = () if sinks_N is None or is_by_time else (jnp.pad(sinks_N, (0, q.shape[2] - N)),)

    def on_one_device(q: Any, k: Any, v: Any, *rest: jax.Array) -> tuple[jax.Array, ...]:
        local_mask = jax.tree.unflatten(mask_structure, rest[len(sinks) :])
        q, k, v = map(ring.by_heads, (q, k, v))
        # With one group, q, k and v are now complete sequences.
        if not is_by_time:
            outputs = kernel(
                q[:, :T],
                k[:, :S],
                v[:, :S],
                local_mask.mapped(lambda x: x[:, :T], lambda x: x[:, :S]),
                sinks_N=ring.heads_of(rest[0]) if sinks else None,
            )
            return (ring.by_time(pad_to_multiple(outputs, multiple, dim=1)),)
        b, t, n, _ = q.shape
        q = ring.to_zigzag(q).reshape(b, t, k.shape[2], -1, K)
        if method == "gather":
            # Gathered keys are in the order of the sequence; only the queries are in zig-zag order.
            k, v = (jax.lax.all_gather(x, ring.axes, axis=1, tiled=True) for x in (k, v))
            local_mask = mask_of_queries(local_mask, ring, t)
            encoded, log_sums = attention_with_log_sums(
                q, k, v, local_mask, options, settings.chunk_size, residual_name
            )
        else:
            k, v = map(ring.to_zigzag, (k, v))
            encoded, log_sums = ring_attention(
                q, k, v, local_mask, ring, block_attention, residual_name
            )
        # Both results get the layout of the queries, so that they can be sent back in the same way.
        results = encoded.reshape(b, t, n, K), log_sums.transpose(0, 3, 1, 2).reshape(b, t, n)
        return tuple(ring.by_time(ring.from_zigzag(x)) for x in results[: 1 + returns_log_sums])

    spec = PartitionSpec(rows, time, heads, None)
    outputs = without_vma(
        on_one_device,
        (spec,) * 3 + (PartitionSpec(heads),) * len(sinks),
        (PartitionSpec(rows),) * len(mask_arrays),
        (spec, PartitionSpec(rows, time, heads))[: 1 + returns_log_sums],
        set(mesh.axis_names) - set(mesh.manual_axes),
    )(q, k, v, *sinks, *mask_arrays)
    # Remove the padding of rows, time and heads.
    encoded = outputs[0][:B, :T, :N]
    if not returns_log_sums:
        return encoded
    mean_BGK = jnp.mean(v_BSGK, axis=1, dtype=jnp.float32) if may_see_none else None
    log_sums = outputs[1][:B, :T, :N].reshape(B, T, G, -1).transpose(0, 2, 3, 1)
    encoded = encoded.reshape(B, T, G, -1, K)
    return apply_sinks(encoded, log_sums, options, sinks_N, mean_BGK).astype(q_BTNK.dtype)


def _ring_of(
    method: str, axes: tuple[str, ...], num: int, num_heads: int, mask: AttentionMask
) -> Ring:
    """Returns the ring of device groups for `method`, where each device has `num_heads` heads."""
    size = {"all_to_all": num, "all_to_all+ring": math.gcd(num, num_heads)}.get(method, 1)
    is_causal = mask.right_context == 0 and mask.left_context is None
    return Ring(axes, num, num // size, is_causal and size < num)
