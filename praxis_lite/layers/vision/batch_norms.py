"""Batch norm and group norm, with Pax's names and numerics.

On a mesh, statistics are computed over the global batch.
"""

import abc
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.base.base_layer import Initializer, zeros
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dims import NONE, SplitSetting, split_of, splits
from praxis_lite.layers.normalizations import Norm, check_epsilon

# B batch, T time, C channels, G groups.


class _PaddedNorm(Norm):
    """Base class: normalizes inputs, scales by 1 + gamma, adds beta, and can zero padding.

    Raises:
      ConfigError: The shape of `paddings` does not match the leading dims of the inputs.
    """

    splits = splits(weight=(None,), activation=())

    set_padded_output_to_zero: bool
    gamma: nnx.Param | None
    beta: nnx.Param | None

    def __call__(
        self,
        inputs: jax.Array,
        paddings: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        rank, is_true = inputs.ndim, None
        if paddings is not None:
            if paddings.ndim >= rank or paddings.shape != inputs.shape[: paddings.ndim]:
                raise ConfigError(
                    f"{type(self).__name__}: paddings have shape {paddings.shape}, but inputs have "
                    f"shape {inputs.shape}. Pass paddings that match the leading dims of the "
                    "inputs, without channels."
                )
            is_true = 1.0 - paddings.reshape(paddings.shape + (1,) * (rank - paddings.ndim))
        outputs = self._normalized(inputs.astype(jnp.float32), is_true, key)
        gamma, beta = self._scale_and_bias()
        if gamma is not None:
            outputs *= 1.0 + gamma[...].reshape((1,) * (rank - 1) + (-1,))
        if beta is not None:
            outputs += beta[...].reshape((1,) * (rank - 1) + (-1,))
        if is_true is not None and self.set_padded_output_to_zero:
            outputs *= is_true
        return constrain(outputs.astype(inputs.dtype), self.activation_split_dims_mapping)

    @abc.abstractmethod
    def _normalized(
        self, x: jax.Array, is_true: jax.Array | None, key: jax.Array | None
    ) -> jax.Array:
        """Returns the float32 inputs normalized, without scale and bias."""

    def _scale_and_bias(self) -> tuple[nnx.Param | None, nnx.Param | None]:
        return self.gamma, self.beta


def _moments(
    x: jax.Array, is_true: jax.Array | None, dims: Sequence[int], cumulative_dim: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance over `dims`, ignoring padding; `dims` are kept with size 1.

    With a cumulative_dim, both are running statistics: the statistics at an index along this dim
    cover all indices up to that index. As in Pax, the running variance uses the deviations from
    each index's running mean.
    """
    if is_true is None:
        is_true = jnp.ones((1,) * x.ndim, x.dtype)

    def total(values: jax.Array) -> jax.Array:
        sums = jnp.sum(values * is_true, axis=tuple(dims), keepdims=True)
        return sums if cumulative_dim is None else jnp.cumsum(sums, axis=cumulative_dim)

    count = jnp.maximum(total(jnp.ones_like(x)), 1.0)  # If there is only padding, the mean is 0.
    mean = total(x) / count
    return mean, total(jnp.square(x - mean)) / count


class BatchNorm(_PaddedNorm):
    """Computes `(x - mean) / sqrt(variance + epsilon) * (1 + gamma) + beta` for x [..., dim].

    In training (if a key is passed), the statistics are computed over all dims of the batch except
    the last, and update the moving averages. Otherwise the moving averages are used. The averages
    are `nnx.BatchStat` variables, which are saved with the model but not trained. Statistics are
    float32. Ioffe and Szegedy 2015, arXiv:1502.03167.

    Args:
      decay: Decay of the moving averages: the weight of the previous average in an update.
      epsilon: Added to the variance; always 0.001 in Pax.
      use_moving_avg_in_training: Whether to normalize by the updated moving averages in training as
        well, without beta and gamma.
      set_padded_output_to_zero: Whether to set outputs to 0 where `paddings` are 1.
      force_eval_mode: Whether to always use the moving averages and never update them. Beta and
        gamma are still trained.
      gamma_init: Initializer of gamma, which is stored as scale - 1, so that weight decay pulls the
        scale towards 1.
      weight_split_dims_mapping: Sharding of beta, gamma and the moving averages, [dim].
    """

    couples_rows = "batch statistics"

    def __init__(
        self,
        dim: int,
        *,
        decay: float = 0.999,
        epsilon: float = 0.001,
        use_moving_avg_in_training: bool = False,
        set_padded_output_to_zero: bool = True,
        force_eval_mode: bool = False,
        gamma_init: Initializer = zeros,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, dim=dim)
        check_epsilon(self, epsilon)
        require(0.0 <= decay <= 1.0, "BatchNorm.decay", decay, "0 <= decay <= 1")
        dims = self.dims(dim)
        self.beta = self.weight(dims, init=zeros, rngs=rngs)
        self.gamma = self.weight(dims, init=gamma_init, rngs=rngs)
        split = split_of(dims)
        self.moving_mean = nnx.BatchStat(jnp.zeros((dim,)), split_dims_mapping=split)
        self.moving_variance = nnx.BatchStat(jnp.ones((dim,)), split_dims_mapping=split)
        self.decay, self.epsilon = decay, epsilon
        self.use_moving_avg_in_training = use_moving_avg_in_training
        self.set_padded_output_to_zero = set_padded_output_to_zero
        self.force_eval_mode = force_eval_mode

    def _normalized(
        self, x: jax.Array, is_true: jax.Array | None, key: jax.Array | None
    ) -> jax.Array:
        averages = (self.moving_mean, self.moving_variance)
        moments = [average[...] for average in averages]
        if key is not None and not self.force_eval_mode:
            of_batch = [m.reshape(-1) for m in _moments(x, is_true, range(x.ndim - 1))]
            moved = [
                old * self.decay + new * (1.0 - self.decay)
                for old, new in zip(moments, of_batch, strict=True)
            ]
            for average, value in zip(averages, moved, strict=True):
                average.set_value(value)
            moments = moved if self.use_moving_avg_in_training else of_batch
        mean, variance = moments
        return _standardized(x, mean, variance, self.epsilon)

    def _scale_and_bias(self) -> tuple[nnx.Param | None, nnx.Param | None]:
        return (None, None) if self.use_moving_avg_in_training else (self.gamma, self.beta)


def _standardized(x: jax.Array, mean: jax.Array, variance: jax.Array, epsilon: float) -> jax.Array:
    lead = (1,) * (x.ndim - mean.ndim)
    scale = jax.lax.rsqrt(variance + epsilon)
    return (x - mean.reshape(lead + mean.shape)) * scale.reshape(lead + scale.shape)


class GroupNorm(_PaddedNorm):
    """Normalizes groups of channels per example, scales by 1 + gamma and adds beta.

    Outputs have the shape of the inputs, [B, ..., dim]. Statistics are computed in float32 for each
    example and group of channels, over all positions. Wu and He 2018, arXiv:1803.08494.

    Args:
      num_groups: Number of groups. If there are fewer channels than groups, each group has
        `min_group_size` channels instead.
      min_group_size: Minimum number of channels per group.
      cumulative: Whether the statistics at each time, dim 1, cover only this and earlier times.
      input_rank: Rank of the inputs: 3 for [B, T, C], 4 for [B, H, W, C] or 5 for [B, T, H, W, C].
        As in Pax, beta and gamma also have this rank, [1, ..., 1, C].
      set_padded_output_to_zero: Whether to set outputs to 0 where `paddings` are 1.
      use_scale: Whether to use gamma.
      use_bias: Whether to use beta.
      weight_split_dims_mapping: Sharding of beta and gamma along channels, [dim].

    Raises:
      ConfigError: The number of channels is not divisible by the number of groups, or the rank of
        the inputs is not input_rank.
    """

    def __init__(
        self,
        dim: int,
        *,
        input_rank: int,
        num_groups: int = 32,
        min_group_size: int = 1,
        cumulative: bool = False,
        epsilon: float = 0.001,
        set_padded_output_to_zero: bool = True,
        use_scale: bool = True,
        use_bias: bool = True,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, dim=dim, num_groups=num_groups, min_group_size=min_group_size)
        check_epsilon(self, epsilon)
        ranks = "3 for [B, T, C], 4 for [B, H, W, C] or 5 for [B, T, H, W, C]"
        require(input_rank in (3, 4, 5), "GroupNorm.input_rank", input_rank, ranks)
        divisor = f"a divisor of the number of channels {dim}"
        require(dim % min_group_size == 0, "GroupNorm.min_group_size", min_group_size, divisor)
        divides = dim < num_groups or dim % num_groups == 0
        require(divides, "GroupNorm.num_groups", num_groups, divisor)
        self.group_size = max(dim // num_groups, min_group_size)
        dims = (*(1,) * (input_rank - 1), *self.dims(dim))
        weight = functools.partial(self.weight, dims, init=zeros, matrix=NONE, rngs=rngs)
        self.beta = weight() if use_bias else None
        self.gamma = weight() if use_scale else None
        self.input_rank, self.epsilon, self.cumulative = input_rank, epsilon, cumulative
        self.set_padded_output_to_zero = set_padded_output_to_zero

    def _normalized(
        self, x: jax.Array, is_true: jax.Array | None, key: jax.Array | None
    ) -> jax.Array:
        if x.ndim != self.input_rank:
            raise ConfigError(
                f"GroupNorm.input_rank is {self.input_rank}, but inputs have shape {x.shape}. Set "
                f"input_rank={x.ndim}."
            )
        grouped = x.reshape(*x.shape[:-1], -1, self.group_size)
        # All dims except the batch, the groups and, if cumulative, time.
        dims = (*range(2 if self.cumulative else 1, x.ndim - 1), x.ndim)
        is_true = None if is_true is None else is_true[..., None]
        moments = _moments(grouped, is_true, dims, cumulative_dim=1 if self.cumulative else None)
        return _standardized(grouped, *moments, self.epsilon).reshape(x.shape)
