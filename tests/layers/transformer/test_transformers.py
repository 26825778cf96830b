"""Transformer blocks: the real Pax's numbers, meshes, stochastic depth, caches, wrong settings."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.layers import BaseLayer
from praxis_tools.check.asserts.layers import assert_near, drawn
from tests.support.goldens import pax_options
from tests.support.marks import slow_but
from tests.support.pax_options import flat, mdl_vars_from

partial = functools.partial
FFN = partial(layers.TransformerFeedForward, 4, 6)
BLOCK = partial(layers.Transformer, 4, 6, 2)
CROSS = partial(BLOCK, use_cross_attention=True)
NO_BIAS = partial(layers.DotProductAttention, use_bias=False)
POST = partial(BLOCK, norm_policy="post", tr_atten_tpl=NO_BIAS)
STACK = layers.StackedTransformer


def masked(x):
    """Returns Pax's causal mask, which its blocks are given."""
    return jnp.where(np.tril(np.ones((x.shape[1],) * 2)), 0.0, -0.7 * jnp.finfo("float32").max)


def feed(module, i):
    return module(i["x"], paddings=i["paddings"])


def block(module, i):
    return module(i["x"], paddings=i["paddings"], atten_mask=masked(i["x"])[None, None])[0]


def cross(module, i):
    return module(
        i["x"],
        paddings=i["paddings"],
        atten_mask=masked(i["x"])[None, None],
        encoded=i["encoded"],
        encoded_paddings=i["encoded_paddings"],
    )[0]


def stack(module, i):
    return module(i["x"], paddings=i["paddings"])[0]


def cross_stack(module, i):
    return module(
        i["x"],
        paddings=i["paddings"],
        encoded=i["encoded"],
        encoded_paddings=i["encoded_paddings"],
    )[0]


PAX = {
    "ffn_post_skip": (partial(FFN, norm_policy="post_skip"), feed),
    "ffn_primer_hybrid": (partial(FFN, norm_policy="primer_hybrid"), feed),
    "ffn_residual_weight": (partial(FFN, residual_weight=0.3), feed),
    "ffn_droppath": (
        partial(
            FFN,
            residual_weight=0.3,
            residual_droppath_prob=0.4,
            residual_dropout_prob=0.3,
            relu_dropout_prob=0.2,
        ),
        feed,
    ),
    "ffn_padding_first": (partial(FFN, apply_padding_first=True, norm_policy="post"), feed),
    "ffn_no_bias_gated": (
        partial(FFN, has_bias=False, use_gated_activation=True, activation="gelu"),
        feed,
    ),
    "ffn_output_dims": (partial(FFN, output_dims=3, add_skip_connection=False), feed),
    "ffn_rms": (partial(FFN, ln_tpl=layers.RmsNorm, activation="squared_relu"), feed),
    "block_post_skip": (partial(BLOCK, norm_policy="post_skip"), block),
    "block_droppath": (partial(BLOCK, residual_droppath_prob=0.4, atten_dropout_prob=0.1), block),
    "cross_pre": (CROSS, cross),
    "cross_post": (partial(CROSS, norm_policy="post"), cross),
    "cross_post_skip": (partial(CROSS, norm_policy="post_skip"), cross),
    "cross_primer_hybrid": (partial(CROSS, norm_policy="primer_hybrid"), cross),
    "cross_skipped": (BLOCK, cross),
    "cross_tpl": (
        partial(
            CROSS,
            dim_per_head=3,
            cross_atten_tpl=partial(NO_BIAS, internal_enable_per_dim_scale=False),
        ),
        cross,
    ),
    "stack_bidirectional": (partial(STACK, partial(BLOCK, mask_self_attention=False), 2), stack),
    "stack_pattern": (partial(STACK, [BLOCK, POST], 2), stack),
    "stack_repeated_pattern": (partial(layers.Repeat, partial(STACK, [BLOCK, POST], 2), 2), stack),
    "stack_cross": (partial(STACK, CROSS, 2), cross_stack),
}


def test_every_case_of_the_real_pax_is_compared():
    assert set(PAX) == set(pax_options("transformers")) - {""}


# Of each part of a block, and of a stack, one.
QUICK = {
    "ffn_droppath",
    "ffn_no_bias_gated",
    "block_droppath",
    "cross_post",
    "stack_pattern",
}


