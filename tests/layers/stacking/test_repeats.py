"""A scanned stack and an unrolled one are the same layers: outputs, gradients, training."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import Learner, NnxModel
from praxis_lite.core.jaxprs import all_eqns
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.layers import (
    AuxLoss,
    BaseLayer,
    DotProductAttention,
    FeedForward,
    Repeat,
    StackedTransformer,
    Summary,
    Transformer,
    TransformerLm,
    intermediates,
)
from praxis_lite.layers.stacking import repeats
from praxis_lite.layers.stacking.remat_policies import CHECKPOINT_POLICIES, SAVED_NAMES
from praxis_lite.tasks.image_classification import ClassificationTask
from tests.support.marks import every, slow_but

NUM_LAYERS, DIMS = 3, 7


class Block(BaseLayer):
    """A residual layer with the signature that Repeat wants."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.ff = FeedForward(DIMS, DIMS, activation="tanh", rngs=rngs)

    def __call__(self, x, *, key=None, cache=None):
        if key is not None:
            x = x + jax.random.normal(key, x.shape)
        return x + self.ff(x), cache


class WideBlock(Block):
    """A block of other weights and another function."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.ff = FeedForward(DIMS, DIMS, activation="sigmoid", has_bias=False, rngs=rngs)


PATTERN = functools.partial(StackedTransformer, [Block, WideBlock], 2)


class Classifier(BaseLayer):
    """Blocks between inputs and logits."""

    def __init__(self, unroll: bool, block: Any = Block, *, rngs: nnx.Rngs):
        self.stack = Repeat(block, NUM_LAYERS, unroll=unroll, rngs=rngs)
        self.logits = FeedForward(DIMS, 5, activation="identity", rngs=rngs)

    def __call__(self, inputs):
        return self.logits(self.stack(inputs)[0])


def unrolled_params(params: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the parameters with the stack `name` as a dict of layers "0", "1", ..."""
    blocks = params[name]["blocks"]
    layers = {str(i): jax.tree.map(lambda w, i=i: w[i], blocks) for i in range(NUM_LAYERS)}
    return {**params, name: {"blocks": layers}}


def drawn(model: NnxModel) -> dict[str, Any]:
    """Returns parameters drawn by NumPy, without compiling a layer's own init."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda w: jnp.asarray(rng.normal(scale=0.4, size=w.shape), jnp.float32),
        jax.eval_shape(model.init, jax.random.key(0))["params"],
    )


def assert_trees_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def test_the_same_key_draws_the_same_layers_stacked_or_not():
    scanned, unrolled = (
        jax.jit(NnxModel(functools.partial(Classifier, unroll)).init)(jax.random.key(1))["params"]
        for unroll in (False, True)
    )
    assert scanned["stack"]["blocks"]["ff"]["linear"]["w"].shape == (NUM_LAYERS, DIMS, DIMS)
    assert_trees_close(unrolled_params(scanned, "stack"), unrolled, rtol=1e-6)
    first, second, _ = scanned["stack"]["blocks"]["ff"]["linear"]["w"]
    assert np.abs(first - second).max() > 0.1  # Layers of their own.


@pytest.fixture(scope="module")
def programs():
    """Returns outputs and gradients of the stack, scanned and unrolled, by checkpoint policy."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, DIMS)), jnp.float32)

    def run(unroll: bool, policy: str):
        model = NnxModel(
            lambda rngs: Repeat(
                Block, NUM_LAYERS, unroll=unroll, checkpoint_policy=policy, rngs=rngs
            )
        )
        params = drawn(NnxModel(lambda rngs: Repeat(Block, NUM_LAYERS, rngs=rngs)))
        if unroll:
            params = unrolled_params({"stack": params}, "stack")["stack"]

        def objective(params, x):
            module = model.module({"params": params, "non_trainable": {}})
            outputs = module(x, key=jax.random.key(7))[0]
            return jnp.sum(jnp.sin(outputs)), outputs

        grads, outputs = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(params, x)
        return {"outputs": outputs, "x": grads[1], "params": grads[0]}

    return functools.cache(run)


