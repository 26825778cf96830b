"""Context parallelism: attention whose queries and keys are split over devices by time.

Each device has a part of the sequence, and a query of it sees keys of others. What moves is chosen:

  gather: the keys and values of all devices are gathered (Llama 3, arXiv:2407.21783).
  ring: they go round a ring, and a device attends to those that have arrived while the next are on
    their way (arXiv:2310.01889).
  all_to_all: each device gets some heads of the whole sequence, attends, and sends them back
    (DeepSpeed Ulysses, arXiv:2309.14509). Heads that do not divide get filler, heads of zeros.
  all_to_all+ring: as many devices share heads as divide these, and these groups are a ring
    (arXiv:2405.07719). Where all divide there is no ring.

Under a causal mask a device with the last part of the sequence would compute most. So each has two
pieces of equal length, one from either end of the sequence (zig-zag), in a ring and where keys are
gathered. Nothing has to divide: filler is appended to time and heads, and no query sees it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import (
    SplitDims,
    num_shards_of,
    to_partition_spec,
    without_axes,
)
from praxis_lite.layers.attention.kernels.chunks import (
    attended_in_chunks,
    attention_with_log_sums,
    finished,
    gradients_in_chunks,
    inner_products,
    of_outputs,
)
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.fused import without_vma
from praxis_lite.layers.attention.kernels.head_parts import heads_in_parts
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.base_layer import to_multiple

# B batch, T queries, S keys, N heads, G heads of keys and values, R heads of queries that share one
# of these, K dims per head.

# What moves, by the name of the setting.
CONTEXT_PARALLEL = {
    "gather": "keys and values: all are gathered",
    "ring": "keys and values, round a ring",
    "all_to_all": "heads: a device gets some, of the whole sequence",
    "all_to_all+ring": "heads within groups of as many devices as divide them, keys between these",
}
Kernel = Callable[..., jax.Array]


def check_context_parallel(
    layer: object, setting: str | None, atten_kernel: str, unable: dict[str, bool]
) -> None:
    """Checks the setting of a layer.

    Args:
      unable: settings of the layer that do not go with it, by name: whether they are in use.

    Raises:
      ConfigError: there is no such way, or a setting that does not go with it is in use.
    """
    if setting is None:
        return
    name = type(layer).__name__
    require_choice(f"{name}.context_parallel", setting, CONTEXT_PARALLEL)
    used = [other for other, is_used in unable.items() if is_used]
    if used:
        raise ConfigError(
            f"{name}.context_parallel is {setting!r}, which cannot do {' or '.join(used)}. Leave "
            "that out, or set context_parallel=None: the compiler then splits attention by time."
        )
    if setting in ("gather", "ring"):
        _check_kernel(name, setting, atten_kernel, "")


def _check_kernel(name: str, how: str, atten_kernel: str, why: str) -> None:
    if atten_kernel not in ("auto", "chunked"):
        raise ConfigError(
            f"{name}.context_parallel is {how!r}{why}, which attends in chunks; atten_kernel is "
            f"{atten_kernel!r}. Set atten_kernel='chunked' or 'auto', or "
            "context_parallel='all_to_all', which takes any kernel."
        )


def is_context_parallel(how: str | None, split: SplitDims) -> bool:
    """Returns True if time is split over several devices, and by the setting `how`.

    Args:
      split: of queries [B, T, N, K].
    """
    return how is not None and split is not None and num_shards_of((*split, None)[1]) > 1


class Ring(NamedTuple):
    """Devices along the mesh axes of time, in groups that are the stations of a ring.

    Attributes:
      axes: of the mesh, over which time is split.
      num: devices along these.
      num_stations: groups.
      is_zigzag: a station's tokens are two pieces, from either end of the sequence.
    """

    axes: tuple[str, ...]
    num: int
    num_stations: int
    is_zigzag: bool

    @property
    def size(self) -> int:
        """Devices of a group."""
        return self.num // self.num_stations

    @property
    def groups(self) -> list[list[int]]:
        """The devices of each station, whose tokens follow on each other in the order of these.

        A zig-zag of an even number of devices has its two pieces from the start.
        """
        if not self.is_paired:
            return [
                list(range(i * self.size, (i + 1) * self.size)) for i in range(self.num_stations)
            ]
        half = self.size // 2
        first = [range(i * half, (i + 1) * half) for i in range(self.num_stations)]
        last = [
            range(self.num - (i + 1) * half, self.num - i * half) for i in range(self.num_stations)
        ]
        return [[*low, *high] for low, high in zip(first, last, strict=True)]

    @property
    def is_paired(self) -> bool:
        return self.is_zigzag and self.size % 2 == 0

    def station(self) -> jax.Array:
        """Returns the number of this device's station."""
        of_device = [0] * self.num
        for i, group in enumerate(self.groups):
            for device in group:
                of_device[device] = i
        return jnp.asarray(of_device, jnp.int32)[jax.lax.axis_index(self.axes)]

    def sent(self, tree: Any, step: int) -> Any:
        """Returns what the station `step` before this one sends."""
        pairs = [
            (device, self.groups[(i + step) % self.num_stations][rank])
            for i, group in enumerate(self.groups) for rank, device in enumerate(group)
        ]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)

    def by_heads(self, x: jax.Array) -> jax.Array:
        """Returns some heads of the group's tokens [B, T, N, ...] of all heads of this device's."""
        return self._exchanged(x, 2, 1)

    def by_time(self, x: jax.Array) -> jax.Array:
        """Returns all heads of this device's tokens of some heads of its group's."""
        return self._exchanged(x, 1, 2)

    def _exchanged(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        if self.size == 1:
            return x
        groups = None if self.num_stations == 1 else self.groups
        return jax.lax.all_to_all(
            x, self.axes, split, concat, axis_index_groups=groups, tiled=True
        )

    def heads_of(self, x_N: jax.Array) -> jax.Array:
        """Returns this device's part of what there is for each head, where one group shares all."""
        size = x_N.shape[0] // self.size
        return jax.lax.dynamic_slice_in_dim(x_N, jax.lax.axis_index(self.axes) * size, size)

    def to_zigzag(self, x: jax.Array) -> jax.Array:
        """Returns the tokens [B, T, ...] of this station's two pieces, of its part of the sequence.

        With p pieces, 2p + 1 of station p, the even ones are sent first, and the odd ones; a
        station gets one of either.
        """
        if not self.is_zigzag or self.is_paired:
            return x
        parts = [
            self._moved(part, [(i // 2, self._home(i)) for i in range(parity, self._pieces, 2)])
            for parity, part in enumerate(jnp.split(x, 2, axis=1))
        ]
        return self._in_order(parts, self.station() % 2 == 0)

    def from_zigzag(self, x: jax.Array) -> jax.Array:
        """Returns the inverse of `to_zigzag`."""
        if not self.is_zigzag or self.is_paired:
            return x
        low, high = jnp.split(x, 2, axis=1)
        is_even = self.station() % 2 == 0
        parts = [jnp.where(is_even, low, high), jnp.where(is_even, high, low)]
        return jnp.concatenate([
            self._moved(part, [(self._home(i), i // 2) for i in range(parity, self._pieces, 2)])
            for parity, part in enumerate(parts)
        ], axis=1)

    @property
    def _pieces(self) -> int:
        return 2 * self.num_stations

    def _home(self, piece: int) -> int:
        """Returns the station that attends with a piece of the sequence."""
        return min(piece, self._pieces - 1 - piece)

    def _moved(self, x: jax.Array, stations: list[tuple[int, int]]) -> jax.Array:
        pairs = [
            pair for start, end in stations
            for pair in zip(self.groups[start], self.groups[end], strict=True)
        ]
        return jax.lax.ppermute(x, self.axes, pairs)

    @staticmethod
    def _in_order(parts: list[jax.Array], is_even: jax.Array) -> jax.Array:
        even, odd = parts
        return jnp.concatenate(
            [jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1
        )

    def starts(self, station: jax.Array, length: int) -> list[tuple[jax.Array, int]]:
        """Returns the index of the first token, and the length, of each piece of a station.

        Args:
          length: of all its tokens.
        """
        if not self.is_zigzag:
            return [(station * length, length)]
        half = length // 2
        return [(station * half, half), ((self._pieces - 1 - station) * half, half)]


def context_parallel_attention(
    how: str, q_BTNK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask: AttentionMask,
    options: LogitOptions, kernel: Kernel, *, atten_kernel: str, chunk_size: int, split: SplitDims,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Returns the attended values [B, T, N, K], where mesh axes split time.

    Args:
      how: of CONTEXT_PARALLEL.
      q_BTNK, k_BSGK, v_BSGK, mask, options, sinks_N: as of `einsum_attention`; the mask has no
        indices of its own.
      kernel: of one device, for heads of whole sequences: called with q, k, v, mask, options and
        `sinks_N`.
      atten_kernel: as it is set.
      chunk_size: queries and keys of a chunk, where attention is in chunks.
      split: of q.

    Raises:
      ConfigError: a ring is needed, and the kernel that is set has none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    spec = to_partition_spec(split or (), mesh.axis_names, rank=4)
    rows, time, heads, _ = without_axes(spec, mesh.manual_axes)
    num_rows, num, num_shards = (
        math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in (rows, time, heads)
    )
    (B, T, N, K), (S, G) = q_BTNK.shape, k_BSGK.shape[1:3]
    ring = _ring_of(how, axes_of(time), num, -(-N // num_shards), mask)
    in_chunks = how == "gather" or ring.num_stations > 1
    if in_chunks:
        why = "" if ring.size == 1 else f" and {N} heads leave a ring of {ring.num_stations}"
        _check_kernel("DotProductAttention", how, atten_kernel, why)
    may_see_none = options.averages and sinks_N is None and (mask.may_hide_all or T != S)
    gives_sums = in_chunks and (may_see_none or sinks_N is not None or options.extra is not None)

    def filled_up(x: jax.Array) -> jax.Array:
        return to_multiple(to_multiple(x, 2 * num, dim=1), num_rows, dim=0)

    q, k, v = map(filled_up, heads_in_parts(q_BTNK, k_BSGK, v_BSGK, num_shards * ring.size))
    arrays = {name: filled_up(x) for name, x in _arrays_of(mask, B, S, k.shape[1]).items()}
    sinks = () if sinks_N is None or in_chunks else (jnp.pad(sinks_N, (0, q.shape[2] - N)),)

    def on_a_device(q: Any, k: Any, v: Any, *rest: jax.Array) -> tuple[jax.Array, ...]:
        seen = AttentionMask(
            mask.left_context, mask.right_context, is_to_itself=mask.is_to_itself,
            **dict(zip(arrays, rest[len(sinks) :], strict=True)),
        )
        q, k, v = map(ring.by_heads, (q, k, v))
        if not in_chunks:
            outputs = kernel(
                q[:, :T], k[:, :S], v[:, :S], _without_filler(seen, T, S), options,
                sinks_N=ring.heads_of(rest[0]) if sinks else None,
            )
            return (ring.by_time(to_multiple(outputs, 2 * num, dim=1)),)
        b, t, n, _ = q.shape
        q = ring.to_zigzag(q).reshape(b, t, k.shape[2], -1, K)
        if how == "gather":
            k, v = (jax.lax.all_gather(x, ring.axes, axis=1, tiled=True) for x in (k, v))
            seen = _of_queries(seen, ring, t)
            encoded, log_sums = attention_with_log_sums(q, k, v, seen, options, chunk_size)
        else:
            k, v = map(ring.to_zigzag, (k, v))
            encoded, log_sums = _round_ring(q, k, v, seen, ring, options, chunk_size)
        outputs = encoded.reshape(b, t, n, K), log_sums.transpose(0, 3, 1, 2).reshape(b, t, n)
        return tuple(ring.by_time(ring.from_zigzag(x)) for x in outputs[: 1 + gives_sums])

    split_as = PartitionSpec(rows, time, heads, None)
    outputs = without_vma(
        on_a_device, (split_as,) * 3 + (PartitionSpec(heads),) * len(sinks),
        (PartitionSpec(rows),) * len(arrays),
        (split_as, PartitionSpec(rows, time, heads))[: 1 + gives_sums],
        set(mesh.axis_names) - set(mesh.manual_axes),
    )(q, k, v, *sinks, *arrays.values())
    encoded = outputs[0][:B, :T, :N]
    if not gives_sums:
        return encoded
    mean_BGK = jnp.mean(v_BSGK, axis=1, dtype=jnp.float32) if may_see_none else None
    log_sums = outputs[1][:B, :T, :N].reshape(B, T, G, -1).transpose(0, 2, 3, 1)
    encoded = encoded.reshape(B, T, G, -1, K)
    return finished(encoded, log_sums, options, sinks_N, mean_BGK).astype(q_BTNK.dtype)


def _ring_of(
    how: str, axes: tuple[str, ...], num: int, num_heads: int, mask: AttentionMask
) -> Ring:
    """Returns the groups of devices that share heads, of which a device has `num_heads`."""
    size = {"all_to_all": num, "all_to_all+ring": math.gcd(num, num_heads)}.get(how, 1)
    is_causal = mask.right_context == 0 and mask.left_context is None
    return Ring(axes, num, num // size, is_causal and size < num)


def _arrays_of(
    mask: AttentionMask, num_rows: int, num_keys: int, filled_up: int
) -> dict[str, jax.Array]:
    """Returns the arrays of a mask by name, one that hides filler keys among them if they need it.

    No query sees a key after its own, which filler is, if attention is causal.
    """
    arrays = {
        "q_segments_BT": mask.q_segments_BT, "kv_segments_BS": mask.kv_segments_BS,
        "kv_visible_BS": mask.kv_visible_BS,
    }
    if filled_up > num_keys and mask.right_context != 0 and mask.kv_visible_BS is None:
        arrays["kv_visible_BS"] = jnp.ones((num_rows, num_keys), bool)
    return {name: x for name, x in arrays.items() if x is not None}


def _without_filler(mask: AttentionMask, num_queries: int, num_keys: int) -> AttentionMask:
    """Returns the mask of whole sequences, without filler at their ends."""
    def part(x: jax.Array | None, length: int) -> jax.Array | None:
        return None if x is None else x[:, :length]

    return dataclasses.replace(
        mask, q_segments_BT=part(mask.q_segments_BT, num_queries),
        kv_segments_BS=part(mask.kv_segments_BS, num_keys),
        kv_visible_BS=part(mask.kv_visible_BS, num_keys),
    )


def _of_queries(mask: AttentionMask, ring: Ring, num_queries: int) -> AttentionMask:
    """Returns the mask of this station's queries, which have their places as indices."""
    pieces = ring.starts(ring.station(), num_queries)
    index = [start + jnp.arange(length, dtype=jnp.int32) for start, length in pieces]
    segments = mask.q_segments_BT
    if segments is not None:
        parts = [jax.lax.dynamic_slice_in_dim(segments, *piece, axis=1) for piece in pieces]
        segments = jnp.concatenate(parts, axis=1)
    return dataclasses.replace(
        mask, q_index_BT=jnp.concatenate(index)[None], q_segments_BT=segments
    )


def _of_pieces(
    mask: AttentionMask, ring: Ring, station: jax.Array, *arrays: jax.Array
) -> list[tuple[AttentionMask, list[jax.Array]]]:
    """Returns, for each piece of a station's keys, the mask of it and the part of `arrays`.

    Args:
      mask: of this station's queries and all keys.
      arrays: [B, S, ...] of the station's keys.
    """
    pieces, first = [], 0
    for start, length in ring.starts(station, arrays[0].shape[1]):
        of_keys = {
            name: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
            for name in ("kv_segments_BS", "kv_visible_BS")
            if (x := getattr(mask, name)) is not None
        }
        # Keys count from the first of the piece: chunks that no query sees are then skipped.
        seen = dataclasses.replace(mask, q_index_BT=mask.q_index_BT - start, **of_keys)
        pieces.append((seen, [x[:, first : first + length] for x in arrays]))
        first += length
    return pieces


def _num_steps(ring: Ring, mask: AttentionMask, num_keys: int) -> int:
    """Returns the number of stations whose keys a station's queries may see, itself counted."""
    if mask.right_context != 0 or mask.left_context is None:
        return ring.num_stations
    return min(ring.num_stations, 1 + -(-(mask.left_context - 1) // num_keys))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _round_ring(q, k, v, mask, ring, options, chunk_size):
    """Returns what this station's queries [B, T, G, R, K] attend to, and their log sums.

    The results are `attention_with_log_sums`'s. The backward pass sends keys and values round once
    more, with the gradients that come of them; what is kept is a station's own.
    """
    station, num_steps = ring.station(), _num_steps(ring, mask, k.shape[1])
    seen = _of_queries(mask, ring, q.shape[1])

    def attended(step: Any, k: jax.Array, v: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        owner = (station - step) % ring.num_stations
        return [
            attended_in_chunks(q, *kv, of_piece, options, chunk_size, jnp.float32)
            for of_piece, kv in _of_pieces(seen, ring, owner, k, v)
        ]

    def turn(step: Any, carry: Any) -> Any:
        (k, v), result = carry
        following = ring.sent((k, v), 1)  # On its way while this device attends.
        return following, functools.reduce(_joined, attended(step, k, v), result)

    following = ring.sent((k, v), 1) if num_steps > 1 else (k, v)
    result = functools.reduce(_joined, attended(0, k, v))
    if num_steps > 1:
        following, result = jax.lax.fori_loop(1, num_steps - 1, turn, (following, result))
        result = functools.reduce(_joined, attended(num_steps - 1, *following), result)
    return result[0].astype(q.dtype), result[1]


def _joined(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the values that are attended over the keys of both, and their log sums."""
    log_sums = jnp.logaddexp(first[1], second[1])
    encoded = sum(of_outputs(jnp.exp(each - log_sums)) * x for x, each in (first, second))
    return encoded, log_sums


def _forward(q, k, v, mask, ring, options, chunk_size):
    encoded, log_sums = _round_ring(q, k, v, mask, ring, options, chunk_size)
    return (encoded, log_sums), (q, k, v, mask, encoded, log_sums)


def _backward(ring, options, chunk_size, residuals, grads):
    q, k, v, mask, encoded, log_sums = residuals
    d_encoded, d_log_sums = grads
    inner = inner_products(d_encoded, encoded) - d_log_sums
    station, num_steps = ring.station(), _num_steps(ring, mask, k.shape[1])
    seen = _of_queries(mask, ring, q.shape[1])

    def gradients(step: Any, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
        owner = (station - step) % ring.num_stations
        dq, dk, dv = zip(*(
            gradients_in_chunks(
                q, *kv, of_piece, options, chunk_size, log_sums, inner, d_encoded, jnp.float32
            )
            for of_piece, kv in _of_pieces(seen, ring, owner, k, v)
        ), strict=True)
        return sum(dq), (jnp.concatenate(dk, axis=1), jnp.concatenate(dv, axis=1))

    def added(step: Any, kv: Any, dq: jax.Array, d_kv: Any) -> tuple[jax.Array, Any]:
        arrived = ring.sent(d_kv, 1)
        more, d_here = gradients(step, *kv)
        return dq + more, jax.tree.map(jnp.add, arrived, d_here)

    def turn(step: Any, carry: Any) -> Any:
        kv, dq, d_kv = carry
        return ring.sent(kv, 1), *added(step, kv, dq, d_kv)

    following = ring.sent((k, v), 1) if num_steps > 1 else (k, v)
    dq, d_kv = gradients(0, k, v)
    if num_steps > 1:
        following, dq, d_kv = jax.lax.fori_loop(1, num_steps - 1, turn, (following, dq, d_kv))
        dq, d_kv = added(num_steps - 1, following, dq, d_kv)
        d_kv = ring.sent(d_kv, 1 - num_steps)  # Home.
    dk, dv = d_kv
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_round_ring.defvjp(_forward, _backward)
