"""A window's cache is a ring of its length: the same numbers as the whole sequence without one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.core import NnxModel
from praxis_lite.layers.attention.kv_cache import SPARE_PLACES, update_cache
from praxis_lite.layers.attention.masks import AttentionMask
from tests.layers.attention.test_attentions import ATTENTION, BIAS, random_params
from tests.support.marks import slow_or_nightly

partial = functools.partial
B, D, W = 3, 8, 5
R = W + SPARE_PLACES
# Of a first call's P tokens, rows have fewer than the ring holds, more, and all. Then come chunks
# of so many tokens; of the last of each chunk some are taken back.
P, PROMPTS = R + 9, np.array([3, R + 2, R + 9])
CHUNKS, TAKEN_BACK = (4, R + 3, SPARE_PLACES + 1), (0, 3, SPARE_PLACES)
T = P + sum(CHUNKS) + 6
VARIANTS = {
    "rotary_relative_bias": {
        "use_rotary_position_emb": True,
        "relative_bias_tpl": BIAS,
        "num_kv_heads": 2,
    },
    "multi_query_cap": {"num_kv_heads": 1, "atten_logit_cap": 1.5},
    "sinks": {"attention_sinks": True, "use_rotary_position_emb": True},
    "chunked": {"atten_kernel": "chunked", "atten_chunk_size": 4, "num_kv_heads": 2},
}


def decoded(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs [B, T, D] of the whole sequence, and those of calls with a cache."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    model = NnxModel(partial(ATTENTION, D, 4, window=W, **VARIANTS[name]))
    params = random_params(model, rng)

    @jax.jit
    def run(params, x):
        module = model.module({"params": params, "non_trainable": {}})
        whole = module(x)[0]
        cache = module.init_cache(B, T, jnp.float32)
        assert cache["key"].shape == (B, module.num_kv_heads, R, module.dim_per_head)
        # What a former sequence left in the rows is not seen.
        cache = jax.tree.map(lambda x: jnp.full_like(x, 7.0), cache)
        padded = np.arange(P) >= PROMPTS[:, None]
        prompt = jnp.where(padded[:, :, None], 9.0, x[:, :P])
        ys, cache = module(prompt, paddings=padded.astype(np.float32), cache=cache)
        actual = jnp.full_like(whole, jnp.nan).at[:, :P].set(ys)
        ends, rows = PROMPTS, np.arange(B)[:, None]
        for length, back in zip(CHUNKS, TAKEN_BACK, strict=True):
            at = ends[:, None] + np.arange(length)
            wrong = np.arange(length) >= length - back
            tokens = jnp.where(wrong[:, None], 5.0, x[rows, at])
            ys, cache = module(tokens, positions=jnp.asarray(at, jnp.int32), cache=cache)
            actual = actual.at[rows, at[:, ~wrong]].set(ys[:, ~wrong])
            ends = ends + length - back

        def step(cache, i):
            at = jnp.minimum(ends + i, T - 1)[:, None]  # A row that is done stays at its end.
            token = jnp.take_along_axis(x, at[:, :, None], axis=1)
            y, cache = module(token, positions=at, cache=cache)
            # Padding changes nothing, also where a token comes alone.
            noise, paddings = jnp.full_like(token, 3.0), jnp.ones((B, 1))
            later = at + SPARE_PLACES + 2
            _, cache = module(noise, positions=later, paddings=paddings, cache=cache)
            return cache, (y[:, 0], at[:, 0])

        _, (steps, at) = jax.lax.scan(step, cache, jnp.arange(T - ends.min()))
        return whole, actual.at[np.arange(B)[None, :], at].set(steps)

    return jax.device_get(run(params, x))


@pytest.mark.parametrize("name", slow_or_nightly((), {"rotary_relative_bias", "sinks"}, VARIANTS))
def test_a_ring_gives_what_the_whole_sequence_gives_at_every_position(name):
    whole, actual = decoded(name)
    assert np.abs(whole).max() > 0.1
    np.testing.assert_allclose(actual, whole, rtol=1e-5, atol=4e-6)


def test_a_ring_keeps_the_last_tokens_of_a_block_that_are_not_padding():
    length = R + 3
    starts, num_real = np.array([0, R + 7]), np.array([length, SPARE_PLACES + 2])
    rows = 1000.0 * np.arange(2)[:, None]  # The entry of a token is its row and position.
    slots, positions = np.arange(R), starts[:, None] + np.arange(length)
    before = rows + starts[:, None] - 1 - (starts[:, None] - 1 - slots) % R
    visible = np.arange(length) < num_real[:, None]

    @jax.jit
    def updated(old, new, positions, visible):
        mask = AttentionMask(W, 0, kv_visible_BS=visible)
        cache, kv = {"key": old[:, None, :, None]}, {"key": new[:, :, None, None]}
        update = update_cache(cache, kv, positions, mask, None, is_cross=False)
        return update.cache["key"][:, 0, :, 0]

    actual = updated(before, np.where(visible, rows + positions, -1.0), positions, visible)
    for row, end in enumerate(starts + num_real):
        assert {i: int(x) for i, x in enumerate(actual[row])} == {
            position % R: 1000 * row + position for position in range(end - R, end)
        }


def test_short_sequences_need_no_ring():
    module = NnxModel(partial(ATTENTION, D, 4, window=W)).abstract_module()
    cache = jax.eval_shape(lambda: module.init_cache(B, W + 2, jnp.float32))
    assert cache["key"].shape == (B, 4, W + 2, 2)