def test_scanned_equals_unrolled_in_outputs_and_gradients(programs):
    scanned, unrolled = programs(False, "save_nothing"), programs(True, "save_nothing")
    params = unrolled_params({"stack": scanned["params"]}, "stack")["stack"]
    assert_trees_close({**scanned, "params": params}, unrolled, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [p for p in CHECKPOINT_POLICIES if p not in (*SAVED_NAMES, "save_everything")]
)
def test_every_checkpoint_policy_gives_the_same_gradients(programs, policy):
    expected = programs(False, "save_everything")
    assert_trees_close(programs(False, policy), expected, rtol=1e-5, atol=1e-6)


def test_on_tpu_a_turn_casts_its_own_weights_and_gives_the_same(monkeypatch):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, DIMS)), jnp.float32)
    layer = Repeat(Block, NUM_LAYERS, rngs=nnx.Rngs(0))

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x, key=jax.random.key(7))[0]))

    def gradient():
        run = jax.grad(loss, argnums=(0, 1), allow_int=True)
        # Another function, for jax keeps what it has traced.
        result = jax.jit(lambda *args: jax.tree.leaves(run(*args))).lower(layer, x)
        return result.compile()(layer, x), result.as_text()

    expected, without = gradient()
    monkeypatch.setattr(repeats, "compiled_platform", lambda: "tpu")
    actual, text = gradient()
    assert text.count("optimization_barrier") > without.count("optimization_barrier")
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def count_dots(jaxpr) -> int:
    """Returns how many matrix products a program has, each loop's body once."""
    return sum(eqn.primitive.name == "dot_general" for eqn in all_eqns(jaxpr.eqns))


def test_policies_differ_in_what_the_backward_pass_computes_again():
    """A policy that was not applied would pass the test above."""
    x = jnp.ones((5, DIMS))

    def num_dots(policy: str) -> int:
        layer = Repeat(Block, NUM_LAYERS, unroll=True, checkpoint_policy=policy, rngs=nnx.Rngs(0))
        return count_dots(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(layer(x)[0])))(x).jaxpr)

    assert num_dots("save_everything") == num_dots("save_dot_only")
    assert num_dots("save_nothing") > num_dots("save_everything")


# Of a block's products (q, k, v, logits, context, out_proj, ffn1, ffn2) those computed again. What
# ffn2 gives is needed by none of the gradients.
COMPUTED_AGAIN = {
    "save_nothing": 7,
    "save_context": 6,
    "save_out_proj": 6,
    "save_encoded_and_out_proj": 5,
    "save_qkv_out_proj_separate": 3,
    "save_dot_for_mlperf_200b": 2,
    "save_dot_except_logits_ffn1": 2,
    "save_dot_except_logits": 1,
    "save_dot_only": 0,
    # Of a projection to queries, keys and values in one: it, logits, context, out_proj, ffn1.
    "combined: save_nothing": 5,
    "combined: save_qkv_out_proj": 3,
    "combined: save_quantized": 2,
}


@functools.cache
def num_dots_of_blocks(is_combined: bool, policy: str) -> int:
    """Returns how many matrix products the gradient of two transformer blocks has."""
    attention = functools.partial(DotProductAttention, combine_qkv=is_combined, use_bias=False)
    block = functools.partial(Transformer, 6, 11, 3, tr_atten_tpl=attention)

    model = NnxModel(lambda rngs: Repeat(block, 2, checkpoint_policy=policy, rngs=rngs))
    params, x = jax.eval_shape(model.init, jax.random.key(0))["params"], jnp.ones((2, 5, 6))

    def loss(params):
        return jnp.sum(model.module({"params": params, "non_trainable": {}})(x)[0])

    return count_dots(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)


