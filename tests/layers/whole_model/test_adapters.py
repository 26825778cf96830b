"""LoRA, DoRA: start as the base layer, learn alone, merge; in stacks, on meshes, in softmaxes."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.layers import BaseLayer, adapted, lora, merge_adapters
from praxis_lite.layers.base.variables import variables
from praxis_lite.layers.whole_model.adapters import ADAPTER_WEIGHTS
from tests.support.marks import slow_or_nightly

partial = functools.partial
PROJECTION = partial(layers.AttentionProjection, 5, 3, 4)
SPLIT_DNK = {"weight_split_dims_mapping": ("data", "mdl", None)}
# What builds the base layer, and the shape of its inputs.
CASES = {
    "linear": (partial(layers.Linear, 5, 7), (2, 3, 5)),
    "feed_forward": (partial(layers.FeedForward, 5, 7, activation="gelu"), (2, 3, 5)),
    "einsum_per_expert": (
        partial(layers.Einsum, "ebd,edf->ebf", (2, 5, 3), has_bias=True),
        (2, 4, 5),
    ),
    "einsum_into_heads": (partial(layers.Einsum, "...d,nkd->...nk", (2, 3, 5)), (2, 4, 5)),
    "query": (PROJECTION, (2, 3, 5)),
    "query_flat": (partial(PROJECTION, attention_combine_dims=True, use_bias=False), (2, 3, 5)),
    "post": (partial(PROJECTION, is_output_projection=True), (2, 3, 3, 4)),
    "post_nhd": (partial(PROJECTION, is_output_projection=True, use_nhd_shape=True), (2, 3, 3, 4)),
    "post_flat": (
        partial(PROJECTION, is_output_projection=True, attention_combine_dims=True, use_bias=False),
        (2, 3, 3, 4),
    ),
    "one_head": (partial(layers.OneHeadedAttentionProjection, 5, 4), (2, 3, 5)),
    "combined_qkv": (partial(layers.CombinedQKVProjectionLayer, 5, 3, 4), (2, 3, 5)),
    "combined_qkv_flat": (
        partial(layers.CombinedQKVProjectionLayer, 5, 3, 4, attention_combine_dims=True),
        (2, 3, 5),
    ),
}


def draw(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def draw_adapters(module):
    """Draws every lora_b and lora_m, which are zeros at first."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param) and path[-1] in ("lora_b", "lora_m"):
            node.set_value(jnp.asarray(draw(node.shape, seed=node.size)))
    return module


def params_of(module) -> dict:
    return mdl_vars_of(module)["params"]


@pytest.mark.parametrize(
    "name",
    slow_or_nightly(
        {"linear", "post"}, {"einsum_per_expert", "query_flat", "post_nhd", "combined_qkv"}, CASES
    ),
)
def test_begins_as_the_base_layer_and_merged_equals_adapted(name):
    build, shape = CASES[name]
    x, base = jnp.asarray(draw(shape)), build(rngs=nnx.Rngs(3))
    adapted_layers = [
        lora(build, rank=2, alpha=3.0, use_dora=use_dora)(rngs=nnx.Rngs(3))
        for use_dora in (False, True)
    ]
    of_base = jax.tree.leaves(base(x))
    for module in adapted_layers:
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(module(x)), of_base)

    merged_layers = [merge_adapters(draw_adapters(module)) for module in adapted_layers]
    for merged in merged_layers:
        assert type(merged) is type(base)
        assert jax.tree.structure(params_of(merged)) == jax.tree.structure(params_of(base))
    run = jax.jit(lambda layers: [jax.tree.leaves(layer(x)) for layer in layers])
    outputs = run([*adapted_layers, *merged_layers])
    for leaves, of_merged in zip(outputs[:2], outputs[2:], strict=True):
        for actual, expected, start in zip(leaves, of_merged, of_base, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)
            assert np.abs(actual - start).max() > 0.1
    # The modules themselves are as they were.
    for use_dora, module in enumerate(adapted_layers):
        names = {str(path[-1]) for path, _ in nnx.iter_graph(module) if path}
        assert set(ADAPTER_WEIGHTS[: 2 + use_dora]) < names


