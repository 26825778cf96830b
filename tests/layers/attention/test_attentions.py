"""Attention's options against the real Pax, decoding against the whole sequence, and its maths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.layers.attention import masks as attention_masks
from tests.support.goldens import golden_arrays, pax_options
from tests.support.marks import slow_but

partial = functools.partial
ATTENTION = layers.DotProductAttention
BIAS = partial(
    layers.RelativeBias, relative_attention_num_buckets=8, relative_attention_max_distance=5
)

PAX = pax_options("attentions")


def call(module, x, **inputs):
    return module(x, **inputs)[0]


PAX_CASES = {
    "extra_logit": partial(ATTENTION, 8, 2, attention_extra_logit=0.5),
    "relative_bias_bidirectional": partial(
        ATTENTION,
        8,
        2,
        is_causal=False,
        atten_logit_cap=2.0,
        scale_logits_by_head_dims=True,
        relative_bias_tpl=partial(BIAS, bidirectional=True),
    ),
    "scale_query_by_dim_per_head": partial(
        ATTENTION,
        8,
        2,
        dim_per_head=6,
        internal_enable_per_dim_scale=False,
        scale_query_by_dim_per_head=True,
    ),
    "scale_query_by_hidden_dim": partial(
        ATTENTION, 8, 2, dim_per_head=6, internal_enable_per_dim_scale=False
    ),
    "combined_qkv_bias_nhd": partial(
        ATTENTION, 8, 2, combine_qkv=True, output_proj_use_nhd_shape=True
    ),
    "combine_dims": partial(
        ATTENTION,
        8,
        2,
        use_bias=False,
        output_proj_use_nhd_shape=True,
        proj_tpl=partial(layers.AttentionProjection, attention_combine_dims=True),
    ),
    "zero_fully_masked": partial(ATTENTION, 8, 2, is_causal=False, zero_fully_masked=True),
    "cross": partial(
        ATTENTION, {"query": 8, "key": 7, "value": 7}, 2, hidden_dim=8, is_cross_attention=True
    ),
    "qk_norm": partial(ATTENTION, 8, 2, use_rotary_position_emb=True, ln_tpl=layers.RmsNorm),
    "segments": partial(ATTENTION, 8, 2),
    "multi_query": partial(
        layers.MultiQueryDotProductAttention,
        8,
        4,
        dim_per_head=6,
        use_rotary_position_emb=True,
        atten_logit_cap=3.0,
    ),
    "grouped_multi_query": partial(
        layers.MultiQueryDotProductAttention,
        8,
        4,
        num_kv_heads=2,
        dim_per_head=6,
        scale_query_by_dim_per_head=True,
        attention_extra_logit=-0.3,
    ),
    "grouped_query": partial(
        layers.GroupedQueryAttention,
        8,
        4,
        num_kv_heads=2,
        dim_per_head=6,
        atten_temp=0.7,
        rope_min_max_timescales=(1, 100),
        atten_logit_cap=4.0,
    ),
    "local": partial(ATTENTION, 8, 2, is_causal=False, window=3, right_context=2),
}


QUICK = {
    "relative_bias_bidirectional",
    "combined_qkv_bias_nhd",
    "combine_dims",
    "zero_fully_masked",
    "cross",
    "segments",
    "grouped_multi_query",
    "grouped_query",
}


@functools.cache
def our_answers(is_quick: bool) -> dict[str, tuple]:
    """Returns outputs and gradients by case, from one program for quick cases or others."""

    def one(model, case):
        inputs = {name: a for name, a in case["in"].items() if name != "cotangent"}
        traced = {name: inputs[name] for name in case["gin"]}

        def objective(params, traced):
            module = model.module({"params": params, "non_trainable": {}})
            y = call(module, **{**inputs, **traced})
            return jnp.sum(y * case["in"]["cotangent"]), y

        params = nested(case["w"])
        abstract = jax.eval_shape(model.init, jax.random.key(0))["params"]
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, abstract)
        grads, y = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, traced)
        return y, *grads

    names = [name for name in PAX_CASES if (name in QUICK) == is_quick]

    def run(cases):
        return {name: one(NnxModel(PAX_CASES[name]), cases[name]) for name in names}

    return jax.device_get(jax.jit(run)({name: PAX[name] for name in names}))


def nested(flat: dict[str, np.ndarray]) -> dict:
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


@pytest.mark.parametrize("name", slow_but(QUICK, PAX_CASES))
def test_options_equal_pax(name):
    case, (y, grads, x_grads) = PAX[name], our_answers(name in QUICK)[name]
    np.testing.assert_allclose(y, case["out"]["y"], rtol=5e-5, atol=1e-5)
    actual, expected = jax.tree_util.tree_leaves_with_path(grads), nested(case["grad"])
    for (path, grad), pax in zip(actual, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(grad, pax, rtol=5e-5, atol=1e-5, err_msg=str(path))
    for path, pax in case["gin"].items():
        np.testing.assert_allclose(x_grads[path], pax, rtol=5e-5, atol=1e-5, err_msg=path)


def test_a_query_that_sees_nothing_gives_zeros_only_where_that_is_set():
    case = PAX["zero_fully_masked"]
    assert case["in"]["paddings"][0].all()  # So all that is left of row 0 is the output's bias.
    y = our_answers(True)["zero_fully_masked"][0]
    np.testing.assert_allclose(y[0], np.tile(case["w"]["post/b"], (6, 1)), atol=1e-6)


def test_relative_buckets_equal_pax():
    cases = PAX["relative_buckets"]
    # Pax's positions grow from query to key.
    positions = jnp.zeros((1, 1), jnp.int32), jnp.arange(-200, 201)[None, :]

    def bucket_numbers(name):
        buckets, max_distance, bidirectional = (int(part) for part in name.split("_"))
        layer = layers.RelativeBias(
            1,
            relative_attention_num_buckets=buckets,
            bidirectional=bool(bidirectional),
            relative_attention_max_distance=max_distance,
            rngs=nnx.Rngs(0),
        )
        layer.wrb.set_value(jnp.arange(buckets, dtype=jnp.float32)[None, :])
        return layer(*positions)[0, 0, 0]

    actual = jax.jit(lambda: {name: bucket_numbers(name) for name in cases})()
    for name, expected in cases.items():
        np.testing.assert_array_equal(actual[name], expected[""], err_msg=name)


def test_masks_are_pax():
    arrays = golden_arrays("pax/attention/masks.npz")
    segment_ids = jnp.asarray(arrays["in/segment_ids"])
    actual = jax.device_get(
        jax.jit(
            lambda: {
                "causal": attention_masks.causal_mask(6),
                "segment": attention_masks.segment_mask(segment_ids),
                "causal_segment": jnp.minimum(
                    attention_masks.segment_mask(segment_ids), attention_masks.causal_mask(6)
                ),
                "padding": attention_masks.convert_paddings_to_mask(arrays["in/paddings"]),
            }
        )()
    )
    for name, mask in actual.items():
        expected = arrays[f"out/{name}"]
        assert mask.shape == expected.shape and mask.dtype == jnp.float32
        np.testing.assert_array_equal(mask == 0, expected == 0, err_msg=name)
        assert (mask[expected != 0] < -1e38).all() and np.isfinite(mask).all()


VARIANTS = {
    "combined_qkv_extra_logit": {
        "combine_qkv": True,
        "internal_enable_per_dim_scale": False,
        "attention_extra_logit": 0.3,
    },
    "grouped": {
        "num_kv_heads": 2,
        "use_rotary_position_emb": True,
        "ln_tpl": layers.RmsNorm,
        "window": 3,
    },
    "multi_query_cap": {"num_kv_heads": 1, "atten_logit_cap": 1.5, "window": 2},
    "relative_bias": {
        "relative_bias_tpl": BIAS,
        "num_kv_heads": 2,
        "scale_logits_by_head_dims": True,
    },
    "chunked": {"atten_kernel": "chunked", "atten_chunk_size": 2, "window": 4, "num_kv_heads": 2},
    "zero_fully_masked": {"zero_fully_masked": True, "output_proj_use_nhd_shape": True},
    "cross_grouped": {
        "is_cross_attention": True,
        "num_kv_heads": 2,
        "use_rotary_position_emb": True,
        "relative_bias_tpl": partial(BIAS, bidirectional=True),
        "ln_tpl": layers.LayerNorm,
    },
    "cross_chunked": {
        "is_cross_attention": True,
        "atten_kernel": "chunked",
        "atten_chunk_size": 3,
        "zero_fully_masked": True,
    },
}
PROMPTS, B, T, S, D = np.array([3, 1, 2]), 3, 7, 5, 8


@functools.cache
def decoded() -> dict[str, tuple]:
    """Returns by variant what the whole sequence gives, and what cached calls give, [B, T, D]."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    encoded = rng.normal(size=(B, S, D)).astype(np.float32)
    encoded_paddings = (np.arange(S) >= np.array([[5], [2], [4]])).astype(np.float32)

    def one(model, params, x, encoded):
        module = model.module({"params": params, "non_trainable": {}})
        is_cross = module.is_cross_attention
        cross = {"encoded": encoded, "encoded_paddings": encoded_paddings} if is_cross else {}
        whole = module(x, **cross)[0]
        # Longer than what comes: the rest must stay unseen.
        lengths = {"encoded_length": S + 2} if is_cross else {}
        cache = module.init_cache(B, T + 2, jnp.float32, **lengths)
        paddings = (np.arange(3) >= PROMPTS[:, None]).astype(np.float32)
        prompt = jnp.where(paddings[:, :, None] > 0, 9.0, x[:, :3])
        prefix, cache = module(prompt, paddings=paddings, cache=cache, **cross)

        def step(cache, i):
            at = jnp.minimum(PROMPTS + i, T - 1)[:, None]  # A row that is done stays at its end.
            token = jnp.take_along_axis(x, at[:, :, None], axis=1)
            y, cache = module(token, positions=at, cache=cache)
            return cache, (y[:, 0], at[:, 0])

        _, (steps, at) = jax.lax.scan(step, cache, jnp.arange(T - 1))
        actual = jnp.zeros_like(whole).at[:, :3].set(prefix)
        return whole, actual.at[jnp.arange(B)[None, :], at].set(steps)

    models = {name: NnxModel(partial(ATTENTION, D, 4, **o)) for name, o in VARIANTS.items()}
    params = {name: random_params(model, rng) for name, model in models.items()}

    @jax.jit
    def run(params, x, encoded):
        return {name: one(model, params[name], x, encoded) for name, model in models.items()}

    return jax.device_get(run(params, x, encoded))


