"""The real-gated linear recurrent unit (RG-LRU): a linear recurrence with gates, as a scan."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.layers.base.base_layer import BaseLayer, zeros
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dims import NONE, Matrix, splits

# B batch, T time, N heads (blocks of the gates), K dims per head.

# The paper's: a^C is drawn uniformly from this range, and C is the recurrence gate's strength.
_DECAY_RANGE = (0.9, 0.999)
_C = 8.0
# The least 1 - a^2 whose root is taken: bounds the root's gradient to 1000, which is infinite
# at a = 1. In float32 an `a` so near to 1 is 1.
_LEAST_SQUARE = 2.5e-7


def _draw_decay(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns Lambda such that sigmoid(Lambda)^C is uniform in the paper's range."""
    decay = jax.random.uniform(key, shape, dtype, *_DECAY_RANGE)
    log_a = jnp.log(decay) / _C
    return log_a - jnp.log(-jnp.expm1(log_a))


class RgLru(BaseLayer):
    """Returns h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t) of [B, T, N, K], and its last h.

    i_t and r_t are sigmoids of x_t under a block-diagonal weight, a_t = sigmoid(Lambda)^(C r_t),
    C = 8: De et al. 2024, arXiv:2402.19427, section 2.4. Computed in float32.

    Args:
      num_heads, dim_per_head: N blocks of K by K.
      weight_split_dims_mapping: of the gates' weights, [N, K, K]; Lambda and biases follow.
    """

    splits = splits(weight=(None, None, None))

    def __init__(
        self,
        num_heads: int,
        dim_per_head: int,
        *,
        rngs: nnx.Rngs,
    ):
        require_positive(self, num_heads=num_heads, dim_per_head=dim_per_head)
        # A plain size of inputs: two dims of a weight do not split alike.
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
        self.a_param = per_dim(_draw_decay)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        starts: jax.Array | None = None,
        skipped: jax.Array | None = None,
        h: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns h of every token, [B, T, N, K], and of the last, float32 [B, N, K].

        Args:
          inputs: [B, T, N, K].
          starts: bool [B, T], tokens before which h is forgotten.
          skipped: bool [B, T], tokens that leave h as it is.
          h: float32 [B, N, K], of what came before.
        """
        x = inputs.astype(jnp.float32)
        log_decay = -_C * jax.nn.softplus(-self.a_param[...])
        log_a = self._gate(x, self.a_gate_w, self.a_gate_b) * log_decay[None, None]
        variance = jnp.maximum(-jnp.expm1(2.0 * log_a), _LEAST_SQUARE)
        new = jnp.sqrt(variance) * self._gate(x, self.input_gate_w, self.input_gate_b) * x
        a = jnp.exp(log_a)
        if starts is not None:
            a = jnp.where(starts[:, :, None, None], 0.0, a)
        if skipped is not None:
            a = jnp.where(skipped[:, :, None, None], 1.0, a)
            new = jnp.where(skipped[:, :, None, None], 0.0, new)
        if h is not None:
            new = new.at[:, 0].add(a[:, 0] * h)
        _, h_BTNK = jax.lax.associative_scan(_one_after_the_other, (a, new), axis=1)
        return h_BTNK.astype(inputs.dtype), h_BTNK[:, -1]

    def _gate(self, x_BTNK: jax.Array, w: nnx.Param, b: nnx.Param) -> jax.Array:
        return jax.nn.sigmoid(jnp.einsum("btnk,nkl->btnl", x_BTNK, w[...]) + b[...][None, None])


def _one_after_the_other(first: tuple, second: tuple) -> tuple[jax.Array, jax.Array]:
    """Returns the linear map h -> a h + new that applies `first` and then `second`."""
    (a1, new1), (a2, new2) = first, second
    return a1 * a2, a2 * new1 + new2
