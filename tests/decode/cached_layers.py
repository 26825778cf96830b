"""Custom layers with a cache, none of which looks at padding."""

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite import layers
from praxis_lite.layers import BaseLayer


class Cached(BaseLayer):
    """A layer in attention's place whose cache every token changes, padding too."""

    def __init__(self, input_dim, num_heads=1, *, dim_per_head=None, rngs):
        self.w = self.weight((input_dim, input_dim), init=nnx.initializers.normal(1.0), rngs=rngs)

    def __call__(
        self, inputs, *, positions=None, segment_ids=None, paddings=None, key=None, cache=None
    ):
        start = self.init_cache(len(inputs), 16, inputs.dtype) if cache is None else cache
        new, outputs = jax.lax.scan(self.step, start, jnp.swapaxes(inputs @ self.w[...], 0, 1))
        return jnp.swapaxes(outputs, 0, 1), None if cache is None else new


class GatedConv(Cached):
    def init_cache(self, batch_size, max_seq_length, dtype):
        return {"window": jnp.zeros((batch_size, 3, self.w.shape[0]), dtype)}

    def step(self, cache, x):
        window = jnp.concatenate([cache["window"], x[:, None]], axis=1)
        taps = jnp.asarray([0.5, -1.0, 2.0, 1.0])
        return {"window": window[:, 1:]}, jnp.einsum("btd,t->bd", window, taps) * jax.nn.silu(x)


class MovingAverage(Cached):
    def init_cache(self, batch_size, max_seq_length, dtype):
        return {"mean": jnp.zeros((batch_size, self.w.shape[0]), dtype)}

    def step(self, cache, x):
        mean = 0.6 * cache["mean"] + 0.4 * x
        return {"mean": mean}, mean


class StateSpace(Cached):
    # The batch is not the first dim.
    def init_cache(self, batch_size, max_seq_length, dtype):
        return (jnp.zeros((4, self.w.shape[0], batch_size), dtype),)

    def step(self, cache, x):
        decay = jnp.asarray([0.3, 0.6, 0.9, 0.99])[:, None, None]
        state = decay * cache[0] + x.T[None]
        return (state,), jnp.tanh(jnp.einsum("sdb->bd", state))


class Mean(Cached):
    def init_cache(self, batch_size, max_seq_length, dtype):
        zeros = jnp.zeros((batch_size, self.w.shape[0]), dtype)
        return {"sum": zeros, "count": jnp.zeros((batch_size,), jnp.int32)}

    def step(self, cache, x):
        total, count = cache["sum"] + x, cache["count"] + 1
        return {"sum": total, "count": count}, total / count[:, None]


class Memory(Cached):
    """Attends to all entries of a memory that grows at its end."""

    def init_cache(self, batch_size, max_seq_length, dtype):
        shape = (batch_size, 16, self.w.shape[0])
        return {"entries": jnp.zeros(shape, dtype), "size": jnp.zeros((batch_size,), jnp.int32)}

    def step(self, cache, x):
        rows = jnp.arange(len(x))
        entries = cache["entries"].at[rows, cache["size"]].set(x)
        size = cache["size"] + 1
        logits = jnp.einsum("bsd,bd->bs", entries, x)
        logits = jnp.where(jnp.arange(16)[None] < size[:, None], logits, -1e9)
        outputs = jnp.einsum("bs,bsd->bd", jax.nn.softmax(logits), entries)
        return {"entries": entries, "size": size}, outputs


class Positions(Cached):
    """Adds sines of positions that it counts itself."""

    def init_cache(self, batch_size, max_seq_length, dtype):
        return {"position": jnp.zeros((batch_size,), jnp.int32)}

    def step(self, cache, x):
        angles = cache["position"][:, None] * jnp.linspace(0.2, 2.0, x.shape[1])[None]
        return {"position": cache["position"] + 1}, x * jnp.sin(angles)


class SharedCounter(Positions):
    """The same, with a count that the rows share: it cannot be right."""

    def init_cache(self, batch_size, max_seq_length, dtype):
        return {"position": jnp.zeros((), jnp.int32)}

    def step(self, cache, x):
        outputs = super().step({"position": cache["position"][None]}, x)[1]
        return {"position": cache["position"] + 1}, outputs


class ShiftedFeedForward(BaseLayer):
    """A feed-forward layer of a token and the one before."""

    def __init__(self, input_dims, hidden_dims, *, ln_tpl, rngs):
        self.w = self.weight((2 * input_dims, input_dims), rngs=rngs)

    def init_cache(self, batch_size, max_seq_length, dtype):
        return {"last": jnp.zeros((batch_size, 1, self.w.shape[1]), dtype)}

    def __call__(self, x, *, paddings=None, segment_ids=None, key=None, cache=None):
        last = jnp.zeros_like(x[:, :1]) if cache is None else cache["last"]
        before = jnp.concatenate([last, x[:, :-1]], axis=1)
        outputs = x + jnp.tanh(jnp.concatenate([before, x], axis=2) @ self.w[...])
        return outputs, None if cache is None else {"last": x[:, -1:]}


class Block(BaseLayer):
    """A block in a transformer's place, with attention and a moving average."""

    def __init__(self, input_dims, hidden_dims, num_heads, *, rngs, **settings):
        self.attention = layers.DotProductAttention(input_dims, num_heads, rngs=rngs)
        self.average = MovingAverage(input_dims, rngs=rngs)

    def init_cache(self, *sizes):
        return self.attention.init_cache(*sizes), self.average.init_cache(*sizes)

    def __call__(self, x, *, key=None, cache=None, positions=None, **inputs):
        attention, average = (None, None) if cache is None else cache
        y, attention = self.attention(x, cache=attention, positions=positions)
        z, average = self.average(x, cache=average)
        return x + y + z, None if cache is None else (attention, average)