@pytest.mark.parametrize("name", every(5, COMPUTED_AGAIN))
def test_a_named_policy_keeps_the_activations_of_that_name(name):
    is_combined, policy = name.startswith("combined"), name.split()[-1]
    num_dots = functools.partial(num_dots_of_blocks, is_combined)
    assert num_dots(policy) - num_dots("save_everything") == COMPUTED_AGAIN[name]


def test_an_unknown_policy_names_layer_setting_and_the_nearest():
    with pytest.raises(ConfigError, match=r"Repeat.checkpoint_policy.*'save_nothin'.*save_not"):
        Repeat(Block, 2, checkpoint_policy="save_nothin", rngs=nnx.Rngs(0))


# optimizers/test_stacks.py has other optimizers, of stacks of one block.
@pytest.mark.slow
def test_a_scanned_pattern_trains_as_an_unrolled_one():
    # Sizes are tiny: factor from 2 dims on. RMS scaling and clipping look at a whole tensor.
    optimizer = functools.partial(
        optax.adafactor, min_dim_size_to_factor=2, multiply_by_parameter_scale=True
    )
    rng = np.random.default_rng(3)
    batch = {
        "inputs": jnp.asarray(rng.normal(size=(11, DIMS)), jnp.float32),
        "labels": jnp.asarray(rng.integers(0, 5, 11), jnp.int32),
        "weights": jnp.ones(11),
    }

    def train(unroll: bool, params: dict[str, Any]) -> dict[str, Any]:
        learner = Learner(optimizer, 0.03, clip_gradient_norm_to_value=0.5)
        task = ClassificationTask(functools.partial(Classifier, unroll, PATTERN), learner)
        specs = task.model.weight_specs()["params"]
        opt_states = jax.jit(learner.bind(specs).init)(params)

        @jax.jit
        def step(params, opt_states):
            def loss_fn(params):
                module = task.model.module({"params": params, "non_trainable": {}})
                return task.compute_loss(module, batch, None)["loss"][0]

            loss, grads = jax.value_and_grad(loss_fn)(params)
            return learner.bind(specs).update(grads, opt_states, params, loss)[:2]

        for _ in range(5):
            params, opt_states = step(params, opt_states)
        return params

    first = drawn(NnxModel(functools.partial(Classifier, False, PATTERN)))
    scanned, unrolled = train(False, first), train(True, unrolled_params(first, "stack"))
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), scanned, first)
    assert min(jax.tree.leaves(moved)) > 1e-5
    assert_trees_close(unrolled_params(scanned, "stack"), unrolled, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_the_cache_of_a_scanned_stack_equals_that_of_an_unrolled_one():
    block = functools.partial(Transformer, 6, 11, 3)
    x, positions = jnp.ones((2, 4, 6)), jnp.broadcast_to(jnp.arange(4), (2, 4))
    scanned, unrolled = (
        NnxModel(lambda rngs, u=u: Repeat(block, NUM_LAYERS, unroll=u, rngs=rngs))
        for u in (False, True)
    )
    params = drawn(scanned)
    per_layer = unrolled_params({"stack": params}, "stack")["stack"]
    outputs = []
    for model, weights in ((scanned, params), (unrolled, per_layer)):
        module = model.module({"params": weights, "non_trainable": {}})
        cache = module.init_cache(2, 5, jnp.float32)
        run = jax.jit(lambda m, x, cache: m(x, positions=positions, cache=cache))
        outputs.append(run(module, x, cache))
    assert outputs[0][1]["key"].shape == (NUM_LAYERS, 2, 3, 5, 2)
    in_a_stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs[1][1])
    assert_trees_close(outputs[0], (outputs[1][0], in_a_stack), rtol=1e-5, atol=1e-6)


def test_a_scanned_model_compiles_one_block_whatever_its_depth():
    def program_size(num_layers: int) -> int:
        model = NnxModel(functools.partial(TransformerLm, 11, 8, 12, 2, num_layers))
        mdl_vars = jax.eval_shape(model.init, jax.random.key(0))
        ids = jax.ShapeDtypeStruct((2, 3), "int32")
        return len(str(jax.make_jaxpr(lambda v, i: model.module(v)(i)[0])(mdl_vars, ids)))

    assert program_size(17) < 1.05 * program_size(2)


