"""Projections to attention queries, keys and values, with Pax's names."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, constrain, num_shards_of
from praxis_lite.layers.attention.checks import head_sizes, require_one_source
from praxis_lite.layers.attention.kernels.head_parts import padded_num_heads
from praxis_lite.layers.attention.kv_cache import Cache
from praxis_lite.layers.attention.projections import (
    AttentionProjection,
    CombinedQKVProjectionLayer,
    OneHeadedAttentionProjection,
    PerDimScale,
)
from praxis_lite.layers.base.activation_names import named
from praxis_lite.layers.base.base_layer import BaseLayer, Initializer, pad_to
from praxis_lite.layers.base.dims import HEAD_SPLITS, RESIDUAL, SplitSetting, sized, splits
from praxis_lite.layers.embedding.positional_embeddings import RotaryPositionalEmbedding

# B batch, T queries, S keys, D model dims, N query heads, G key/value heads, K dims per head.


class AttentionHeads(BaseLayer):
    """Projects inputs to queries [B, T, N, K], and `encoded` to keys and values [B, S, G, K].

    See DotProductAttention, a subclass, for the settings.
    """

    splits = HEAD_SPLITS | splits(kv=(), output=RESIDUAL)
    kv_split_dims_mapping: SplitDims
    output_split_dims_mapping: SplitDims

    def __init__(
        self,
        input_dim: int | Mapping[str, int],
        num_heads: int = 1,
        *,
        hidden_dim: int | None = None,
        dim_per_head: int | None = None,
        num_kv_heads: int | None = None,
        use_bias: bool = True,
        use_output_bias: bool | None = None,
        internal_gshard_gaussian_init: bool = False,
        combine_qkv: bool = False,
        internal_enable_query_scale: bool = True,
        internal_enable_per_dim_scale: bool = True,
        scale_query_by_dim_per_head: bool = False,
        use_rotary_position_emb: bool = False,
        output_proj_use_nhd_shape: bool = False,
        output_init: Initializer | None = None,
        proj_tpl: Callable[..., Any] = AttentionProjection,
        combined_qkv_proj_tpl: Callable[..., Any] = CombinedQKVProjectionLayer,
        headless_proj_tpl: Callable[..., Any] = OneHeadedAttentionProjection,
        per_dim_scale_tpl: Callable[..., Any] = PerDimScale,
        rotary_position_emb_tpl: Callable[..., Any] = RotaryPositionalEmbedding,
        relative_bias_tpl: Callable[..., Any] | None = None,
        ln_tpl: Callable[..., Any] | None = None,
        ln_before_rotary: bool = False,
        ln_over_heads: bool = False,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
        kv_split_dims_mapping: SplitSetting = None,
        output_split_dims_mapping: SplitSetting = None,
    ):
        sizes = head_sizes(self, input_dim, hidden_dim, num_heads, dim_per_head, num_kv_heads)
        D, N, K = self.dims(sizes.input_dims["query"], sizes.N, sizes.K)
        G = sized(N, sizes.G)
        one_dim = len(set(sizes.input_dims.values())) == 1
        require_one_source(self, not combine_qkv or (one_dim and G == N))

        # The Gaussian initializer's variance is 1 over the product of `fans`.
        def projection(
            template: Callable[..., Any], dim: int, heads: int, *fans: int, **kwargs: Any
        ) -> Any:
            kwargs = {"use_bias": use_bias, "rngs": rngs, **kwargs}
            if internal_gshard_gaussian_init and fans:
                kwargs["params_init"] = jax.nn.initializers.normal(math.prod(fans) ** -0.5)
            if heads == 1 < N:  # As in Pax, weights for a single key/value head have no heads dim.
                return headless_proj_tpl(dim, K, **kwargs)
            return template(dim, heads, K, **kwargs)

        key_D, value_D = (sized(D, sizes.input_dims[name]) for name in ("key", "value"))
        self.combined_qkv = projection(combined_qkv_proj_tpl, D, N) if combine_qkv else None
        self.query = None if combine_qkv else projection(proj_tpl, D, N, D, K)
        self.key = None if combine_qkv else projection(proj_tpl, key_D, G, key_D)
        self.value = None if combine_qkv else projection(proj_tpl, value_D, G, value_D)
        out: dict[str, Any] = {"use_nhd_shape": True} if output_proj_use_nhd_shape else {}
        out |= {} if use_output_bias is None else {"use_bias": use_output_bias}
        out |= {} if output_init is None else {"params_init": output_init}
        self.post = projection(proj_tpl, D, N, N, K, is_output_projection=True, **out)
        # Queries are scaled by `per_dim_scale` or by the constant `query_scale`, never by both.
        learns_scale = internal_enable_query_scale and internal_enable_per_dim_scale
        self.per_dim_scale = per_dim_scale_tpl(sizes.K, rngs=rngs) if learns_scale else None
        self.query_scale = 1.0
        if internal_enable_query_scale and not learns_scale:
            dims = sizes.hidden_dim // N
            if scale_query_by_dim_per_head and dim_per_head is not None:
                dims = sizes.K
            if dims <= 0:
                raise ConfigError(
                    f"{type(self).__name__}.hidden_dim is {sizes.hidden_dim}; expected at least "
                    f"num_heads {N}, because queries are scaled by hidden_dim / num_heads. "
                    "Increase hidden_dim, or set scale_query_by_dim_per_head=True."
                )
            self.query_scale = float(dims**-0.5)
        self.rotary_position_emb = rotary_position_emb_tpl(K) if use_rotary_position_emb else None
        self.relative_bias = (
            None if relative_bias_tpl is None else relative_bias_tpl(sizes.N, rngs=rngs)
        )
        q_dims, k_dims = (N * K, G * K) if ln_over_heads else (sizes.K, sizes.K)
        self.layer_norm_q = None if ln_tpl is None else ln_tpl(q_dims, rngs=rngs)
        self.layer_norm_k = None if ln_tpl is None else ln_tpl(k_dims, rngs=rngs)
        self.ln_before_rotary, self.ln_over_heads = ln_before_rotary, ln_over_heads
        self.num_heads, self.num_kv_heads, self.dim_per_head = N, sizes.G, sizes.K
        self.features_split = N.split
        # Mesh axes over which the cache is sharded along time if there are fewer heads than
        # devices.
        self.cache_split = None
        # By default, keys and values are sharded like queries, except that a single key/value head
        # is replicated.
        if self.kv_split_dims_mapping is None and self.activation_split_dims_mapping is not None:
            kv_split = (*self.activation_split_dims_mapping, None, None, None, None)[:4]
            if kv_split[1] is None:
                self.cache_split = kv_split[2]
            if G == 1 < N:
                kv_split = (*kv_split[:2], None, None)
            self.kv_split_dims_mapping = kv_split

    def _project(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None,
        positions: jax.Array,
        kv_positions: jax.Array | None,
    ) -> tuple[jax.Array, Cache | None]:
        """Projects inputs to queries, and `encoded` (unless it is None) to keys and values."""

        def normalize(heads: jax.Array, norm: Any) -> jax.Array:
            if norm is None or not self.ln_over_heads:
                return heads if norm is None else norm(heads)
            return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)

        def rotate(heads: jax.Array, positions: jax.Array, norm: Any) -> jax.Array:
            if self.ln_before_rotary:
                heads = normalize(heads, norm)
            if self.rotary_position_emb is not None:
                heads = self.rotary_position_emb(heads, positions)
            return heads if self.ln_before_rotary else normalize(heads, norm)

        if self.combined_qkv is not None:
            q_BTNK, k_BSGK, v_BSGK = named(self.combined_qkv(inputs), "combined_qkv_proj")
        else:
            assert self.query is not None
            q_BTNK = self.query(inputs)
        # Constrain the projections' outputs as well. If the inputs are sharded along time, XLA then
        # gathers the inputs; otherwise it might gather the weights.
        q_BTNK = named(self._constrain(q_BTNK), "query_proj")
        q_BTNK = rotate(q_BTNK, positions, self.layer_norm_q)
        if self.per_dim_scale is not None:
            q_BTNK = self.per_dim_scale(q_BTNK)
        q_BTNK = self._constrain(q_BTNK * self.query_scale)
        # Cross-attention in decoding: the cache contains the keys and values.
        if encoded is None:
            return q_BTNK, None
        if self.combined_qkv is None:
            assert self.key is not None and self.value is not None
            k_BSGK, v_BSGK = self.key(encoded), self.value(encoded)
        assert kv_positions is not None, "`encoded` must have positions."
        kv = self._constrain_kv({"key": k_BSGK, "value": v_BSGK})
        k_BSGK = rotate(named(kv["key"], "key_proj"), kv_positions, self.layer_norm_k)
        v_BSGK = named(kv["value"], "value_proj")
        return q_BTNK, self._constrain_kv({"key": k_BSGK, "value": v_BSGK})

    def _constrain(self, x_BTNK: jax.Array) -> jax.Array:
        return constrain(x_BTNK, self.activation_split_dims_mapping)

    def _constrain_kv(self, kv: Cache) -> Cache:
        return {name: constrain(x, self.kv_split_dims_mapping) for name, x in kv.items()}

    def split_of_time(self) -> DimSplit:
        """Returns the mesh axes that shard the cache along time, or None.

        These axes are used if there are fewer heads than devices.
        """
        return self.cache_split if self.num_kv_heads < num_shards_of(self.cache_split) else None

    def _split_of_cache(self) -> SplitDims:
        if self.kv_split_dims_mapping is None:
            return None
        B, S, G, K = (*self.kv_split_dims_mapping, None, None, None, None)[:4]
        # With too few heads, time is sharded over their axes.
        if (axes := self.split_of_time()) is not None:
            S, G = axes, None
        return B, G, S, K

    def _heads_for(self, path: tuple, weight: jax.Array, dim: int, num_parts: int) -> jax.Array:
        """Pads a weight with heads of zeros, so that heads can be sharded over `num_parts` devices.

        The number of heads is computed by `padded_num_heads`; a single key/value head is
        replicated.

        Args:
          path: Path of the weight in this layer.
          weight: A weight whose dim `dim` contains the heads, or all heads' dims concatenated.
          dim: Index of the heads dim.
          num_parts: Number of devices.
        """
        if self.num_kv_heads == 1 < self.num_heads:  # The weight has no heads dim.
            num_q, num_kv, num_copies = -(-self.num_heads // num_parts) * num_parts, 1, 1
        else:
            num_q, num_kv, num_copies = padded_num_heads(
                self.num_heads, self.num_kv_heads, num_parts
            )
        is_kv = path[0] in ("key", "value")
        old, new = (self.num_kv_heads, num_kv) if is_kv else (self.num_heads, num_q)
        if old == new:
            return weight
        shape = weight.shape
        # The dim may merge the heads with the dims of each head.
        heads = weight.reshape(*shape[:dim], old, -1, *shape[dim + 1 :])
        if is_kv:
            heads = jnp.repeat(heads, num_copies, axis=dim)
        return pad_to(heads, new, dim).reshape(*shape[:dim], -1, *shape[dim + 1 :])
