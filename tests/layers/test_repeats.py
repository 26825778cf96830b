"""A scanned stack and an unrolled one are the same layers: outputs, gradients, training."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite.errors import ConfigError
from praxis_lite.layers import FeedForward, Repeat, Transformer, TransformerLm
from praxis_lite.layers.repeats import CHECKPOINT_POLICIES
from praxis_lite.learner import Learner
from praxis_lite.models import NnxModel
from praxis_lite.weights import BaseLayer
from tasks.image_classification import ClassificationTask

NUM_LAYERS, DIMS = 3, 7


class Block(BaseLayer):
    """A residual layer with the signature that Repeat wants."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.ff = FeedForward(DIMS, DIMS, activation="tanh", rngs=rngs)

    def __call__(self, x, *, key=None, cache=None):
        if key is not None:
            x = x + jax.random.normal(key, x.shape)
        return x + self.ff(x), cache


class Classifier(BaseLayer):
    """Blocks between inputs and logits."""

    def __init__(self, unroll: bool, *, rngs: nnx.Rngs):
        self.stack = Repeat(Block, NUM_LAYERS, unroll=unroll, rngs=rngs)
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


def assert_trees_close(found, wanted, **tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
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


@pytest.mark.parametrize("unroll", [False, True], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("policy", [p for p in CHECKPOINT_POLICIES if p != "save_everything"])
def test_every_checkpoint_policy_gives_the_same_gradients(programs, policy, unroll):
    wanted = programs(unroll, "save_everything")
    assert_trees_close(programs(unroll, policy), wanted, rtol=1e-5, atol=1e-6)


def test_policies_differ_in_what_the_backward_pass_computes_again():
    """A policy that was not applied would pass the test above."""
    x = jnp.ones((5, DIMS))

    def num_dots(policy: str) -> int:
        layer = Repeat(
            Block, NUM_LAYERS, unroll=True, checkpoint_policy=policy, rngs=nnx.Rngs(0)
        )
        return count_dots(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(layer(x)[0])))(x).jaxpr)

    def count_dots(jaxpr) -> int:
        inner = [sub for eqn in jaxpr.eqns for sub in jax.tree.leaves(list(eqn.params.values()))]
        jaxprs = [getattr(sub, "jaxpr", sub) for sub in inner if hasattr(sub, "eqns")]
        own = sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)
        return own + sum(count_dots(sub) for sub in jaxprs)

    assert num_dots("save_everything") == num_dots("save_dot_only")
    assert num_dots("save_nothing") > num_dots("save_everything")


def test_an_unknown_policy_names_layer_setting_and_the_nearest():
    with pytest.raises(ConfigError, match=r"Repeat.checkpoint_policy is 'save_nothin'.*save_not"):
        Repeat(Block, 2, checkpoint_policy="save_nothin", rngs=nnx.Rngs(0))


OPTIMIZERS = {
    # Sizes are tiny: factor from 2 dims on. RMS scaling and clipping look at a whole tensor.
    "adafactor": functools.partial(
        optax.adafactor, min_dim_size_to_factor=2, multiply_by_parameter_scale=True
    ),
    "adamw": functools.partial(optax.adamw, weight_decay=0.1),
    "lamb": optax.lamb,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scanned_stack_trains_as_an_unrolled_one(optimizer):
    rng = np.random.default_rng(3)
    batch = {
        "inputs": jnp.asarray(rng.normal(size=(11, DIMS)), jnp.float32),
        "labels": jnp.asarray(rng.integers(0, 5, 11), jnp.int32),
        "weights": jnp.ones(11),
    }

    def train(unroll: bool, params: dict[str, Any]) -> dict[str, Any]:
        learner = Learner(OPTIMIZERS[optimizer], 0.03, clip_gradient_norm_to_value=0.5)
        task = ClassificationTask(functools.partial(Classifier, unroll), learner)
        specs = task.model.weight_specs()["params"]
        opt_states = jax.jit(lambda params: learner.init(params, specs))(params)

        @jax.jit
        def step(params, opt_states, step):
            def loss_fn(params):
                module = task.model.module({"params": params, "non_trainable": {}})
                return task.compute_loss(module, batch, None)["loss"][0]

            loss, grads = jax.value_and_grad(loss_fn)(params)
            return learner.update(grads, opt_states, params, specs, loss, step)[:2]

        for i in range(5):
            params, opt_states = step(params, opt_states, i)
        return params

    first = drawn(NnxModel(functools.partial(Classifier, False)))
    scanned, unrolled = train(False, first), train(True, unrolled_params(first, "stack"))
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), scanned, first)
    assert min(jax.tree.leaves(moved)) > 1e-5
    assert_trees_close(unrolled_params(scanned, "stack"), unrolled, rtol=1e-4, atol=2e-6)


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
        assert cache["key"].shape == (NUM_LAYERS, 2, 5, 3, 2)
        run = jax.jit(lambda m, x, cache: m(x, positions=positions, cache=cache))
        outputs.append(run(module, x, cache))
    assert_trees_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)


def test_a_scanned_model_compiles_one_block_whatever_its_depth():
    def program_size(num_layers: int) -> int:
        model = NnxModel(functools.partial(TransformerLm, 11, 8, 12, 2, num_layers))
        mdl_vars = jax.eval_shape(model.init, jax.random.key(0))
        ids = jax.ShapeDtypeStruct((2, 3), "int32")
        return len(str(jax.make_jaxpr(lambda v, i: model.module(v)(i)[0])(mdl_vars, ids)))

    assert program_size(17) < 1.05 * program_size(2)
