"""From model dims to heads and back, and the learned scale of queries. Names are Pax's."""

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims
from praxis_lite.layers.base_layer import BaseLayer, Dense, Initializer, broadcast_as, xavier, zeros
from praxis_lite.layers.calls import require_positive

# D model dims, N heads, K dims per head.


def _splits(mapping: SplitDims) -> tuple[DimSplit, ...]:
    """Returns an entry for each of D, N and K, and further entries for the weight to refuse."""
    mapping = tuple(mapping or ())
    return mapping + (None,) * (3 - len(mapping))


def _heads(
    sizes: tuple[int, int], splits: tuple[DimSplit, ...], are_merged: bool
) -> tuple[tuple[int, ...], tuple[DimSplit, ...]]:
    """Returns sizes and splits of a weight's dims [N, K], or of the single dim that both make."""
    if not are_merged:
        return sizes, splits
    axes = [(split,) if isinstance(split, str | int) else split or () for split in splits]
    return (sizes[0] * sizes[1],), (tuple(axis for part in axes for axis in part) or None,)


def _init(explicit: bool, in_axis: int, out_axis: int | Sequence[int]) -> Initializer:
    if not explicit:
        return xavier
    return jax.nn.initializers.variance_scaling(
        1.0, "fan_avg", "uniform", in_axis=in_axis, out_axis=out_axis
    )


class AttentionProjection(Dense):
    """Projects [..., D] to heads [..., N, K], or back; its weight is [D, N, K] either way.

    Args:
      is_output_projection: project back, from heads to D.
      use_bias: add a bias: [N, K], or [D] of an output projection.
      attention_combine_dims: keep the weight as [D, N * K]. Takes no bias, as Pax's.
      use_nhd_shape: keep the weight of an output projection as [N, K, D].
      explicit_fan_in_fan_out_axes: draw the weight by its true fans, D and N * K. If not, it is
        drawn as in Pax, as if [D, N, K] were a convolution: about sqrt((N + K) / 2) times smaller.
      params_init: draws the weight instead.
      weight_split_dims_mapping: of [D, N, K], whatever the weight's shape.
      activation_split_dims_mapping: of the outputs.
    """

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
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dim=input_dim, num_heads=num_heads, dim_per_head=dim_per_head)
        if attention_combine_dims and use_bias:
            raise ConfigError(
                "AttentionProjection: attention_combine_dims takes no bias. Set use_bias=False."
            )
        split_D, split_N, split_K, *rest = _splits(weight_split_dims_mapping)
        heads, head_splits = _heads(
            (num_heads, dim_per_head), (split_N, split_K), attention_combine_dims
        )
        shape, split = (input_dim, *heads), (split_D, *head_splits, *rest)
        in_axis, out_axis = 0, tuple(range(1, len(shape)))
        if is_output_projection and use_nhd_shape:
            shape, split = (*heads, input_dim), (*head_splits, split_D, *rest)
            in_axis, out_axis = len(heads), tuple(range(len(heads)))
        init = params_init or _init(explicit_fan_in_fan_out_axes, in_axis, out_axis)
        self.w = self.weight(shape, split, init=init, rngs=rngs)
        shape, split = ((input_dim,), (split_D,)) if is_output_projection else (heads, head_splits)
        self.b = self.weight(shape, split, init=zeros, rngs=rngs) if use_bias else None
        # N: all heads, or a device's part of them.
        self.equation, self.kernel_shape = "...d,dnk->...nk", (input_dim, -1, dim_per_head)
        if is_output_projection:
            self.equation = "...nk,dnk->...d"
            if use_nhd_shape:
                self.equation = "...nk,nkd->...d"
                self.kernel_shape = (-1, dim_per_head, input_dim)
        self.activation_split_dims_mapping = activation_split_dims_mapping


class OneHeadedAttentionProjection(Dense):
    """Projects [B, S, D] to a single head, [B, S, 1, K]; its weight is [D, K], as in Pax.

    Args:
      params_init: how the weight is drawn, if not by Xavier's rule.
      weight_split_dims_mapping: of [D, K].
    """

    equation = "...d,dk->...k"

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        use_bias: bool = True,
        params_init: Initializer = xavier,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dim=input_dim, output_dim=output_dim)
        self.kernel_shape = (input_dim, output_dim)
        split = tuple(weight_split_dims_mapping or ())
        self.w = self.weight(self.kernel_shape, split, init=params_init, rngs=rngs)
        self.b = self.weight((output_dim,), split[1:2], init=zeros, rngs=rngs) if use_bias else None
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def finished(self, outputs: jax.Array) -> jax.Array:
        return super().finished(outputs[..., None, :])


class CombinedQKVProjectionLayer(Dense):
    """Returns queries, keys and values [B, T, N, K] each, of a joint weight [3, D, N, K].

    Args:
      attention_combine_dims: keep the weight as [3, D, N * K] and the bias as [3, N * K].
      explicit_fan_in_fan_out_axes: see AttentionProjection.
      weight_split_dims_mapping: of [D, N, K]; the 3 stay whole.
    """

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
        weight_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, input_dim=input_dim, num_heads=num_heads, dim_per_head=dim_per_head)
        split_D, split_N, split_K, *rest = _splits(weight_split_dims_mapping)
        heads, head_splits = _heads(
            (num_heads, dim_per_head), (split_N, split_K), attention_combine_dims
        )
        init = _init(explicit_fan_in_fan_out_axes, 1, tuple(range(2, 2 + len(heads))))
        split = (None, split_D, *head_splits, *rest)
        self.w = self.weight((3, input_dim, *heads), split, init=init, rngs=rngs)
        shape, split = (3, *heads), (None, *head_splits)
        self.b = self.weight(shape, split, init=zeros, rngs=rngs) if use_bias else None
        self.kernel_shape = (3, input_dim, -1, dim_per_head)

    def finished(self, outputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return outputs[0], outputs[1], outputs[2]


class PerDimScale(BaseLayer):
    """Returns [..., K] times softplus(scale) / (softplus(0) sqrt(K)); the scale [K] starts at 0.

    So it starts as the usual 1 / sqrt(K) of queries and learns a factor per dim.
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        require_positive(self, dim=dim)
        self.per_dim_scale = self.weight((dim,), init=zeros, rngs=rngs)
        self.dim = dim

    def __call__(self, inputs: jax.Array) -> jax.Array:
        # 1 / softplus(0), with Pax's digits.
        scale = 1.442695041 / np.sqrt(self.dim) * jax.nn.softplus(self.per_dim_scale[...])
        return inputs * broadcast_as(scale, inputs)
