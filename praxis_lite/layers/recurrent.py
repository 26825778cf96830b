"""Griffin's recurrent block, which can replace attention, and its RG-LRU recurrence."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.devices.axis_types import typed_as
from praxis_lite.core.sharding.split_dims import SplitDims, constrain
from praxis_lite.layers.attention.kv_cache import Cache
from praxis_lite.layers.attention.projections import AttentionProjection
from praxis_lite.layers.base.base_layer import BaseLayer, broadcast_as, zeros
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dims import HEAD_SPLITS, NONE, RESIDUAL, Matrix, SplitSetting, splits

# B batch, T time, D model dims, N heads (gate blocks), K dims per head, J taps.

# As in the paper, a^C is initialized uniformly in this range, where C is the strength of the
# recurrence gate.
_DECAY_RANGE = (0.9, 0.999)
_C = 8.0
# Lower bound for 1 - a^2. This bound limits the gradient of the square root, which is infinite at a
# = 1, to 1000. In float32, values of `a` this close to 1 are rounded to 1.
_LEAST_SQUARE = 2.5e-7


def _init_decay(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initializes Lambda such that sigmoid(Lambda)^C is uniform in the paper's range."""
    decay = jax.random.uniform(key, shape, dtype, *_DECAY_RANGE)
    log_a = jnp.log(decay) / _C
    return log_a - jnp.log(-jnp.expm1(log_a))


