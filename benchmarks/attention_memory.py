"""Compares the memory of attention over 16k tokens, forward and backward, with a formula.

`python benchmarks/attention_memory.py` compiles attention and its gradients with respect to the
queries, keys and values. The exact temporary memory, which excludes arguments and results, is read
from the executable without running it.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from praxis_lite.layers.attention.kernels.chunks import chunked_attention  # noqa: E402
from praxis_lite.layers.attention.kernels.einsum import LogitOptions, einsum_attention  # noqa: E402
from praxis_lite.layers.attention.masks import AttentionMask  # noqa: E402


def temp_bytes(kernel: Callable[..., jax.Array], B: int, T: int, N: int, G: int, K: int) -> int:
    """Returns the temporary bytes of a kernel for causal float32 attention and its gradients."""

    def step(q, k, v, d_encoded):
        causal = AttentionMask(None, 0)
        encoded, pull = jax.vjp(lambda *qkv: kernel(*qkv, causal, LogitOptions()), q, k, v)
        return encoded, pull(d_encoded)

    q, k = (jax.ShapeDtypeStruct((B, T, heads, K), jnp.float32) for heads in (N, G))
    return jax.jit(step).lower(q, k, k, q).compile().memory_analysis().temp_size_in_bytes


def chunked_bytes(B: int, T: int, N: int, G: int, K: int, C: int) -> int:
    """Returns the expected temporary bytes of chunked attention with chunks of C tokens.

    These are logits, probabilities, their derivatives and one copy for a matmul (up to three if
    each head has separate keys), [N, C, C] each; four chunks [C, N, K] (queries, output gradients,
    query gradients and their sum); and three chunks [C, G, K] of keys and values.
    """
    num_logits = 5 if N > G else 7
    return 4 * B * (2 * N * T + num_logits * N * C * C + 4 * C * N * K + 3 * C * G * K)


def main() -> None:
    """Prints the measured and expected megabytes of both kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(batch=1, length=16384, heads=8, kv_heads=4, dim=64).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunk", type=int, default=512)
    args = parser.parse_args()
    B, T, N, G, K = args.batch, args.length, args.heads, args.kv_heads, args.dim
    print(f"batch {B}, {T} tokens, {N} heads, {G} key/value heads, {K} dims per head, float32")
    print(f"{'kernel':<10}{'measured MB':>14}{'formula MB':>14}{'ratio':>8}")

    def chunked(*args_: jax.Array) -> jax.Array:
        return chunked_attention(*args_, chunk_size=args.chunk)

    formulas = {
        "chunked": (chunked, chunked_bytes(B, T, N, G, K, args.chunk)),
        # Logits, probabilities and the derivatives of both.
        "einsum": (einsum_attention, 4 * 4 * B * N * T * T),
    }
    for name, (kernel, formula) in formulas.items():
        measured = temp_bytes(kernel, B, T, N, G, K)
        print(f"{name:<10}{measured / 1e6:>14.2f}{formula / 1e6:>14.2f}{measured / formula:>8.3f}")


if __name__ == "__main__":
    main()
