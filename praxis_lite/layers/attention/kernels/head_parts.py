"""Pads and copies heads, so that they can be sharded evenly over devices."""

import jax
import jax.numpy as jnp

from praxis_lite.layers.base.base_layer import pad_to


def padded_num_heads(num_heads: int, num_kv_heads: int, num_parts: int) -> tuple[int, int, int]:
    """Returns (number of query heads, number of key heads, copies of each key head).

    Both numbers of heads are multiples of `num_parts`, the number of devices, and each device has
    the key heads that its query heads use. If there are too few key heads, they are copied. The
    number of copies is chosen to minimize the number of query heads. Padding heads come last.
    """
    num_shared = num_heads // num_kv_heads

    def sizes_with_copies(num_copies: int) -> tuple[int, int, int]:
        num_kv = -(-num_kv_heads * num_copies // num_parts) * num_parts
        return num_kv * num_shared // num_copies, num_copies, num_kv

    copies = [n for n in range(1, num_shared + 1) if num_shared % n == 0]
    num_q, num_copies, num_kv = min(map(sizes_with_copies, copies))
    return num_q, num_kv, num_copies


def pad_heads(
    q_BTNK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, num_parts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Copies and pads the heads of queries, keys and values according to `padded_num_heads`."""
    num_q, num_kv, num_copies = padded_num_heads(q_BTNK.shape[2], k_BSGK.shape[2], num_parts)
    if num_copies > 1:
        k_BSGK, v_BSGK = (jnp.repeat(x, num_copies, axis=2) for x in (k_BSGK, v_BSGK))
    return pad_to(q_BTNK, num_q, 2), pad_to(k_BSGK, num_kv, 2), pad_to(v_BSGK, num_kv, 2)