class Observing(Block):
    """A block that keeps a running mean of its inputs, and reports a loss and a summary."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(DIMS))
        self.loss, self.size = AuxLoss(jnp.zeros(())), Summary(jnp.zeros(()))

    def __call__(self, x, *, key=None, cache=None):
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * jnp.mean(x, axis=0))
        self.loss.set_value(jnp.sum(jnp.square(x)))
        self.size.set_value(jnp.max(x))
        return super().__call__(x, key=key, cache=cache)


@pytest.mark.parametrize("policy", slow_but({"save_nothing"}, ["save_nothing", "save_everything"]))
def test_statistics_losses_and_summaries_come_out_of_scan_and_remat(policy):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(5, DIMS)), jnp.float32)
    pattern = functools.partial(
        StackedTransformer, [Observing, Block], 2, remat=True, checkpoint_policy="save_nothing"
    )
    results = []
    params = drawn(NnxModel(lambda rngs: Repeat(pattern, NUM_LAYERS, rngs=rngs)))
    for unroll in (False, True):
        model = NnxModel(
            lambda rngs, unroll=unroll: Repeat(
                pattern, NUM_LAYERS, unroll=unroll, checkpoint_policy=policy, rngs=rngs
            )
        )
        weights = unrolled_params({"stack": params}, "stack")["stack"] if unroll else params
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape),
            model.weight_specs()["non_trainable"],
            is_leaf=lambda x: hasattr(x, "split_dims_mapping"),
        )

        def objective(weights, model=model, zeros=zeros):
            module = model.module({"params": weights, "non_trainable": zeros})
            y = module(x)[0]
            losses = intermediates(module, AuxLoss)
            reported = jax.tree.leaves((losses, intermediates(module, Summary)))
            kept = mdl_vars_of(module)["non_trainable"]
            return jnp.sum(y) + sum(map(jnp.sum, losses.values())), (reported, kept)

        grads, (reported, kept) = jax.jit(jax.grad(objective, has_aux=True))(weights)
        if not unroll:
            kept = unrolled_params({"stack": kept}, "stack")["stack"]
            grads = unrolled_params({"stack": grads}, "stack")["stack"]
            assert [item.shape for item in reported] == [(NUM_LAYERS,)] * 2
        else:
            reported = [jnp.stack(reported[:NUM_LAYERS]), jnp.stack(reported[NUM_LAYERS:])]
        results.append({"reported": reported, "kept": kept, "grads": grads})
    assert_trees_close(*results, rtol=1e-4, atol=1e-6)
    means = jax.tree.leaves(results[0]["kept"])
    np.testing.assert_allclose(means[0], 0.1 * x.mean(axis=0), rtol=1e-5, atol=1e-7)
    assert np.abs(means[1] - means[0]).max() > 1e-3  # Each layer saw its own inputs.


def test_stochastic_depth_grows_along_a_stack():
    probs = []

    def block(*, rngs, residual_droppath_prob=0.0):
        probs.append(residual_droppath_prob)
        return Block(rngs=rngs)

    StackedTransformer(block, 4, residual_droppath_prob=0.2, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(probs, [0.0, 0.05, 0.1, 0.15])


@pytest.mark.parametrize("stack_class", [Repeat, StackedTransformer])
def test_a_stack_drops_its_inputs_only_in_training(stack_class):
    stack = stack_class(Block, 1, input_dropout_prob=0.5, rngs=nnx.Rngs(0))
    plain = stack_class(Block, 1, rngs=nnx.Rngs(0))
    x, key = jnp.ones((101, DIMS)), jax.random.key(1)
    np.testing.assert_array_equal(stack(x)[0], plain(x)[0])
    assert np.abs(stack(x, key=key)[0] - plain(x, key=key)[0]).max() > 0.1
