"""A call of splash attention of one row: its blocks, and the share of them that it computes."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np

from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.foreign_kernels import share_of_blocks

# N heads, T queries, G heads of keys and values, S keys, K dims per head.
LANES = 128  # Of a TPU's vector registers; splash works on blocks of so many.
Ids = tuple[jax.Array, jax.Array] | None  # Segments of queries [T] and of keys [S].


@dataclasses.dataclass(frozen=True)
class SplashOfARow(abc.ABC):
    """Splash attention of a row: from q [N, T, K], scaled, and k and v [G, S, K].

    Attributes:
      lengths: T and S, multiples of LANES.
      num_heads: N.
      mask: whose contexts are in the kernel; its arrays are not.
      options: of which the cap is in the kernel.
      interpret: run in interpret mode, which any platform has and which is slow.
      kept_as: the name of results that the backward pass takes up; None: they have none.
    """

    lengths: tuple[int, int]
    num_heads: int
    mask: AttentionMask
    options: LogitOptions
    interpret: bool
    kept_as: str | None = None

    def attended(self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids) -> jax.Array:
        """Returns [N, T, K], which has gradients."""
        with self.noted():
            return self.kernel()(q, k, v, self.segments(ids))

    @abc.abstractmethod
    def with_log_sums(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids
    ) -> tuple[jax.Array, jax.Array]:
        """Returns [N, T, K], and log sum exp of each query's logits, float32 [N, T]."""

    @abc.abstractmethod
    def gradients(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids, log_sums: jax.Array,
        inner: jax.Array, d_encoded: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of q, k and v, of a softmax over more keys than these.

        Args:
          log_sums: [N, T], of a query's logits of all keys.
          inner: [N, T], the products of its results and their gradients.
          d_encoded: [N, T, K], the gradients of its results.
        """

    @abc.abstractmethod
    def kernel(self, *, save_residuals: bool = False) -> Callable[..., Any]:
        """Returns the library's kernel of (q, k, v, segments); with residuals: no gradient."""

    @abc.abstractmethod
    def segments(self, ids: Ids) -> Any:
        """Returns segments as the library's kernel takes them."""

    def mask_of_head(self, masks: ModuleType) -> Any:
        """Returns the mask of all heads, of the library's module of masks."""
        left = None if self.mask.left_context is None else self.mask.left_context - 1
        if left is None and self.mask.right_context is None:
            return masks.FullMask(self.lengths)
        return masks.LocalMask(self.lengths, (left, self.mask.right_context), offset=0)

    @property
    def block_sizes(self) -> tuple[int, int]:
        """Returns the queries and the keys of a block that splash works on."""
        # Of 512 a fused backward kernel's tiles fit into a v5e's vector memory at 256 dims per
        # head.
        block_q, block_kv = (
            max(size for size in (128, 256, 512) if length % size == 0) for length in self.lengths
        )
        return block_q, block_kv

    def noted(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that notes on the kernels the share of blocks that they compute."""
        return share_of_blocks(self.share_of_blocks())

    def share_of_blocks(self) -> float:
        """Returns the share of the blocks of logits that splash computes: those with any seen."""
        (num_queries, num_keys), (block_q, block_kv) = self.lengths, self.block_sizes
        first_q, first_kv = np.arange(0, num_queries, block_q), np.arange(0, num_keys, block_kv)
        # The distances from a key to a query within a block, from the least to the largest.
        least = first_q[:, None] - (first_kv[None, :] + block_kv - 1)
        most = first_q[:, None] + block_q - 1 - first_kv[None, :]
        is_seen = np.ones_like(least, bool)
        if self.mask.left_context is not None:
            is_seen &= least < self.mask.left_context
        if self.mask.right_context is not None:
            is_seen &= most >= -self.mask.right_context
        return float(is_seen.mean())