def random_params(model: NnxModel, rng: np.random.Generator) -> dict:
    return jax.tree.map(
        lambda w: rng.normal(scale=0.4, size=w.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0))["params"],
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_decode_equals_the_whole_sequence_at_every_position(name):
    whole, actual = decoded()[name]
    assert np.abs(whole).max() > 0.1
    np.testing.assert_allclose(actual, whole, rtol=1e-5, atol=2e-6)


def test_weights_are_drawn_with_pax_variances():
    D, N, K = 61, 7, 13
    of_fans = (
        layers.AttentionProjection,
        layers.CombinedQKVProjectionLayer,
        partial(layers.AttentionProjection, is_output_projection=True),
        partial(layers.AttentionProjection, is_output_projection=True, use_nhd_shape=True),
        partial(layers.AttentionProjection, use_bias=False, attention_combine_dims=True),
    )

    @jax.jit
    def draw():
        plain = ATTENTION(D, N, dim_per_head=K, rngs=nnx.Rngs(0))
        gshard = ATTENTION(
            D,
            N,
            dim_per_head=K,
            internal_gshard_gaussian_init=True,
            num_kv_heads=1,
            rngs=nnx.Rngs(0),
        )
        true_fans = [
            build(D, N, K, explicit_fan_in_fan_out_axes=True, rngs=nnx.Rngs(0)) for build in of_fans
        ]
        parts = (gshard.query, gshard.key, gshard.post)
        weights = plain.query.w[...], [x.w[...] for x in parts], [x.w[...] for x in true_fans]
        return jax.tree.map(jnp.std, weights)

    plain, gshard, true_fans = draw()
    # Uniform, with the fans of a convolution over [D, N, K]: Pax's default.
    assert plain == pytest.approx((2 / (D * N + D * K)) ** 0.5, rel=0.03)
    for actual, fan in zip(gshard, (D * K, D, N * K), strict=True):
        assert actual == pytest.approx(fan**-0.5, rel=0.05)
    for actual in true_fans:
        assert actual == pytest.approx((2 / (D + N * K)) ** 0.5, rel=0.03)


