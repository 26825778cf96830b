"""Projections between model dims and heads, and a learned query scale, with Pax's names."""

from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.layers.base.base_layer import BaseLayer, Initializer, broadcast_as, xavier, zeros
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dense import Dense
from praxis_lite.layers.base.dims import SplitSetting, splits
from praxis_lite.layers.initializers import EinsumXavier

# D model dims, N heads, K dims per head.


class AttentionProjection(Dense):
    """Projects [..., D] to heads [..., N, K], or back; its weight is [D, N, K] in both cases.

    Args:
      input_dim: D.
      num_heads: N.
      dim_per_head: K.
      is_output_projection: Whether to project from heads to D.
      use_bias: Whether to add a bias: [N, K], or [D] for an output projection.
      attention_combine_dims: Whether to store the weight as [D, N * K]. As in Pax, this does not
        support a bias.
      use_nhd_shape: Whether to store the weight of an output projection as [N, K, D].
      explicit_fan_in_fan_out_axes: Whether to initialize the weight with the fan-in and fan-out of
        its matmul, D and N * K. If False, [D, N, K] is initialized like a convolution, as in Pax:
        about sqrt((N + K) / 2) times smaller.
      params_init: Initializer of the weight; overrides explicit_fan_in_fan_out_axes.
      weight_split_dims_mapping: Sharding of [D, N, K], regardless of the stored shape.
      activation_split_dims_mapping: Sharding of the outputs.
    """

    splits = splits(weight=(None, None, None), activation=())

    def __init__(
        self,
        input_dim: int,
        num_heads: int,
        dim_per_head: int,
        *,
        is_output_projection: bool = False,
        use_bias: bool = True,
        attention_combine_dims: bool = False,
        use_nhd_shape: bool = False,
        explicit_fan_in_fan_out_axes: bool = False,
        params_init: Initializer | None = None,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, input_dim=input_dim, num_heads=num_heads, dim_per_head=dim_per_head)
        if attention_combine_dims and use_bias:
            raise ConfigError(
                "AttentionProjection.attention_combine_dims does not support a bias. Set "
                "use_bias=False."
            )
        D, N, K = dims = self.dims(input_dim, num_heads, dim_per_head)
        self.equation = "...nk,dnk->...d" if is_output_projection else "...d,dnk->...nk"
        if is_output_projection and use_nhd_shape:
            self.equation, dims = "...nk,nkd->...d", (N, K, D)
        init = params_init or (EinsumXavier() if explicit_fan_in_fan_out_axes else xavier)
        self.make(
            *dims,
            init=init,
            bias_init=zeros if use_bias else None,
            merged="nk" if attention_combine_dims else "",
            in_parts="n",
            rngs=rngs,
        )


class OneHeadedAttentionProjection(Dense):
    """Projects [B, S, D] to a single head, [B, S, 1, K]; its weight is [D, K], as in Pax.

    Args:
      input_dim: D.
      output_dim: K.
      use_bias: Whether to add a bias.
      params_init: Initializer of the weight.
      weight_split_dims_mapping: Sharding of [D, K].
    """

    splits = splits(weight=(None, None), activation=())
    equation = "...d,dk->...k"

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        use_bias: bool = True,
        params_init: Initializer = xavier,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, input_dim=input_dim, output_dim=output_dim)
        self.make(
            *self.dims(input_dim, output_dim),
            init=params_init,
            bias_init=zeros if use_bias else None,
            rngs=rngs,
        )

    def postprocess_outputs(self, outputs: jax.Array) -> jax.Array:
        return super().postprocess_outputs(outputs[..., None, :])


class CombinedQKVProjectionLayer(Dense):
    """Computes queries, keys and values, each [B, T, N, K], with one weight [3, D, N, K].

    Args:
      input_dim: D.
      num_heads: N.
      dim_per_head: K.
      use_bias: Whether to add a bias.
      attention_combine_dims: Whether to store the weight as [3, D, N * K] and the bias as
        [3, N * K].
      explicit_fan_in_fan_out_axes: See AttentionProjection.
      weight_split_dims_mapping: Sharding of [D, N, K]; the leading dim of size 3 is replicated.
    """

    splits = splits(weight=(None, None, None))
    equation = "...d,cdnk->c...nk"

    def __init__(
        self,
        input_dim: int,
        num_heads: int,
        dim_per_head: int,
        *,
        use_bias: bool = True,
        attention_combine_dims: bool = False,
        explicit_fan_in_fan_out_axes: bool = False,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, input_dim=input_dim, num_heads=num_heads, dim_per_head=dim_per_head)
        self.make(
            3,
            *self.dims(input_dim, num_heads, dim_per_head),
            init=EinsumXavier() if explicit_fan_in_fan_out_axes else xavier,
            bias_init=zeros if use_bias else None,
            merged="nk" if attention_combine_dims else "",
            in_parts="n",
            rngs=rngs,
        )

    # Other dense layers return one array. `__call__` is inherited from Dense.
    def postprocess_outputs(  # type: ignore[override]
        self, outputs: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return outputs[0], outputs[1], outputs[2]

    if TYPE_CHECKING:

        def __call__(  # type: ignore[override]
            self, inputs: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


class PerDimScale(BaseLayer):
    """Multiplies [..., K] by softplus(scale) / (softplus(0) sqrt(K)); the scale [K] starts at 0.

    Inputs are thus first scaled by the usual 1 / sqrt(K), and a factor per dim is learned.
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        require_positive(self, dim=dim)
        self.per_dim_scale = self.weight((dim,), init=zeros, rngs=rngs)
        self.dim = dim

    def __call__(self, inputs: jax.Array) -> jax.Array:
        # 1 / softplus(0), with the same digits as in Pax.
        scale = 1.442695041 / np.sqrt(self.dim) * jax.nn.softplus(self.per_dim_scale[...])
        return inputs * broadcast_as(scale, inputs)
