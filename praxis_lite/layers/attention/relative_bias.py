"""RelativeBias: a learned attention bias that depends on distance, with Pax's numerics."""

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import require
from praxis_lite.layers.base.base_layer import BaseLayer, xavier
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dims import NONE, SplitSetting, splits

# B batch, T queries, S keys, N heads, X buckets.


class RelativeBias(BaseLayer):
    """Computes a bias [B, N, T, S] from the positions of queries [B, T] and keys [B, S].

    See arXiv:1910.10683. Half of the buckets cover a single distance each. The other half cover
    ranges of distances that grow exponentially up to the maximum. Larger distances share the last
    bucket. The weight is [N, X].

    Args:
      num_heads: N.
      relative_attention_num_buckets: X.
      relative_attention_max_distance: Distance at which the last bucket begins.
      bidirectional: Whether half of the buckets are for keys after the query. If False, such keys
        share the bucket of distance 0.
      use_xavier_init: Whether to initialize the weight with Xavier's rule instead of a Gaussian
        with variance 1 / (N X).
    """

    splits = splits(weight=(None, None))

    def __init__(
        self,
        num_heads: int = 1,
        *,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        bidirectional: bool = False,
        use_xavier_init: bool = False,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(
            self,
            num_heads=num_heads,
            relative_attention_num_buckets=relative_attention_num_buckets,
            relative_attention_max_distance=relative_attention_max_distance,
        )
        max_exact = relative_attention_num_buckets // (4 if bidirectional else 2)
        require(
            max_exact >= 1,
            "RelativeBias.relative_attention_num_buckets",
            relative_attention_num_buckets,
            f"at least {4 if bidirectional else 2}",
        )
        require(
            relative_attention_max_distance > max_exact,
            "RelativeBias.relative_attention_max_distance",
            relative_attention_max_distance,
            f"more than {max_exact}, the number of distances with separate buckets",
        )
        normal = jax.nn.initializers.normal((num_heads * relative_attention_num_buckets) ** -0.5)
        self.wrb = self.weight(
            self.dims(num_heads, relative_attention_num_buckets),
            init=xavier if use_xavier_init else normal,
            matrix=NONE,
            rngs=rngs,
        )
        self.num_buckets = relative_attention_num_buckets
        self.max_distance = relative_attention_max_distance
        self.bidirectional = bidirectional

    def __call__(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Maps int positions [B or 1, T] and [B or 1, S] to a float32 bias [B or 1, N, T, S]."""
        bucket_BTS = self._bucket(query_positions[:, :, None] - key_positions[:, None, :])
        bias_NBTS = jnp.take(self.wrb[...], bucket_BTS, axis=1)
        return bias_NBTS.transpose(1, 0, 2, 3)

    def _bucket(self, distance: jax.Array) -> jax.Array:
        """Returns the bucket for a distance, which is positive if the key precedes the query."""
        num_buckets, first = self.num_buckets, jnp.zeros_like(distance)
        if self.bidirectional:
            num_buckets //= 2
            first = jnp.where(distance < 0, num_buckets, 0).astype(distance.dtype)
            distance = jnp.abs(distance)
        distance = jnp.maximum(distance, 0)
        max_exact = num_buckets // 2
        # For distances below max_exact, the log is not used, but must be finite. Compute both logs
        # with JAX, as in Pax, because the last digit matters at the edge of a bucket.
        ratio = jnp.maximum(distance, max_exact).astype(jnp.float32) / max_exact
        share = jnp.log(ratio) / jnp.log(jnp.float32(self.max_distance) / max_exact)
        far = max_exact + (share * (num_buckets - max_exact)).astype(distance.dtype)
        near = distance < max_exact
        return first + jnp.where(near, distance, jnp.minimum(far, num_buckets - 1))