def test_attention_dropout_is_of_probabilities_and_needs_a_key():
    layer = ATTENTION(5, 1, atten_dropout_prob=0.4, is_causal=False, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 257, 5)).astype(np.float32)
    run = jax.jit(lambda x, key: (layer(x)[0], layer(x, key=key)[0]))
    (plain, item), (_, other) = (run(x, jax.random.key(i)) for i in range(2))
    assert (item != other).any()
    # Averages over 257 keys, of which 0.6 are kept: near what all of them give.
    assert 1e-3 < np.abs(item - plain).mean() < 0.1
    np.testing.assert_allclose(item.mean(axis=1), plain.mean(axis=1), atol=0.05)


def test_bfloat16_is_close_to_float32_and_used():
    layer = ATTENTION(
        8,
        4,
        num_kv_heads=2,
        window=3,
        use_rotary_position_emb=True,
        ln_tpl=layers.RmsNorm,
        relative_bias_tpl=BIAS,
        attention_extra_logit=0.2,
        rngs=nnx.Rngs(1),
    )
    x = np.random.default_rng(1).normal(size=(3, 7, 8)).astype(np.float32)
    whole, half = jax.jit(lambda x: (layer(x)[0], layer(x.astype(jnp.bfloat16))[0]))(x)
    assert half.dtype == jnp.bfloat16
    error = np.abs(half.astype(np.float32) - whole).max() / np.abs(whole).max()
    assert 1e-4 < error < 0.03


