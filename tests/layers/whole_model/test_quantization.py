"""Rounded products against NumPy, in every dense layer, in a model that trains and decodes."""

import functools
import re
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.config.config_json import dump_config, load_config
from praxis_lite.core import Learner, MeshConfig, NnxModel, Partitioner, constrain, make_mesh
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.decode import Greedy
from praxis_lite.layers import (
    BaseLayer,
    QuantizationRule,
    lora,
    merge_adapters,
    quantized,
    quantized_einsum,
    rotary_lm,
    set_sharding_params,
)
from praxis_lite.layers.whole_model import quantization
from praxis_lite.layers.whole_model.rounded_products import RoundedProduct
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.support.float16 import needs_float16
from tests.support.lm_runs import (
    NUM_NEW_TOKENS,
    PROMPT_LENGTHS,
    SIZES,
    batches,
    on_host,
    prompts,
    structs,
    zero_padded,
)
from tests.support.marks import every, slow_but

pytest.importorskip("qwix", reason="Qwix is not installed: pip install qwix")

partial = functools.partial
QTYPES = [("int8", "int8"), ("float8_e4m3fn", "float8_e5m2")]


def draw(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rounded(x, qtype, kept_axes):
    """Returns integers or floats of few bits, in float32, and the scale that takes them back."""
    summed = tuple(i for i in range(x.ndim) if i not in kept_axes)
    most = 127 if qtype == "int8" else float(ml_dtypes.finfo(qtype).max)
    scale = (np.abs(x).max(axis=summed, keepdims=True) / np.float32(most)).astype(np.float32)
    if qtype == "int8":
        return np.round(x / scale), scale
    return (x / scale).astype(qtype).astype(np.float32), scale


def rounded_product(equation, a, a_type, b, b_type, scales="channel"):
    """Returns `einsum` of rounded factors, in float64, by hand."""
    (of_a, of_b), out = equation.split("->")[0].split(","), equation.split("->")[1]
    values = []
    for letters, x, qtype in ((of_a, a, a_type), (of_b, b, b_type)):
        kept = [i for i, c in enumerate(letters) if c in out and scales == "channel"]
        q, scale = rounded(x, qtype, kept)
        values.append(q.astype(np.float64) * scale)
    return np.einsum(equation, *values)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 6, 7))
def vjp(equation, qtype, bwd_qtype, x, w, g, scales="channel", num_devices=()):
    """Returns the product and the gradients of x and w, given its own."""
    y, backward = jax.vjp(
        lambda x, w: quantized_einsum(equation, qtype, bwd_qtype, x, w, scales, num_devices), x, w
    )
    return y, *backward(g)


@pytest.mark.parametrize(
    "qtypes", [QTYPES[0], pytest.param(QTYPES[1], marks=needs_float16)], ids=["int8", "float8"]
)
# Where devices sum parts, and 5 heads that 2 devices do not divide.
@pytest.mark.parametrize(
    ("scales", "num_devices"),
    [("tensor", ()), ("channel", (("b", 2), ("t", 13), ("d", 4), ("n", 2)))],
)
def test_products_and_gradients_are_of_rounded_factors_as_by_hand(qtypes, scales, num_devices):
    qtype, bwd_qtype = qtypes
    x, w, g = draw((8, 13, 36)), draw((36, 5, 3), 1), draw((8, 13, 5, 3), 2)
    equation = "btd,dnk->btnk"
    y, dx, dw = vjp(equation, qtype, bwd_qtype, x, w, g, scales, num_devices)
    expected = rounded_product(equation, x, qtype, w, qtype, scales)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    # Rounding shows, and is small.
    error = np.abs(y - np.einsum(equation, x, w)).max() / np.abs(y).max()
    assert 1e-4 < error < (0.02 if qtype == "int8" else 0.06)
    wanted_dx = rounded_product("btnk,dnk->btd", g, bwd_qtype, w, qtype, scales)
    wanted_dw = rounded_product("btnk,btd->dnk", g, bwd_qtype, x, qtype, scales)
    np.testing.assert_allclose(dx, wanted_dx, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, wanted_dw, rtol=1e-5, atol=1e-4)