class RgLru(BaseLayer):
    """Computes h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t) for x [B, T, N, K], in float32.

    The gates i_t and r_t are sigmoids of x_t multiplied by block-diagonal weights. The decay a_t is
    sigmoid(Lambda)^(C r_t), where C is 8 (De et al. 2024, arXiv:2402.19427, section 2.4).

    Args:
      num_heads: N, the number of weight blocks.
      dim_per_head: K, the size of a block.
      weight_split_dims_mapping: Sharding of the gates' weights, [N, K, K]. Lambda and the biases
        are sharded accordingly.
    """

    splits = splits(weight=(None, None, None))

    def __init__(
        self,
        num_heads: int,
        dim_per_head: int,
        *,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, num_heads=num_heads, dim_per_head=dim_per_head)
        # The input dim has no name and is not sharded, because a mesh axis can shard only one dim.
        N, inner, K = self.dims(num_heads, int(dim_per_head), dim_per_head)
        init = jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0
        )

        def gate_weight() -> nnx.Param:
            return self.weight((N, inner, K), init=init, matrix=Matrix((1,), (2,)), rngs=rngs)

        def per_dim(init: Any) -> nnx.Param:
            return self.weight((N, K), init=init, matrix=NONE, rngs=rngs)

        self.input_gate_w, self.input_gate_b = gate_weight(), per_dim(zeros)
        self.a_gate_w, self.a_gate_b = gate_weight(), per_dim(zeros)
        self.a_param = per_dim(_init_decay)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        starts: jax.Array | None = None,
        skipped: jax.Array | None = None,
        h: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns h for every token, [B, T, N, K], and for the last token, float32 [B, N, K].

        Args:
          inputs: [B, T, N, K].
          starts: Bool [B, T]; True for tokens before which h is reset.
          skipped: Bool [B, T]; True for tokens that do not change h.
          h: Float32 [B, N, K]; the state after the preceding tokens, or None for zeros.
        """
        x = inputs.astype(jnp.float32)
        log_decay = -_C * jax.nn.softplus(-self.a_param[...])
        log_a = self._gate(x, self.a_gate_w, self.a_gate_b) * log_decay[None, None]
        # 1 - a^2. Multiplied by its root, new inputs keep the variance of h constant.
        variance = jnp.maximum(-jnp.expm1(2.0 * log_a), _LEAST_SQUARE)
        new = jnp.sqrt(variance) * self._gate(x, self.input_gate_w, self.input_gate_b) * x
        a = jnp.exp(log_a)
        # A decay of 0 resets h. A decay of 1, without a new input, keeps h.
        if starts is not None:
            a = jnp.where(starts[:, :, None, None], 0.0, a)
        if skipped is not None:
            a = jnp.where(skipped[:, :, None, None], 1.0, a)
            new = jnp.where(skipped[:, :, None, None], 0.0, new)
        # The scan starts from 0, so the previous h is added to the first input.
        if h is not None:
            new = new.at[:, 0].add(a[:, 0] * h)
        _, h_BTNK = jax.lax.associative_scan(_compose, (a, new), axis=1)
        return h_BTNK.astype(inputs.dtype), h_BTNK[:, -1]

    def _gate(self, x_BTNK: jax.Array, w: nnx.Param, b: nnx.Param) -> jax.Array:
        return jax.nn.sigmoid(jnp.einsum("btnk,nkl->btnl", x_BTNK, w[...]) + b[...][None, None])


def _compose(first: tuple, second: tuple) -> tuple[jax.Array, jax.Array]:
    """Composes two affine maps h -> a h + new, applying `first` before `second`."""
    (a1, new1), (a2, new2) = first, second
    return a1 * a2, a2 * new1 + new2


class CausalConv(BaseLayer):
    """Computes, per channel of x [B, T, N, K], the sum of w_j x_{t-j} over taps j, plus a bias."""

    splits = splits(weight=(None, None, None))

    def __init__(
        self,
        num_taps: int,
        num_heads: int,
        dim_per_head: int,
        *,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
    ):
        J, N, K = self.dims(num_taps, num_heads, dim_per_head)
        init = jax.nn.initializers.normal(num_taps**-0.5)
        self.w = self.weight((J, N, K), init=init, matrix=NONE, rngs=rngs)
        self.b = self.weight((N, K), init=zeros, matrix=NONE, rngs=rngs)
        self.num_taps = num_taps

    def __call__(
        self, x_BTNK: jax.Array, window: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        """Returns the convolved inputs, [B, T, N, K].

        Args:
          x_BTNK: Inputs.
          window: The preceding inputs, [B, J - 1, N, K].
          segments: Int [B, J - 1 + T], for window and inputs. Inputs from segments other than the
            output's segment are treated as zeros.
        """
        length, taps = x_BTNK.shape[1], self.num_taps
        window = typed_as(window.astype(x_BTNK.dtype), x_BTNK)
        x = jnp.concatenate([window, x_BTNK], axis=1)
        w = self.w[...][:, None, None]
        outputs = broadcast_as(self.b[...], x_BTNK)
        for j in range(taps):
            # Tap j reads the input j tokens earlier, unless it is in a different segment.
            first = taps - 1 - j
            past = x[:, first : first + length]
            if segments is not None and j:
                same = segments[:, first : first + length] == segments[:, taps - 1 :]
                past = jnp.where(same[:, :, None, None], past, 0.0)
            outputs += past * broadcast_as(w[j], past)
        return outputs


class RgLruBlock(BaseLayer):
    """Griffin's recurrent block, which mixes [B, T, D] along time; returns outputs and state.

    The inputs are projected twice. One projection passes through a causal convolution and an RgLru,
    the other through a GELU, and their product is projected back (De et al. 2024, arXiv:2402.19427,
    figure 2). The block takes the arguments of causal self-attention, so it can be used as
    `Transformer.tr_atten_tpl`. The size of its state does not depend on the sequence length. Time
    must not be sharded.

    Args:
      input_dim: D.
      num_heads: N, the number of blocks in the gates' weights.
      dim_per_head: K. If None, input_dim / num_heads. The recurrence has N * K dims.
      conv_width: Width of the convolution, including the current token.
      use_bias: Whether the three projections have biases.
      weight_split_dims_mapping: Sharding of the projections, [D, N, K]. In the weights of the
        convolution and the recurrence, N and K are sharded likewise.
      activation_split_dims_mapping: Sharding of activations between the projections, [B, T, N, K].
      output_split_dims_mapping: Sharding of the outputs, [B, T, D].
    """

    cache_skips_padding = True

    splits = HEAD_SPLITS | splits(output=RESIDUAL)
    output_split_dims_mapping: SplitDims

    def __init__(
        self,
        input_dim: int,
        num_heads: int,
        *,
        dim_per_head: int | None = None,
        conv_width: int = 4,
        use_bias: bool = True,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
        output_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, input_dim=input_dim, num_heads=num_heads, conv_width=conv_width)
        if dim_per_head is None:
            require(
                input_dim % num_heads == 0,
                "RgLruBlock.num_heads",
                num_heads,
                f"a divisor of input_dim {input_dim}",
                "Change num_heads, or set dim_per_head.",
            )
            dim_per_head = input_dim // num_heads
        require_positive(self, dim_per_head=dim_per_head)
        D, N, K = self.dims(input_dim, num_heads, dim_per_head)

        def projection(**kwargs: Any) -> AttentionProjection:
            return AttentionProjection(D, N, K, use_bias=use_bias, rngs=rngs, **kwargs)

        self.linear_x, self.linear_y = projection(), projection()
        self.conv = CausalConv(conv_width, N, K, rngs=rngs)
        self.rg_lru = RgLru(N, K, rngs=rngs)
        self.linear_out = projection(is_output_projection=True)
        self.num_heads, self.dim_per_head, self.conv_width = num_heads, dim_per_head, conv_width

    def init_cache(self, batch_size: int, max_seq_length: int, dtype: Any) -> Cache:
        """Returns an empty state: the convolution's last inputs, and h; [B, ..., N, K]."""
        width = (self.num_heads, self.dim_per_head)
        return {
            "window": jnp.zeros((batch_size, self.conv_width - 1, *width), dtype),
            "h": jnp.zeros((batch_size, *width), jnp.float32),
        }

    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        paddings: jax.Array | None = None,
        atten_mask: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the outputs [B, T, D] and, if there is a cache, the cache after these tokens.

        Args:
          inputs: [B, T, D].
          positions: Int [B or 1, T]. If None, 0 to T - 1. Only used with a cache: a row whose first
            position is 0 starts with an empty state.
          segment_ids: Int [B, T]. The state is reset where segments change; 0 marks padding.
          paddings: [B, T]; 1.0 for padding at the ends of a sequence. Padding does not change the
            state.
          atten_mask: Must be None; accepted for compatibility with attention layers.
          key: Unused; accepted for compatibility with attention layers.
          cache: State after the preceding tokens.

        Raises:
          ConfigError: An atten_mask is passed.
        """
        if atten_mask is not None:
            raise ConfigError(
                "RgLruBlock does not support an atten_mask, because a recurrence sees all earlier "
                "tokens. Omit the mask, or use attention."
            )
        batch, length = inputs.shape[:2]
        skipped = None if paddings is None else paddings > 0.5
        if segment_ids is not None:
            empty = segment_ids == 0
            skipped = empty if skipped is None else skipped | empty
        state = self.init_cache(batch, length, inputs.dtype) if cache is None else cache
        if cache is not None:
            # A new sequence may reuse a row that still contains the state of the previous sequence.
            first = jnp.zeros((1,), jnp.int32) if positions is None else positions[:, 0]
            continues = jnp.broadcast_to(first, (batch,)) > 0
            state = jax.tree.map(
                lambda x: jnp.where(continues.reshape(-1, *(1,) * (x.ndim - 1)), x, 0), state
            )
        x_BTNK = self._constrain(self.linear_x(inputs))
        if skipped is not None:
            x_BTNK = jnp.where(skipped[:, :, None, None], 0, x_BTNK)
        # Two branches: a convolution and the recurrence, and a gate that multiplies their outputs.
        starts, segments = _starts_and_segments(segment_ids, self.conv_width - 1)
        convolved = self._constrain(self.conv(x_BTNK, state["window"], segments))
        h_BTNK, last_h = self.rg_lru(
            convolved, starts=starts, skipped=skipped, h=None if cache is None else state["h"]
        )
        gated_BTNK = self._constrain(h_BTNK) * jax.nn.gelu(self._constrain(self.linear_y(inputs)))
        outputs = constrain(self.linear_out(gated_BTNK), self.output_split_dims_mapping)
        if cache is None:
            return outputs, None
        window = _window_after(state["window"], x_BTNK, skipped)
        return outputs, {"window": window, "h": last_h}

    def _constrain(self, x_BTNK: jax.Array) -> jax.Array:
        return constrain(x_BTNK, self.activation_split_dims_mapping)


def _starts_and_segments(
    segment_ids: jax.Array | None, before: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the starts of segments, bool [B, T], and the segment ids, int [B, before + T].

    The `before` tokens in the cache get the first token's segment, because a call with a cache
    continues the cached sequence.
    """
    if segment_ids is None:
        return None, None
    segments = jnp.concatenate([segment_ids[:, :1]] * before + [segment_ids], axis=1)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0))), segments


def _window_after(
    window_BJNK: jax.Array, x_BTNK: jax.Array, skipped: jax.Array | None
) -> jax.Array:
    """Returns the J - 1 inputs that end at each row's last unskipped token."""
    taps, length = window_BJNK.shape[1], x_BTNK.shape[1]
    x = jnp.concatenate([window_BJNK, x_BTNK.astype(window_BJNK.dtype)], axis=1)
    if skipped is None:
        return x[:, length:]
    ends_B = jnp.max(jnp.where(skipped, 0, 1 + jnp.arange(length)[None]), axis=1)
    ends_B = jnp.broadcast_to(ends_B, x_BTNK.shape[:1])  # All rows may share one row of paddings.
    return jax.vmap(lambda row, end: jax.lax.dynamic_slice_in_dim(row, end, taps))(x, ends_B)