def test_logits_may_be_of_the_queries_dtype():
    x = jax.random.normal(jax.random.key(0), (2, 9, 8)).astype(jnp.bfloat16)
    outputs = {}
    for name in ("einsum", "auto"):
        for is_wide in (True, False):
            module = ATTENTION(8, 2, atten_kernel=name, float32_logits=is_wide, rngs=nnx.Rngs(0))
            traced = jax.jit(lambda x, module=module: module(x)[0]).trace(x)
            assert ("f32[2,2,9,9] = dot_general" in str(traced.jaxpr)) == is_wide
            if name == "einsum":
                outputs[is_wide] = np.asarray(traced.lower().compile()(x), np.float32)
    wide, narrow = outputs[True], outputs[False]
    assert 0 < np.abs(wide - narrow).max() < 0.02 * np.abs(wide).max()
    with pytest.raises(ConfigError, match="'chunked'.*float32_logits=False"):
        ATTENTION(8, 2, atten_kernel="chunked", float32_logits=False, rngs=nnx.Rngs(0))


def test_cross_attention_follows_segments_and_hides_padding():
    layer = ATTENTION(8, 2, is_cross_attention=True, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x, encoded = (rng.normal(size=(1, n, 8)).astype(np.float32) for n in (4, 5))
    hides_the_last = (
        {"encoded_segment_ids": jnp.array([[1, 1, 2, 2, 0]])},
        {"encoded_paddings": jnp.array([[0.0, 0.0, 0.0, 0.0, 1.0]])},
        {"atten_mask": jnp.array([0.0, 0.0, 0.0, 0.0, -3e38])[None, None, None]},
    )

    @jax.jit
    def run(x, encoded):
        by_segment = layer(
            x,
            encoded=encoded,
            segment_ids=jnp.array([[1, 1, 2, 2]]),
            encoded_segment_ids=jnp.array([[1, 1, 1, 2, 0]]),
        )[0]
        first = layer(x[:, :2], encoded=encoded[:, :3])[0]
        second = layer(x[:, 2:], encoded=encoded[:, 3:4])[0]
        without = layer(x, encoded=encoded[:, :4])[0]
        result = [layer(x, encoded=encoded, **hidden)[0] for hidden in hides_the_last]
        return by_segment, jnp.concatenate([first, second], axis=1), without, result

    by_segment, apart, without, actual = run(x, encoded)
    np.testing.assert_allclose(by_segment, apart, atol=1e-6)
    for item, hidden in zip(actual, hides_the_last, strict=True):
        np.testing.assert_allclose(item, without, atol=1e-6, err_msg=str(hidden))


WRONG_CALLS = {
    r"`encoded`.*\[B, S, D\]": lambda x: cross()(x),
    "requires encoded_length": lambda x: cross().init_cache(2, 3, jnp.float32),
    "is_causal=False": lambda x: ATTENTION(8, 2, is_causal=False, rngs=nnx.Rngs(0)).init_cache(
        2, 3, jnp.float32
    ),
    "combine_qkv": lambda x: ATTENTION(8, 2, combine_qkv=True, rngs=nnx.Rngs(0))(x, encoded=x),
    "is_causal.*True.*atten_mask.*is_causal": lambda x: ATTENTION(
        8, 2, is_causal=True, rngs=nnx.Rngs(0)
    )(x, atten_mask=jnp.zeros((1, 1, 3, 3))),
    "atten_mask.*bool.*LARGE_NEGATIVE": lambda x: self_attention()(
        x, atten_mask=jnp.ones((1, 1, 3, 3), bool)
    ),
    "encoded.* 1 .* 2": lambda x: cross()(x, encoded=x[:1]),
    "cache.*2.*init_cache": lambda x: cross()(
        x, encoded=x, cache=cross().init_cache(2, 3, jnp.float32, encoded_length=2)
    ),
    "cache .*is_cross_attention=True .*`encoded`": lambda x: self_attention()(
        x, encoded=x, cache=self_attention().init_cache(2, 3, jnp.float32)
    ),
}


def test_a_mask_of_the_callers_alone_says_what_is_seen_and_adds_nothing():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 7, 8)).astype(np.float32)
    # Not causal; what is seen has numbers of any size, down to -1e9.
    numbers = rng.choice([0.0, -1.5, 3.0, -1e9], size=(2, 1, 7, 7)).astype(np.float32)
    is_hidden = rng.random((2, 1, 7, 7)) < 0.4
    is_hidden[1, 0, 3] = True
    atten_mask = np.where(is_hidden, attention_masks.LARGE_NEGATIVE, numbers)
    layer = ATTENTION(8, 2, use_bias=False, rngs=nnx.Rngs(3))
    windowed = ATTENTION(8, 2, use_bias=False, window=3, rngs=nnx.Rngs(3))

    @jax.jit
    def run(x, atten_mask):
        def objective(atten_mask):
            y = layer(x, atten_mask=atten_mask)[0]
            return jnp.sum(y**2), y

        grad, y = jax.grad(objective, has_aux=True)(atten_mask)
        heads = [
            jnp.einsum("btd,dnk->btnk", x, item.w[...])
            for item in (layer.query, layer.key, layer.value, layer.post)
        ]
        scale = jax.nn.softplus(layer.per_dim_scale.per_dim_scale[...]) / jnp.log(2.0) / 2.0
        return grad, y, windowed(x, atten_mask=atten_mask)[0], heads, scale

    grad, y, y_windowed, (q, k, v, _), scale = jax.device_get(run(x, atten_mask))
    assert not grad.any()
    distance = np.subtract.outer(np.arange(7), np.arange(7))
    is_far = (distance < 0) | (distance >= 3)  # Pax's local attention keeps its window.
    for actual, hidden in ((y, is_hidden), (y_windowed, is_hidden | is_far)):
        logits = np.einsum("btnk,bsnk->bnts", q * scale, k).astype(np.float64)
        weights = np.exp(logits - logits.max()) * ~hidden
        weights = np.where(hidden.all(-1, keepdims=True), 1.0, weights)
        probs = weights / weights.sum(-1, keepdims=True)
        encoded = np.einsum("bnts,bsnk->btnk", probs, v)
        expected = np.einsum("btnk,dnk->btd", encoded, layer.post.w[...])
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_cache_is_split_as_keys_are_and_a_head_that_all_read_stays_whole(mesh_of):
    batch = ("replica", "data")
    heads = (batch, None, "mdl", None)

    def layer(**options):
        return ATTENTION(
            8, 4, dim_per_head=3, activation_split_dims_mapping=heads, rngs=nnx.Rngs(0), **options
        )

    assert layer(num_kv_heads=1).kv_split_dims_mapping == (batch, None, None, None)
    assert layer(num_kv_heads=2).kv_split_dims_mapping == heads
    local = (batch, None, None, "mdl")
    assert layer(num_kv_heads=2, kv_split_dims_mapping=local).kv_split_dims_mapping == local
    grouped = layer(num_kv_heads=2)
    with jax.set_mesh(mesh_of(1, 4, 2)):
        cache = jax.jit(lambda: grouped.init_cache(4, 5, jnp.float32))()
    assert cache["key"].sharding.shard_shape(cache["key"].shape) == (1, 1, 5, 3)


def cross():
    return ATTENTION(8, 2, is_cross_attention=True, rngs=nnx.Rngs(0))


def self_attention():
    return ATTENTION(8, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_a_wrong_call_is_a_config_error(message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(WRONG_CALLS[message], jnp.ones((2, 3, 8)))
