"""A module as plain trees and back; what it keeps beside its weights is updated by a train step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite.core import Learner, NnxModel, Partitioner
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.core.partitioner import steps
from praxis_lite.layers import Repeat, Transformer, TransformerFeedForward, TransformerLm
from praxis_lite.tasks.image_classification import ClassificationTask

LM = functools.partial(TransformerLm, 11, 6, 7, 3, 2, max_seq_length=5)
BLOCK = functools.partial(TransformerFeedForward, 6, 7)


def test_init_to_module_gives_the_outputs_of_the_plain_module():
    model, x = NnxModel(BLOCK), jnp.asarray([[3.0, 1.0, 4.0, 1.0, 5.0, 9.0]])

    @jax.jit
    def run(key):
        plain = BLOCK(rngs=nnx.Rngs(key))
        return model.module(model.init(key))(x), plain(x)

    np.testing.assert_array_equal(*run(jax.random.key(2)))


def test_the_trees_are_plain_nested_dicts_of_arrays_with_string_keys():
    build = functools.partial(Repeat, functools.partial(Transformer, 6, 7, 3), 2, unroll=True)
    mdl_vars = jax.eval_shape(NnxModel(build).init, jax.random.key(2))

    def check(node):
        if isinstance(node, jax.ShapeDtypeStruct):
            return
        assert type(node) is dict and all(type(name) is str for name in node)
        for child in node.values():
            check(child)

    check(mdl_vars)
    assert mdl_vars["params"]["blocks"]["1"]["self_attention"]["query"]["w"].shape == (6, 3, 2)
    assert mdl_vars["non_trainable"] == {}


def test_module_and_mdl_vars_of_are_inverses():
    model = NnxModel(LM)
    mdl_vars = jax.jit(model.init)(jax.random.key(2))
    back = mdl_vars_of(model.module(mdl_vars))
    jax.tree.map(np.testing.assert_array_equal, back, mdl_vars)
    assert jax.tree.structure(back) == jax.tree.structure(mdl_vars)
    specs = jax.tree.map(lambda spec: spec.shape, model.weight_specs())
    assert specs == jax.tree.map(jnp.shape, mdl_vars)


def test_describing_a_model_makes_no_array():
    def build(rngs):
        return LM(rngs=rngs) if isinstance(rngs.params(), jax.core.Tracer) else pytest.fail("real")

    model = NnxModel(build)
    model.weight_specs()
    assert isinstance(model.abstract_module().final_ln.scale.get_value(), jax.ShapeDtypeStruct)


MOMENTUM = 0.75


class Normalized(nnx.Module):
    """Class logits of inputs less their running mean; a user's own NNX module, not ours."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(3))
        self.num_calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, inputs):
        batch_mean = jnp.mean(inputs, axis=0)
        self.mean.set_value(MOMENTUM * self.mean[...] + (1 - MOMENTUM) * batch_mean)
        self.num_calls.set_value(self.num_calls[...] + 1)
        return self.linear(inputs - self.mean[...][None])


def batch_of(inputs):
    return {
        "inputs": np.asarray(inputs, np.float32),
        "labels": np.asarray([0, 1, 1, 0, 1], np.int32),
        "weights": np.ones(5, np.float32),
    }


INPUTS = np.random.default_rng(6).normal(2.0, size=(5, 3))


def test_a_train_step_returns_what_the_module_updated_and_the_learner_leaves_it(mesh_of):
    # Weight decay would shrink the mean if the learner took it for a weight.
    learner = Learner(functools.partial(optax.adamw, weight_decay=0.5), 0.1)
    partitioner = Partitioner(ClassificationTask(Normalized, learner), mesh_of(1, 2, 2))
    state = partitioner.init(jax.random.key(0))
    assert set(state.mdl_vars["non_trainable"]) == {"mean", "num_calls"}
    assert set(state.mdl_vars["params"]) == {"linear"}
    mean, kernel = np.zeros(3), np.asarray(state.mdl_vars["params"]["linear"]["kernel"])
    for i in range(3):
        batch = partitioner.global_batch(batch_of(INPUTS + i))
        state, _ = partitioner.train_step(state, batch, partitioner.key(0))
        mean = MOMENTUM * mean + (1 - MOMENTUM) * (INPUTS + i).mean(axis=0)
        actual = state.mdl_vars["non_trainable"]
        np.testing.assert_allclose(actual["mean"], mean, rtol=1e-5)
        assert int(actual["num_calls"]) == i + 1
    assert np.abs(state.mdl_vars["params"]["linear"]["kernel"] - kernel).max() > 0.05


def test_a_skipped_step_leaves_non_trainable_state_as_it_was():
    task = ClassificationTask(Normalized, Learner(optax.sgd, 0.1))
    state = jax.jit(functools.partial(steps.init_state, task))(jax.random.key(0))
    step = jax.jit(functools.partial(steps.train_step, task))
    state, _ = step(state, batch_of(INPUTS), jax.random.key(1))
    after, outputs = step(state, batch_of(INPUTS * np.nan), jax.random.key(1))
    assert int(outputs["learner"]["num_skipped_steps"]) == 1
    jax.tree.map(np.testing.assert_array_equal, after.mdl_vars, state.mdl_vars)


def test_eval_does_not_change_non_trainable_state():
    task = ClassificationTask(Normalized, Learner(optax.sgd, 0.1))
    mdl_vars = jax.jit(task.model.init)(jax.random.key(0))
    before = jax.tree.map(np.asarray, mdl_vars)
    jax.eval_shape(lambda: steps.eval_step(task, mdl_vars, batch_of(INPUTS)))
    jax.tree.map(np.testing.assert_array_equal, mdl_vars, before)