def test_a_linear_adds_its_product_times_alpha_over_rank():
    module = draw_adapters(lora(layers.Linear, rank=2, alpha=3.0)(5, 7, rngs=nnx.Rngs(0)))
    x = draw((4, 5))
    w, a, b = (np.asarray(p[...]) for p in (module.w, module.lora_a, module.lora_b))
    assert (a.shape, b.shape) == ((5, 2), (2, 7))
    np.testing.assert_allclose(module(x), x @ w + 1.5 * (x @ a) @ b, rtol=1e-5, atol=1e-5)
    half = module(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(np.float32), module(x), rtol=0.03, atol=0.1)


def test_the_product_of_the_two_is_never_made():
    module = lora(layers.Linear, rank=2)(50, 70, rngs=nnx.Rngs(0))
    jaxpr = str(jax.make_jaxpr(lambda x: module(x))(jnp.zeros((3, 50))))
    assert jaxpr.count("dot_general") == 3 and "f32[3,2]" in jaxpr
    assert jaxpr.count("f32[50,70]") == 1  # The weight.


def splits_of(build) -> dict:
    specs = spec_leaves(NnxModel(build).weight_specs())
    return {path.removeprefix("params/"): spec.split_dims_mapping for path, spec in specs}


def test_splits_come_from_the_base_weight_and_the_rank_is_whole():
    linear = partial(layers.Linear, 5, 7, weight_split_dims_mapping=("data", "mdl"))
    assert splits_of(lora(linear, rank=2)) == {
        "w": ("data", "mdl"),
        "lora_a": ("data", None),
        "lora_b": (None, "mdl"),
    }
    assert splits_of(lora(linear, rank=2, use_dora=True)) == {
        "w": ("data", "mdl"),
        "lora_a": ("data", None),
        "lora_b": (None, "mdl"),
        "lora_m": ("mdl",),
    }
    combined = partial(layers.CombinedQKVProjectionLayer, 5, 3, 4, use_bias=False, **SPLIT_DNK)
    for flat, split_N in ((False, "mdl"), (True, ("mdl",))):
        splits = splits_of(lora(partial(combined, attention_combine_dims=flat), rank=2))
        assert splits["lora_a"] == (None, "data", None)
        assert splits["lora_b"] == (None, None, split_N, None)
    post = partial(PROJECTION, is_output_projection=True, use_bias=False, **SPLIT_DNK)
    assert splits_of(lora(post, rank=2))["lora_a"] == ("mdl", None, None)


class Block(BaseLayer):
    """A residual feed-forward, for stacks."""

    def __init__(self, *, linear_tpl=layers.Linear, rngs):
        tpl = partial(layers.FeedForward, linear_tpl=linear_tpl, activation="tanh")
        self.first, self.second = tpl(5, 7, rngs=rngs), tpl(7, 5, rngs=rngs)

    def __call__(self, x, *, key=None, cache=None, **_):
        return x + self.second(self.first(x)), cache


ADAPTED_STACK = partial(layers.Repeat, lora(Block, rank=2), 3)