@functools.cache
def results_of_pax(is_quick: bool) -> dict[str, Any]:
    """Returns by case our outputs and gradients, from one program for quick cases or others."""
    numbers = pax_options("transformers")
    models = {
        name: NnxModel(build) for name, (build, _) in PAX.items() if (name in QUICK) == is_quick
    }

    def renamed(case):
        return {**case, "w": {p.replace("repeat/sub", "blocks"): w for p, w in case["w"].items()}}

    params = {
        name: mdl_vars_from(model, renamed(numbers[name]))["params"]
        for name, model in models.items()
    }

    @jax.jit
    def run(all_params, inputs):
        def one(name):
            def objective(params, wrt):
                module = models[name].module({"params": params, "non_trainable": {}})
                y = PAX[name][1](module, {**inputs, **wrt})
                return jnp.sum(y * jnp.cos(jnp.arange(float(y.size))).reshape(y.shape)), y

            wrt = {path: inputs[path] for path in numbers[name]["gin"]}
            grads, y = jax.grad(objective, argnums=(0, 1), has_aux=True)(all_params[name], wrt)
            return {"y": y, "grad": flat(grads[0]), "gin": grads[1]}

        return {name: one(name) for name in models}

    return jax.device_get(run(params, numbers[""]["in"]))


@pytest.mark.parametrize("name", slow_but(QUICK, PAX))
def test_outputs_and_gradients_equal_pax(name):
    case, actual = pax_options("transformers")[name], results_of_pax(name in QUICK)[name]
    assert_near(actual["y"], case["out"]["y"], tolerance=4e-6)
    assert_near(actual["gin"], case["gin"], tolerance=5e-6)
    expected = {path.replace("repeat/sub", "blocks"): grad for path, grad in case["grad"].items()}
    assert_near(actual["grad"], expected, tolerance=5e-6)