def test_without_bwd_qtype_gradients_are_those_of_the_product_that_is_not_rounded():
    x, w, g = draw((7, 13)), draw((13, 5), 1), draw((7, 5), 2)
    _, *grads = vjp("bd,df->bf", "int8", None, x, w, g)
    for grad, expected in zip(grads, (g @ w.T, x.T @ g), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


def test_zeros_and_bfloat16_are_no_trouble():
    x, w = jnp.zeros((3, 5), jnp.bfloat16), draw((5, 7))
    g = jnp.zeros((3, 7), jnp.bfloat16)
    y, dx, dw = vjp("bd,df->bf", "int8", "int8", x, w, g)
    assert y.dtype == jnp.bfloat16 and not y.any()
    assert dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
    assert not dx.any() and not dw.any()


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_int8_products_have_the_same_bits_on_a_mesh_that_splits_what_is_summed(mesh_of, scales):
    x, w = draw((11, 7, 13)), draw((13, 29), 1)  # No axis divides these.

    @jax.jit
    def product(x, w):
        x, w = constrain(x, ("data", None, "mdl")), constrain(w, ("mdl", "data"))
        return quantized_einsum("btd,df->btf", "int8", "int8", x, w, scales)

    actual = []
    for shape in ((1, 1, 1), (1, 4, 2)):
        with jax.set_mesh(mesh_of(*shape)):
            actual.append(np.asarray(product(x, w)))
    np.testing.assert_array_equal(*actual)


PROJECTION = partial(layers.AttentionProjection, 13, 3, 5)
# What builds each dense layer, and the shape of its inputs.
DENSE_LAYERS = {
    "linear": (partial(layers.Linear, 13, 7), (2, 11, 13)),
    "einsum": (partial(layers.Einsum, "ebd,edf->ebf", (2, 13, 3), has_bias=True), (2, 11, 13)),
    "einsum_capitals": (partial(layers.Einsum, "...aB,aBc->...c", (13, 3, 5)), (2, 11, 13, 3)),
    "query": (PROJECTION, (2, 11, 13)),
    "query_flat": (
        partial(PROJECTION, attention_combine_dims=True, use_bias=False), (2, 11, 13)
    ),
    "post": (partial(PROJECTION, is_output_projection=True), (2, 11, 3, 5)),
    "post_nhd": (
        partial(PROJECTION, is_output_projection=True, use_nhd_shape=True), (2, 11, 3, 5)
    ),
    "one_head": (partial(layers.OneHeadedAttentionProjection, 13, 5), (2, 11, 13)),
    "combined_qkv": (partial(layers.CombinedQKVProjectionLayer, 13, 3, 5), (2, 11, 13)),
    "combined_qkv_flat": (
        partial(layers.CombinedQKVProjectionLayer, 13, 3, 5, attention_combine_dims=True),
        (2, 11, 13),
    ),
    "lora": (lora(partial(layers.Linear, 13, 7), rank=3), (2, 11, 13)),
}  # fmt: skip


def with_biases(layer):
    """Returns the layer with what starts as zeros drawn."""
    for path, node in nnx.iter_graph(layer):
        if isinstance(node, nnx.Param) and path[-1] in ("b", "lora_b"):
            node.set_value(jnp.asarray(draw(node.shape, 3)))
    return layer


def dots(text):
    """Returns the operand types of the products in StableHLO text."""
    pairs = re.findall(r"stablehlo.dot_general[^\n]*: \(tensor<([^>]*)>, tensor<([^>]*)>\)", text)
    return [tuple(item.rpartition("x")[2] for item in pair) for pair in pairs]


@pytest.mark.parametrize("name", every(2, DENSE_LAYERS))
def test_every_dense_layer_is_itself_but_for_the_rounding(name):
    build, shape = DENSE_LAYERS[name]
    x, rule = draw(shape), QuantizationRule("")
    plain = with_biases(build(rngs=nnx.Rngs(0)))
    layer = with_biases(quantized(model=build, rules=[rule], rngs=nnx.Rngs(0)))
    assert isinstance(layer, type(plain))
    jax.tree.map(np.testing.assert_array_equal, mdl_vars_of(layer), mdl_vars_of(plain))
    program = jax.jit(lambda x: (plain(x), layer(x))).lower(x)
    expected, actual = map(jax.tree.leaves, program.compile()(x))
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        error = np.abs(a - b).max() / np.abs(b).max()
        assert 1e-5 < error < 0.02
    # LoRA's two thin products stay as they are.
    num_plain = 5 if name == "lora" else 1
    assert sorted(dots(program.as_text())) == [("f32", "f32")] * num_plain + [("i8", "i8")]


def test_merged_adapters_are_rounded_too():
    build, shape = DENSE_LAYERS["lora"]
    layer = with_biases(quantized(model=build, rules=[QuantizationRule("")], rngs=nnx.Rngs(0)))
    x = draw(shape)
    merged = merge_adapters(layer)
    program = jax.jit(lambda x: (merged(x), layer(x))).lower(x)
    assert sorted(dots(program.as_text())) == [("f32", "f32")] * 2 + [("i8", "i8")] * 2
    actual, expected = program.compile()(x)
    np.testing.assert_allclose(actual, expected, atol=0.03 * np.abs(expected).max())


def test_layers_side_by_side_are_each_rounded_by_themselves():
    """As the stages of a pipeline are, under `jax.vmap`."""
    build = partial(
        quantized,
        model=partial(layers.Linear, 13, 7),
        rules=[QuantizationRule("", bwd_qtype="int8")],
    )
    x, model = draw((3, 11, 13)), NnxModel(build)
    stack = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 3))

    def of_one(mdl_vars, x):
        return jax.value_and_grad(lambda v: jnp.sum(jnp.sin(model.module(v)(x))))(mdl_vars)

    def one_by_one(stack, x):
        return jax.lax.map(lambda item: of_one(*item), (stack, x))

    actual, expected = jax.jit(lambda *args: (jax.vmap(of_one)(*args), one_by_one(*args)))(stack, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


def tiny_lm(rules, **settings):
    lm = set_sharding_params(
        rotary_lm(
            num_layers=2,
            stacked_transformer_tpl=fdl.Partial(layers.Repeat, checkpoint_policy="save_everything"),
            **{**SIZES["uneven"], **settings},
        )
    )
    return fdl.Partial(quantized, model=lm, rules=rules) if rules else lm


@functools.cache
def partitioner_of(rules, shape):
    task = LanguageModelTask(
        fdl.build(tiny_lm(rules)),
        Learner(optax.adamw, 1e-2, clip_gradient_norm_to_value=0.5),
        inputs_split_mapping={
            "map_1d": (("replica", "data"),), "map_2d": (("replica", "data"), None),
        },
        decoder=Greedy(max_decode_steps=NUM_NEW_TOKENS),
    )  # fmt: skip
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


@functools.cache
def initial():
    """Returns the first state, in NumPy, of the model that is not rounded."""
    partitioner = partitioner_of((), (1, 1, 1))
    return on_host(partitioner.layout, partitioner.init(partitioner.key(0)))


@functools.cache
def lowered(rules, shape):
    return partitioner_of(rules, shape).train_step.lower(structs(batches("uneven")[0]))


@functools.cache
def trained(rules, shape=(1, 1, 1), num_steps=20):
    """Returns losses and the state."""
    partitioner = partitioner_of(rules, shape)
    key, inputs, losses = partitioner.key(0), batches("uneven"), []
    padded = jax.tree.map(zero_padded, initial(), partitioner.layout.padded_shapes)
    state = jax.device_put(padded, partitioner.layout.shardings(partitioner.mesh))
    step = lowered(rules, shape).compile()
    for item in inputs[:num_steps]:
        state, outputs = step(state, partitioner.global_batch(item), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
    return losses, state


def in_all(qtype, bwd_qtype):
    return (QuantizationRule("", qtype, bwd_qtype),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "qtypes",
    [QTYPES[0], pytest.param(QTYPES[1], marks=(pytest.mark.nightly, needs_float16))],
    ids=["int8", "float8"],
)
def test_a_model_learns_as_fast_with_rounded_products(qtypes):
    plain, actual = trained(())[0], trained(in_all(*qtypes))[0]
    assert plain[-1] < plain[0] - 1.0
    np.testing.assert_allclose(actual, plain, rtol=0.01 if qtypes[0] == "int8" else 0.03)
    assert actual != plain


@pytest.mark.parametrize(
    ("qtypes", "prefix"),
    [
        (QTYPES[0], "i8"),
        pytest.param(QTYPES[1], "f8", marks=(pytest.mark.slow, needs_float16)),
    ],
    ids=["int8", "float8"],
)
def test_products_with_weights_run_in_few_bits_forward_and_backward_and_no_others(qtypes, prefix):
    # 7 with weights (4 of attention, 2 of the feed-forward, the logits), each with two in the
    # backward pass; attention's 2 products of activations, with two each, are left.
    of_types = dots(lowered(in_all(*qtypes), (1, 1, 1)).as_text())
    assert sum(all(item.startswith(prefix) for item in pair) for pair in of_types) == 21
    assert of_types.count(("f32", "f32")) == 6


@pytest.mark.slow
def test_a_mesh_that_nothing_divides_trains_as_one_device():
    rules = in_all(*QTYPES[0])
    losses, _ = trained(rules, (1, 4, 2), num_steps=6)
    # Sums of floats in another order, which a CPU chooses, tip a rounding to another integer
    # sooner or later: from the fifth step on with AVX512 and AMX.
    np.testing.assert_allclose(losses[:3], trained(rules)[0][:3], rtol=1e-5)
    assert dots(lowered(rules, (1, 4, 2)).as_text()).count(("i8", "i8")) == 21


@pytest.mark.slow
def test_decoding_with_a_cache_on_a_mesh_is_a_full_forward_pass_per_token():
    rules, shape = in_all(*QTYPES[0]), (1, 4, 2)
    partitioner, (_, state) = partitioner_of(rules, shape), trained(rules, shape, num_steps=6)
    outputs = partitioner.decode_step(
        state.mdl_vars, partitioner.global_batch(prompts()), partitioner.key(1)
    )
    new_ids = np.asarray(outputs["output_ids"])[:, 0, :NUM_NEW_TOKENS]
    ids = np.zeros((len(PROMPT_LENGTHS), 5 + NUM_NEW_TOKENS), np.int32)
    for row, length in enumerate(PROMPT_LENGTHS):
        ids[row, :length] = prompts()["ids"][row, :length]
        ids[row, length : length + NUM_NEW_TOKENS] = new_ids[row]
    model = NnxModel(fdl.build(tiny_lm(rules)))
    weights = on_host(partitioner.layout.select("mdl_vars"), state.mdl_vars)
    logits = np.asarray(jax.jit(lambda v, ids: model.module(v)(ids)[0])(weights, ids))
    for row, length in enumerate(PROMPT_LENGTHS):
        for i, chosen in enumerate(new_ids[row]):
            of_token = logits[row, length - 1 + i]
            assert of_token[chosen] > of_token.max() - 0.02


def test_the_first_rule_that_matches_counts_and_the_log_tells_what_is_left(caplog):
    rules = (
        QuantizationRule("softmax", qtype=None),
        QuantizationRule("transformer/.*self_attention/(query|key)", "float8_e4m3fn"),
        QuantizationRule("transformer"),
    )
    quantization.log_rounding.cache_clear()
    with caplog.at_level("INFO", logger="praxis_lite"):
        module = NnxModel(fdl.build(tiny_lm(rules))).abstract_module()
    blocks = module.transformer.blocks
    qtypes = {
        "query": blocks.self_attention.query, "post": blocks.self_attention.post,
        "ffn": blocks.ff_layer.ffn_layer1.linear, "softmax": module.softmax.logits_ffn.linear,
    }  # fmt: skip
    actual = {
        name: x.product.qtype if isinstance(x.product, RoundedProduct) else None
        for name, x in qtypes.items()
    }
    assert actual == {"query": "float8_e4m3fn", "post": "int8", "ffn": "int8", "softmax": None}
    assert "not rounded, because of a rule: softmax/logits_ffn/linear/w" in caplog.messages
    embedding = functools.partial(layers.Embedding, 5, 13)
    mixture = functools.partial(layers.TransformerFeedForwardMoe, 13, 7, num_experts=2)
    for build, left in ((embedding, "emb_var"), (mixture, "gate, wi_0, wo_0")):
        both = functools.partial(Both, build)
        with caplog.at_level("INFO", logger="praxis_lite"):
            quantized(model=both, rules=[QuantizationRule("")], rngs=nnx.Rngs(0))
        paths = ", ".join(f"other/{name}" for name in left.split(", "))
        assert f"not rounded, because not in a dense layer: {paths}" in caplog.messages


class Both(BaseLayer):
    def __init__(self, build, *, rngs):
        self.linear = layers.Linear(13, 7, rngs=rngs)
        self.other = build(rngs=rngs)


@pytest.mark.parametrize(
    "rules, message",
    [
        ([], r"quantized\.rules .*QuantizationRule"),
        ([QuantizationRule("linaer")], r"'linaer'.*linear/w\?"),
        ([QuantizationRule(""), QuantizationRule("linear")], "'linear'"),
        ([QuantizationRule("other")], "'other'"),
    ],
)  # fmt: skip
def test_a_rule_without_a_layer_is_an_error(rules, message):
    both = functools.partial(Both, functools.partial(layers.Embedding, 5, 13))
    with pytest.raises(ConfigError, match=message):
        quantized(model=both, rules=rules, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"qtype": "int7"}, r"qtype.*'int7'.*int[48]\?"),
        ({"bwd_qtype": "bfloat16"}, "bwd_qtype.*'bfloat16'"),
        ({"bwd_qtype": "float8_e5m2"}, "qtype.*'int8'.*bwd_qtype.*'float8_e5m2'"),
        ({"qtype": None, "bwd_qtype": "int8"}, "qtype.*None.*bwd_qtype.*'int8'"),
        ({"regex": "("}, r"'\('"),
        ({"scales": "tensors"}, r"scales.*'tensors'.*tensor\?"),
    ],
)
def test_ill_formed_rules_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationRule(**{"regex": "", **settings})


