"""SplashBlocks: attention to one group's keys in ring attention, with splash kernels for TPU."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.layers.attention.kernels.chunks import OutputGradients
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.ring_attention import RingStep
from praxis_lite.layers.attention.kernels.splash_kernels import LANES, RowSplash
from praxis_lite.layers.attention.masks import LARGE_NEGATIVE, AttentionMask

# B batch, T queries, S keys, N query heads, G key/value heads, R query heads per key/value head,
# K dims per head.
Segments = tuple[jax.Array, jax.Array] | None  # Segments of queries [B, T] and of keys [B, S].


def unsupported_feature(mask: AttentionMask, num_queries: int, num_keys: int) -> str:
    """Returns a feature of `mask` that splash does not support in a ring, or "" if there is none.

    The blocks that splash computes must be known at compile time. With a causal mask, the blocks
    depend only on which of the two groups is earlier. With a window, they depend on the distance
    between the groups.
    """
    if mask.left_context is not None:
        return "a window"
    if mask.right_context == 0 and num_queries != num_keys:
        return "different numbers of queries and keys with a causal mask"
    return "" if mask.right_context in (0, None) else "a right_context"


class SplashBlocks(NamedTuple):
    """A BlockAttention with splash kernels; with a causal mask, the ring must be a zig-zag."""

    options: LogitOptions
    interpret: bool
    splash: type[RowSplash]

    def attend(self, q, k, v, step):
        segments = _segments(step, q, k)
        # Length of a zig-zag piece. `_by_order` explains which pieces attend to each other.
        half = k.shape[1] // 2

        def to_later_group() -> tuple[jax.Array, jax.Array]:
            encoded, log_sums = self._attend(
                q[:, half:], k, v, _parts(segments, half, 0), is_causal=False
            )
            # Queries in the first piece attend to no key of a later group.
            return (
                _with_zeros_before(encoded, half, 1),
                _with_zeros_before(log_sums, half, 3, LARGE_NEGATIVE),
            )

        def to_earlier_group() -> tuple[jax.Array, jax.Array]:
            kv = k[:, :half], v[:, :half]
            return self._attend(q, *kv, _parts(segments, 0, -half), is_causal=False)

        def to_all_keys(is_causal: bool) -> tuple[jax.Array, jax.Array]:
            return self._attend(q, k, v, segments, is_causal=is_causal)

        return _by_order(step, to_all_keys, to_earlier_group, to_later_group)

    def gradients(self, q, k, v, step, d_outputs):
        segments = _segments(step, q, k)
        half = k.shape[1] // 2

        def for_later_group() -> tuple[jax.Array, ...]:
            d_second_half = OutputGradients(
                d_outputs.encoded[:, half:],
                d_outputs.log_sums[..., half:],
                d_outputs.inner[..., half:],
            )
            dq, dk, dv = self._gradients(
                q[:, half:], k, v, _parts(segments, half, 0), d_second_half, is_causal=False
            )
            # Queries in the first piece do not attend to a later group, so their gradient is 0.
            return _with_zeros_before(dq, half, 1), dk, dv

        def for_earlier_group() -> tuple[jax.Array, ...]:
            kv = k[:, :half], v[:, :half]
            dq, *d_kv = self._gradients(
                q, *kv, _parts(segments, 0, -half), d_outputs, is_causal=False
            )
            # No query attends to the second piece of an earlier group, so the gradient of its keys
            # is 0.
            return dq, *(jnp.pad(x, [(0, 0), (0, half), (0, 0), (0, 0)]) for x in d_kv)

        def for_all_keys(is_causal: bool) -> tuple[jax.Array, ...]:
            return self._gradients(q, k, v, segments, d_outputs, is_causal=is_causal)

        return _by_order(step, for_all_keys, for_earlier_group, for_later_group)

    def _row_kernel(self, q: jax.Array, k: jax.Array, is_causal: bool) -> RowSplash:
        """Returns the kernels for all heads of one sequence."""
        mask = AttentionMask(right_context=0 if is_causal else None)
        num_heads = q.shape[2] * q.shape[3]
        return self.splash((q.shape[1], k.shape[1]), num_heads, mask, self.options, self.interpret)

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, *, is_causal: bool
    ) -> tuple[jax.Array, jax.Array]:
        encoded_BNTK, log_sums_BNT = jax.vmap(self._row_kernel(q, k, is_causal).with_log_sums)(
            _to_splash_layout(q * self.options.scale),
            _to_splash_layout(k),
            _to_splash_layout(v),
            segments,
        )
        encoded = _to_query_layout(encoded_BNTK, q.shape)
        log_sums = log_sums_BNT.reshape(q.shape[0], *q.shape[2:4], q.shape[1])
        # For fully masked queries, splash returns the mean of the values that it has read.
        sees_any = log_sums > 0.5 * LARGE_NEGATIVE
        return (
            jnp.where(sees_any.transpose(0, 3, 1, 2)[..., None], encoded, 0.0),
            jnp.where(sees_any, log_sums, LARGE_NEGATIVE),
        )

    def _gradients(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Segments,
        d_outputs: OutputGradients,
        *,
        is_causal: bool,
    ) -> tuple[jax.Array, ...]:
        shape = (q.shape[0], -1, q.shape[1])
        # The logits of fully masked queries equal their logsumexp, but their softmax must be 0.
        log_sums = d_outputs.log_sums
        log_sums = jnp.where(log_sums > 0.5 * LARGE_NEGATIVE, log_sums, -LARGE_NEGATIVE)
        dq, dk, dv = jax.vmap(self._row_kernel(q, k, is_causal).gradients)(
            _to_splash_layout(q * self.options.scale),
            _to_splash_layout(k),
            _to_splash_layout(v),
            segments,
            OutputGradients(
                _to_splash_layout(d_outputs.encoded),
                log_sums.reshape(shape),
                d_outputs.inner.reshape(shape),
            ),
        )
        return (
            _to_query_layout(dq, q.shape) * self.options.scale,
            *(x.transpose(0, 2, 1, 3).astype(jnp.float32) for x in (dk, dv)),
        )


def _by_order(step: RingStep, all_keys: Any, earlier: Any, later: Any) -> Any:
    """Calls the function for a group's own keys, or for the keys of an earlier or later group.

    In a zig-zag, all queries attend to the first piece of an earlier group, but not to its second
    piece. Queries in the second piece attend to both pieces of a later group, and queries in the
    first piece to neither.
    """
    is_causal = step.mask.right_context == 0
    if not is_causal or (isinstance(step.offset, int) and step.offset == 0):
        return all_keys(is_causal)
    return jax.lax.cond(step.ring.group_index() >= step.offset, earlier, later)


def _segments(step: RingStep, q: jax.Array, k: jax.Array) -> Segments:
    """Returns the segments of this group's queries q and of the keys k; -1 for masked keys."""
    mask, ring = step.mask, step.ring
    if mask.q_segments_BT is None and mask.kv_visible_BS is None:
        return None
    lengths = (n * ring.num_groups for n in (q.shape[1], k.shape[1]))
    q_segments, kv_segments = mask.segments(q.shape[0], *lengths)
    return (
        ring.part_of(q_segments, ring.group_index(), q.shape[1]),
        ring.part_of(kv_segments, step.key_group(), k.shape[1]),
    )


def _parts(segments: Segments, first_query: int, end_of_keys: int) -> Segments:
    if segments is None:
        return None
    return segments[0][:, first_query:], segments[1][:, : end_of_keys or None]


def _to_splash_layout(x: jax.Array) -> jax.Array:
    """Transposes [B, T, N, K] or [B, T, G, R, K] to [B, N, T, K]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1]).transpose(0, 2, 1, 3)


def _to_query_layout(x_BNTK: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns float32 [B, T, G, R, K], where `shape` is the shape of the queries."""
    return x_BNTK.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(*shape[:-1], -1)


def _with_zeros_before(x: jax.Array, count: int, dim: int, value: float = 0.0) -> jax.Array:
    widths = [(count, 0) if i == dim else (0, 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def length_multiple(num_groups: int) -> int:
    """Returns the number by which sequence lengths must be divisible."""
    return 2 * num_groups * LANES
