"""Hand-made cached models for tests of decoding: small enough to enumerate, fast to compile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# B batch, T time, V classes, D state dims, S positions of a cache.


class Recurrent:
    """Logits from a state that every token changes; padding must not change it.

    `table` makes it a Markov chain: [V, V] logits of the next token given the last.
    """

    def __init__(self, num_classes=11, dims=5, *, table=None, seed=0, scale=1.0):
        rng = np.random.default_rng(seed)
        self.num_classes, self.dims = num_classes, dims
        self.embedding = rng.normal(size=(num_classes, dims)).astype(np.float32)
        self.mixing = rng.normal(scale=0.7, size=(dims, dims)).astype(np.float32)
        self.softmax = rng.normal(scale=scale, size=(dims, num_classes)).astype(np.float32)
        self.table = table

    def init_cache(self, num_rows, length):
        # Batch last, and a leaf that the rows share: decode finds out.
        return {"state": jnp.zeros((self.dims, num_rows)), "num_calls": jnp.zeros((), jnp.int32)}

    def __call__(self, ids, *, positions=None, paddings=None, cache):
        if paddings is None:
            paddings = jnp.zeros(ids.shape)

        def step(state, inputs):
            token, padding = inputs
            new = jnp.tanh(state @ self.mixing + jnp.asarray(self.embedding)[token])
            state = jnp.where(padding[:, None] > 0, state, new)
            logits = state @ self.softmax if self.table is None else jnp.asarray(self.table)[token]
            return state, logits

        state, logits = jax.lax.scan(step, cache["state"].T, (ids.T, paddings.T))
        cache = {"state": state.T, "num_calls": cache["num_calls"] + 1}
        return logits.swapaxes(0, 1), cache


def logprobs_after(model, ids):
    """Returns float64 [V]: log-probs of the token after `ids`, computed anew in NumPy."""
    state = np.zeros(model.dims)
    for token in ids:
        mixed = state @ model.mixing.astype(np.float64)
        state = np.tanh(mixed + model.embedding[token])
    logits = state @ model.softmax if model.table is None else model.table[ids[-1]]
    logits = np.asarray(logits, np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def row_keys(num_rows, seed=0):
    """Returns a key per row, as the language-model task folds them."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(num_rows))


def num_compiled():
    """Returns how many programs this process has compiled since it first asked."""
    return _compilations().count("/jax/core/compile/backend_compile_duration")


@functools.cache
def _compilations():
    # Never unregistered: jax has no public way that leaves other listeners alone.
    names = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **kw: names.append(name))
    return names


class Summing:
    """Logits from the last token and a sum over all tokens so far, read out of a cache by position.

    What stands in the cache behind a token must not change it. `periodic` makes the texts repeat.
    """

    def __init__(self, num_classes=11, dims=5, *, seed=0, scale=1.0, periodic=0.0):
        rng = np.random.default_rng(seed)
        self.embedding = rng.normal(size=(num_classes, dims)).astype(np.float32)
        self.softmax = rng.normal(scale=scale, size=(dims, num_classes)).astype(np.float32)
        next_ids = rng.permutation(num_classes)
        self.table = periodic * np.eye(num_classes, dtype=np.float32)[next_ids]

    def init_cache(self, num_rows, length):
        return {"value": jnp.zeros((num_rows, length, self.embedding.shape[1]))}

    def __call__(self, ids, *, positions=None, paddings=None, cache):
        if positions is None:
            positions = jnp.arange(ids.shape[1])[None, :]
        positions_BT = jnp.broadcast_to(positions, ids.shape)
        new = jnp.asarray(self.embedding)[ids]
        rows = jnp.arange(len(ids))[:, None]
        value_BSD = cache["value"].at[rows, positions_BT].set(new)
        is_seen = jnp.arange(value_BSD.shape[1])[None, None, :] <= positions_BT[:, :, None]
        total_BTD = jnp.einsum("bsd,bts->btd", value_BSD, is_seen.astype(jnp.float32))
        logits = jnp.tanh(total_BTD) @ self.softmax + jnp.asarray(self.table)[ids]
        return logits, {"value": value_BSD}