def test_layers_made_after_an_adapted_one_start_as_without_it():
    plain = Block(rngs=nnx.Rngs(0))
    module = Block(linear_tpl=lora(layers.Linear, rank=2), rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(module.second.linear.w[...], plain.second.linear.w[...])
    assert not np.allclose(module.first.linear.lora_a[...][0], module.second.linear.lora_a[...][0])


def test_only_the_named_layers_are_adapted():
    module = lora(Block, rank=2, only=("second",))(rngs=nnx.Rngs(0))
    assert hasattr(module.second.linear, "lora_a") and not hasattr(module.first.linear, "lora_a")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, only, adapted_layers",
    [
        ({}, ("query", "value"), {"query", "value"}),
        ({"combine_qkv": True}, None, {"combined_qkv", "post"}),
    ],
)
def test_attention_is_adapted_inside(options, only, adapted_layers):
    build = partial(layers.DotProductAttention, 8, 2, **options)
    module = draw_adapters(lora(build, rank=2, only=only)(rngs=nnx.Rngs(0)))
    paths = {path for path, _ in nnx.iter_graph(module) if path and path[-1] == "lora_a"}
    assert {path[0] for path in paths} == adapted_layers
    x = jnp.asarray(draw((2, 3, 8)))
    actual, expected = (layer(x)[0] for layer in (module, merge_adapters(module)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(actual - build(rngs=nnx.Rngs(0))(x)[0]).max() > 0.01


@pytest.mark.slow
def test_a_scanned_stack_is_adapted_per_layer_and_merges():
    stack = draw_adapters(ADAPTED_STACK(rngs=nnx.Rngs(0)))
    assert stack.blocks.first.linear.lora_a.shape == (3, 5, 2)
    merged, x = merge_adapters(stack), jnp.asarray(draw((2, 4, 5)))
    assert not {p for v in variables(merged) for p in ADAPTER_WEIGHTS if hasattr(v, p)}
    expected = layers.Repeat(Block, 3, rngs=nnx.Rngs(0))
    assert jax.tree.structure(params_of(merged)) == jax.tree.structure(params_of(expected))
    np.testing.assert_allclose(stack(x)[0], merged(x)[0], rtol=1e-5, atol=1e-5)
    assert np.abs(stack(x)[0] - expected(x)[0]).max() > 0.1


class PairsToOne(layers.Dense):
    """A dense layer of a user's own: [..., 2, 5] -> [..., 7], and a bias."""

    equation = "...pd,dfp->...f"
    kernel_shape = (5, 7, 2)

    def __init__(self, *, rngs):
        self.w = self.weight(self.kernel_shape, rngs=rngs)
        self.b = self.weight((7,), rngs=rngs, init=nnx.initializers.ones)


class PlainPairsToOne(PairsToOne):
    """The same, its weight a variable of Flax that says nothing."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.w = nnx.Param(self.w[...])


class Doubled(layers.Linear):
    def __call__(self, inputs):
        return inputs @ (self.w[...] * 2)


@pytest.mark.parametrize("layer", [PairsToOne, PlainPairsToOne])
def test_a_users_own_dense_layer_is_adapted_by_its_equation(layer):
    module = draw_adapters(lora(layer, rank=3, alpha=6.0)(rngs=nnx.Rngs(0)))
    x = draw((4, 2, 5))
    w, a, b = (np.asarray(p[...]) for p in (module.w, module.lora_a, module.lora_b))
    assert (a.shape, b.shape) == ((5, 2, 3), (3, 7))
    expected = np.einsum("npd,dfp->nf", x, w) + 2 * np.einsum("npd,dpr,rf->nf", x, a, b) + 1
    np.testing.assert_allclose(module(x), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_computes_in_another_way_than_its_base_is_not_adapted():
    with pytest.raises(ConfigError, match="Doubled"):
        lora(Doubled, rank=2)(5, 7, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_only_adapters_train_and_the_loss_falls():
    model = NnxModel(ADAPTED_STACK)
    params = first = model.init(jax.random.key(0))["params"]
    x = jnp.asarray(draw((16, 5)))
    target = jnp.asarray(draw((16, 5), seed=1))
    is_adapter = jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ADAPTER_WEIGHTS, params
    )
    is_frozen = jax.tree.map(lambda keep: not keep, is_adapter)
    optimizer = optax.chain(
        optax.masked(optax.adam(0.05), is_adapter), optax.masked(optax.set_to_zero(), is_frozen)
    )

    @jax.jit
    def step(params, state):
        def objective(params):
            outputs = model.module({"params": params, "non_trainable": {}})(x)[0]
            return jnp.mean(jnp.square(outputs - target))

        loss, grads = jax.value_and_grad(objective)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(40):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
    for (path, actual), start, adapter in zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(first),
        jax.tree.leaves(is_adapter),
        strict=True,
    ):
        assert np.array_equal(actual, start) == (not adapter), path


@pytest.mark.parametrize(
    ("chunk_size", "use_dora"),
    [
        (None, False),
        (4, True),
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(None, True, marks=pytest.mark.slow),
    ],
)
def test_a_softmax_is_adapted_in_logits_and_embeddings(chunk_size, use_dora):
    build = partial(layers.SharedEmbeddingSoftmax, 13, 5, chunk_size=chunk_size)
    adapted_tpl = lora(build, rank=2, alpha=1.0, use_dora=use_dora)
    module = draw_adapters(adapted_tpl(rngs=nnx.Rngs(0)))
    merged = merge_adapters(module)
    x, ids = jnp.asarray(draw((2, 3, 5))), jnp.array([[1, 12, 0], [3, 3, 7]])

    @jax.jit
    def run(module, x):
        def loss(x):
            return module.compute_loss(x, ids, jnp.ones((2, 3)))["avg_xent"]

        return *jax.value_and_grad(loss)(x), module.emb_lookup(ids), module(x)

    *actual, logits = run(module, x)
    *expected, logits_of_merged = run(merged, x)
    np.testing.assert_allclose(logits, logits_of_merged, atol=1e-4)
    for item, of_merged in zip(actual, expected, strict=True):
        np.testing.assert_allclose(item, of_merged, rtol=1e-5, atol=1e-5)


def test_an_experiment_configures_it():
    config = fdl.Partial(
        layers.FeedForward,
        5,
        7,
        linear_tpl=fdl.Partial(adapted, base_tpl=fdl.Partial(layers.Linear), rank=3),
    )
    config.linear_tpl.rank = 2
    module = fdl.build(config)(rngs=nnx.Rngs(0))
    assert module.linear.lora_a.shape == (5, 2)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: lora(layers.Linear, rank=0), r"lora\.rank.* 0;"),
        (lambda: lora(layers.Linear, rank=2.0), r"lora\.rank.*2\.0"),
        (
            lambda: lora(layers.Bias, rank=2)(5, rngs=nnx.Rngs(0)),
            "Bias;.*Linear.*Dense",
        ),
        (
            lambda: lora(Block, rank=2, only=("third",))(rngs=nnx.Rngs(0)),
            r"Block.*\('third',\)",
        ),
        (
            lambda: lora(lora(Block, rank=2, only=("first",)), rank=3)(rngs=nnx.Rngs(0)),
            "already an adapter in first/linear of Block.*only",
        ),
    ],
)
def test_a_wrong_setting_is_named(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_adapter_is_added_after_the_bias_to_the_bit():
    """Rounded once more in between: a job that was begun with this order goes on with it."""
    layer = lora(layers.AttentionProjection, rank=2)(7, 3, 5, use_bias=True, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    for name in ("w", "b", "lora_a", "lora_b"):
        weight = getattr(layer, name)
        weight.set_value(jnp.asarray(random.normal(size=weight.shape), jnp.float32))
    x = jnp.asarray(random.normal(size=(4, 7)), jnp.bfloat16)
    w, b, lora_a, lora_b = (
        getattr(layer, name)[...].astype(jnp.bfloat16) for name in ("w", "b", "lora_a", "lora_b")
    )
    base = jnp.einsum("bd,dnk->bnk", x, w)
    thin = jnp.einsum("br,rnk->bnk", jnp.einsum("bd,dr->br", x, lora_a), lora_b)
    np.testing.assert_array_equal(layer(x), base + b[None] + thin)
    assert np.any(layer(x) != base + thin + b[None])  # The order shows.
