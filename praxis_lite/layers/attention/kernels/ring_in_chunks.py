"""A ring's attention to the keys of one station, in chunks: under any mask."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.layers.attention.kernels.chunks import attended_in_chunks, gradients_in_chunks
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.ring_attention import joined
from praxis_lite.layers.attention.kernels.stations import Ring
from praxis_lite.layers.attention.masks import AttentionMask

# B batch, T queries, S keys.


class InChunks(NamedTuple):
    """Attention in chunks of `chunk_size`; `OfAStation` has the methods."""

    options: LogitOptions
    chunk_size: int

    def attended(self, q, k, v, mask, ring, step):
        return joined(*(
            attended_in_chunks(q, *kv, of_piece, *self, jnp.float32)
            for of_piece, kv in _pieces(mask, ring, step, q, k, v)
        ))

    def gradients(self, q, k, v, mask, ring, step, log_sums, inner, d_encoded):
        dq, dk, dv = zip(*(
            gradients_in_chunks(q, *kv, of_piece, *self, log_sums, inner, d_encoded, jnp.float32)
            for of_piece, kv in _pieces(mask, ring, step, q, k, v)
        ), strict=True)
        return sum(dq), jnp.concatenate(dk, axis=1), jnp.concatenate(dv, axis=1)


def of_queries(mask: AttentionMask, ring: Ring, num_queries: int) -> AttentionMask:
    """Returns the mask of this station's queries, which have their places as indices."""
    pieces = ring.starts(ring.station(), num_queries)
    index = [start + jnp.arange(length, dtype=jnp.int32) for start, length in pieces]
    segments = mask.q_segments_BT
    if segments is not None:
        segments = ring.part_of(segments, ring.station(), num_queries)
    return dataclasses.replace(
        mask, q_index_BT=jnp.concatenate(index)[None], q_segments_BT=segments
    )


def _pieces(
    mask: AttentionMask, ring: Ring, step: int | jax.Array, q: jax.Array, *kv: jax.Array
) -> list[tuple[AttentionMask, list[jax.Array]]]:
    """Returns, for each piece of the keys of a station, this station's mask of it and its part."""
    seen = of_queries(mask, ring, q.shape[1])
    station = (ring.station() - step) % ring.num_stations
    pieces, first = [], 0
    for start, length in ring.starts(station, kv[0].shape[1]):
        of_keys = {
            name: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
            for name in ("kv_segments_BS", "kv_visible_BS")
            if (x := getattr(mask, name)) is not None
        }
        # Keys count from the first of the piece: chunks that no query sees are then skipped.
        of_piece = dataclasses.replace(seen, q_index_BT=seen.q_index_BT - start, **of_keys)
        pieces.append((of_piece, [x[:, first : first + length] for x in kv]))
        first += length
    return pieces