@pytest.mark.parametrize("policy", slow_but({"pre"}, ["pre", "post", "post_skip", "primer_hybrid"]))
def test_bfloat16_is_close_to_float32(policy):
    model = NnxModel(partial(layers.Transformer, 12, 17, 3, norm_policy=policy))
    mdl_vars = drawn(model, scale=0.2)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5, 12)), jnp.float32)
    run = jax.jit(lambda v, x: model.module(v)(x)[0])
    expected, actual = run(mdl_vars, x), run(mdl_vars, x.astype(jnp.bfloat16))
    assert actual.dtype == jnp.bfloat16
    error = np.abs(actual.astype(jnp.float32) - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 0.03


def test_a_dropped_path_leaves_a_row_as_it_is_and_the_others_are_scaled_up():
    prob, x = 0.3, jnp.asarray(np.random.default_rng(2).normal(size=(401, 2, 4)), jnp.float32)
    layer, plain = FFN(residual_droppath_prob=prob, rngs=nnx.Rngs(0)), FFN(rngs=nnx.Rngs(0))
    run = jax.jit(lambda x, key: (layer(x, key=key) - x, layer(x) - x, plain(x) - x))
    added, evaluated, always = run(x, jax.random.key(1))
    is_dropped = np.asarray(jnp.all(added == 0, axis=(1, 2)))
    # Standard error of the share: sqrt(0.3 * 0.7 / 401) = 0.023.
    assert is_dropped.mean() == pytest.approx(prob, abs=0.1)
    kept = ~is_dropped
    np.testing.assert_allclose(added[kept], always[kept] / (1.0 - prob), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(evaluated, always)


def test_every_dropout_of_a_block_has_its_own_key():
    seen = []

    class Recorder(BaseLayer):
        def __init__(self, *sizes, rngs, **settings):
            pass

        def __call__(self, x, *, key=None, cache=None, **inputs):
            seen.append(key)
            return x, cache

    class FeedForward(Recorder):
        def __call__(self, x, *, key=None, **inputs):
            seen.append(key)
            return x

    atten = partial(
        layers.Transformer,
        4,
        6,
        2,
        tr_atten_tpl=Recorder,
        tr_fflayer_tpl=FeedForward,
        use_cross_attention=True,
    )
    stack = STACK(atten, 3, rngs=nnx.Rngs(0))
    stack(jnp.ones((1, 2, 4)), encoded=jnp.ones((1, 2, 4)), key=jax.random.key(0))
    assert len({tuple(jax.random.key_data(key).tolist()) for key in seen}) == 9


def test_cross_attention_reads_its_cache_where_encoded_is_not_given_again():
    rng = np.random.default_rng(4)
    x, encoded = (jnp.asarray(rng.normal(size=(2, t, 6)), jnp.float32) for t in (5, 3))
    model = NnxModel(partial(layers.Transformer, 6, 11, 3, use_cross_attention=True))
    params = drawn(model)
    hidden = jnp.asarray([[0, 0, 1], [0, 0, 0]], jnp.float32)
    inputs = {"encoded": encoded, "encoded_paddings": hidden}

    @jax.jit
    def run(params):
        module = model.module(params)
        whole, _ = module(x, **inputs)
        cache = module.init_cache(2, 5, jnp.float32, encoded_length=3)
        outputs = []
        for t in range(5):
            given = inputs if t == 0 else {}
            y, cache = module(x[:, t : t + 1], positions=jnp.full((2, 1), t), cache=cache, **given)
            outputs.append(y)
        return whole, jnp.concatenate(outputs, axis=1)

    whole, stepwise = run(params)
    np.testing.assert_allclose(stepwise, whole, rtol=1e-5, atol=2e-6)


def test_what_is_encoded_may_be_left_out_where_the_block_allows_it():
    x = jnp.ones((1, 2, 4))

    def shape_of(**settings):
        return jax.eval_shape(lambda: CROSS(**settings, rngs=nnx.Rngs(0))(x)[0]).shape

    with pytest.raises(ConfigError, match="use_cross_attention.*allow_skip"):
        shape_of()
    assert shape_of(allow_skip_cross_attention=True) == x.shape


def test_a_layer_with_a_cache_that_returns_none_is_named():
    class Cached(layers.TransformerFeedForward):
        def init_cache(self, *args, **kwargs):
            return {}

        def __call__(self, x, *, cache=None, **inputs):
            return super().__call__(x, **inputs)

    block = layers.Transformer(4, 6, 2, tr_fflayer_tpl=Cached, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"Cached has an init_cache.*Return \(outputs, cache\)"):
        jax.eval_shape(block, jnp.ones((1, 3, 4)))


def test_a_mask_of_the_callers_alone_says_what_a_block_sees():
    x = jnp.asarray(np.random.default_rng(6).normal(size=(1, 5, 4)), jnp.float32)
    sees_all = jnp.zeros((1, 1, 5, 5))

    @jax.jit
    def run(x):
        block = BLOCK(rngs=nnx.Rngs(0))
        bidirectional = BLOCK(mask_self_attention=False, rngs=nnx.Rngs(0))
        return (
            block(x)[0],
            block(x, atten_mask=masked(x)[None, None])[0],
            block(x, atten_mask=sees_all)[0],
            bidirectional(x)[0],
        )

    causal, causal_by_mask, by_mask, bidirectional = run(x)
    np.testing.assert_allclose(causal_by_mask, causal, atol=1e-6)
    np.testing.assert_allclose(by_mask, bidirectional, atol=1e-6)
    assert np.abs(causal - bidirectional).max() > 0.01


WRONG = {
    r"Transformer\.mask_self_attention.*True.*atten_mask": lambda r: BLOCK(
        mask_self_attention=True, rngs=r
    )(jnp.ones((1, 2, 4)), atten_mask=jnp.zeros((1, 1, 2, 2))),
    r"TransformerFeedForward\.norm_policy.*'prenorm'.*pre\?": lambda r: FFN(
        norm_policy="prenorm", rngs=r
    ),
    r"Transformer\.norm_policy.*'postskip'.*post_skip": lambda r: BLOCK(
        norm_policy="postskip", rngs=r
    ),
    r"TransformerFeedForward\.output_dims.*3.*4.*add_skip_connection=False": lambda r: FFN(
        output_dims=3, rngs=r
    ),
    "residual_droppath_prob.*add_skip_connection=False": lambda r: FFN(
        add_skip_connection=False, residual_droppath_prob=0.1, rngs=r
    ),
    r"StochasticResidual\.survival_prob.*0\.0.*residual_droppath_prob < 1": lambda r: BLOCK(
        residual_droppath_prob=1.0, rngs=r
    ),
    r"StackedTransformer\.num_layers.*3.*2": lambda r: STACK([BLOCK, BLOCK], 3, rngs=r),
    r"StackedTransformer\.checkpoint_policy.*'save_dots'.*save_dot": lambda r: STACK(
        BLOCK, 3, remat=True, checkpoint_policy="save_dots", rngs=r
    ),
    r"StackedTransformer\.residual_droppath_prob.*1\.5": lambda r: STACK(
        BLOCK, 3, residual_droppath_prob=1.5, rngs=r
    ),
    r"StackedTransformer\.num_layers.*0": lambda r: STACK(BLOCK, 0, rngs=r),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: WRONG[message](nnx.Rngs(0)))