def test_a_chunked_softmax_says_that_its_weight_cannot_be_rounded():
    rules = (QuantizationRule(""),)
    softmax = fdl.Partial(layers.FullSoftmax, 37, 13, chunk_size=5)
    model = NnxModel(fdl.build(fdl.Partial(quantized, model=softmax, rules=rules)))

    def loss(mdl_vars):
        ids = jnp.zeros((3,), jnp.int32)
        return model.module(mdl_vars).compute_loss(jnp.ones((3, 13)), ids, jnp.ones((3,)))

    with pytest.raises(ConfigError, match='chunk_size.*None.*QuantizationRule.*"soft'):
        jax.eval_shape(loss, jax.eval_shape(model.init, jax.random.key(0)))


def test_a_rounded_model_is_written_to_a_jobs_config():
    config = tiny_lm((fdl.Config(QuantizationRule, "transformer", bwd_qtype="int8"),))
    config = fdl.Config(LanguageModelTask, model=config, learner=None)
    loaded = load_config(dump_config(config, "praxis_lite.experiments.lm.PyDocs")).config
    assert fdl.build(loaded.model).keywords["rules"] == (
        QuantizationRule("transformer", "int8", "int8"),
    )
    assert loaded == config


def test_without_qwix_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ConfigError, match=r"'praxis_lite\[quantization\]'"):
        quantized(model=DENSE_LAYERS["linear"][0], rules=[QuantizationRule("")], rngs=nnx.Rngs(0))


@pytest.mark.parametrize("bwd_qtype", slow_but({"int8"}, [None, "int8"]))
def test_gradients_of_weights_have_the_precision_of_activations(bwd_qtype):
    """So that devices sum half as many bytes, as of a product that is not rounded."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(7, 13)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(13, 37)), jnp.float32)

    def loss(w, x):
        product = quantized_einsum("bd,df->bf", "int8", bwd_qtype, x, w)
        return jnp.sum(jnp.sin(product.astype(jnp.float32)))

    # XLA may otherwise leave out a rounding that a cast back follows.
    exactly = {"xla_allow_excess_precision": False}
    grad_of = jax.jit(jax.grad(loss), compiler_options=exactly)
    grad = grad_of(w, x)
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, grad.astype(jnp.bfloat16).astype(jnp.float32))
    full = grad_of(w, x.astype(jnp.float32))
    assert not np.array_equal(full, full.astype(jnp.bfloat16).astype(jnp.float32))
