"""The train step without a mesh: against NumPy, and against the step written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import Learner, TrainState
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.core.partitioner import steps
from praxis_lite.layers import BaseLayer
from praxis_lite.layers.base.base_layer import zeros
from praxis_lite.models import FunctionModel, LinenModel
from praxis_lite.optimizers import VariationalNoise
from praxis_lite.tasks.image_classification import ClassificationTask
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from tests.support import lm_runs

ROWS, DIMS, CLASSES, RATE = 24, 5, 3, 0.7
RNG = np.random.default_rng(1)
BATCH = {
    "inputs": RNG.normal(size=(ROWS, DIMS)).astype(np.float32),
    "labels": RNG.integers(0, CLASSES, ROWS).astype(np.int32),
    "weights": RNG.choice([0.0, 0.5, 1.0, 3.0], ROWS).astype(np.float32),
}
BATCH["weights"][5::8] = 0.0  # Microbatch 5 of 8 has no example.


class Classifier(BaseLayer):
    """A linear classifier that counts its calls."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = self.weight((DIMS, CLASSES), rngs=rngs)
        self.b = self.weight((CLASSES,), init=zeros, rngs=rngs)
        self.num_calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, inputs):
        self.num_calls.set_value(self.num_calls[...] + 1.0)
        return inputs @ self.w[...] + self.b[...][None]


def task_of(optimizer=optax.sgd, **settings):
    return ClassificationTask(Classifier, Learner(optimizer, RATE, **settings))


@functools.cache
def initial_state():
    return jax.device_get(jax.jit(lambda: steps.init_state(task_of(), jax.random.key(0)))())


def stepped(task, state=None, batch=BATCH):
    """Returns (state, outputs) after a step."""
    step = jax.jit(lambda state, key: steps.train_step(task, state, batch, key))
    return jax.device_get(step(state or initial_state(), jax.random.key(3)))


class LinenClassifier(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(CLASSES)(inputs)


def seen_dtypes(model, logits_of, fprop_dtype):
    """Returns the dtypes that a loss meets in a train step, and those of the new weights."""
    seen = {}

    def loss(model, inputs, key):
        logits = logits_of(model, inputs["inputs"])
        seen.update(logits=logits.dtype, weights=inputs["weights"].dtype)
        xent = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["labels"])
        return xent

    task = LossTask(model, loss, Learner(optax.sgd, RATE), fprop_dtype=fprop_dtype)
    key = jax.random.key(3)
    state, _ = jax.eval_shape(
        lambda: steps.train_step(task, steps.init_state(task, key), BATCH, key)
    )
    jax.eval_shape(lambda: steps.eval_step(task, task.model.init(key), BATCH))
    return seen, {x.dtype for x in jax.tree.leaves(state.mdl_vars["params"])}


@pytest.mark.parametrize("fprop_dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["nnx", "linen", "functions"])
def test_models_of_others_compute_in_the_tasks_dtype_and_keep_float32_weights(kind, fprop_dtype):
    def apply(module, x):
        return module(x)

    model, logits_of = {
        "nnx": (functools.partial(nnx.Linear, DIMS, CLASSES), apply),
        "linen": (LinenModel(LinenClassifier(), {"inputs": (1, DIMS)}), apply),
        "functions": (FunctionModel(lambda key: jnp.ones((DIMS, CLASSES))), lambda w, x: x @ w),
    }[kind]
    seen, stored = seen_dtypes(model, logits_of, fprop_dtype)
    assert seen == {"logits": fprop_dtype or jnp.float32, "weights": jnp.float32}
    assert stored == {jnp.dtype(jnp.float32)}


def test_a_step_in_bfloat16_is_that_of_weights_and_inputs_cast_by_hand():
    task = ClassificationTask(Classifier, Learner(optax.sgd, RATE), fprop_dtype=jnp.bfloat16)
    before = initial_state().mdl_vars["params"]
    state, _ = stepped(task)

    def loss(params):
        x, w, b = (a.astype(jnp.bfloat16) for a in (BATCH["inputs"], params["w"], params["b"]))
        logits = (x @ w + b[None]).astype(jnp.float32)
        labels, weights = BATCH["labels"], BATCH["weights"]
        xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(xent * weights) / weights.sum()

    grads = jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, before))
    for name in ("w", "b"):
        expected = before[name] - RATE * grads[name]
        np.testing.assert_allclose(state.mdl_vars["params"][name], expected, rtol=1e-5, atol=1e-6)


def test_a_dtype_that_the_model_sets_itself_or_that_is_no_float_is_refused():
    with pytest.raises(ConfigError, match="fprop_dtype.*int8.*bfloat16"):
        ClassificationTask(Classifier, Learner(optax.sgd, RATE), fprop_dtype=jnp.int8)
    with pytest.raises(ConfigError, match=r"fprop_dtype.*task\.model"):
        task = LanguageModelTask(
            lm_runs.lm_of("uneven"), Learner(optax.sgd, RATE), fprop_dtype=jnp.bfloat16
        )
        jax.eval_shape(lambda: task.module(task.model.init(jax.random.key(0))))


def gradients(params, batch=BATCH):
    """Returns the loss and its gradients by hand."""
    x, labels, weights = (batch[name] for name in ("inputs", "labels", "weights"))
    logits = x.astype(np.float64) @ params["w"] + params["b"]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    errors = (probs - np.eye(CLASSES)[labels]) * (weights / weights.sum())[:, None]
    loss = -np.log(probs[np.arange(ROWS), labels]) @ weights / weights.sum()
    return loss, {"w": x.T @ errors, "b": errors.sum(0)}


@pytest.mark.parametrize("accumulation_steps", [1, 8])
def test_a_classifier_steps_as_by_hand_however_its_batch_is_cut(accumulation_steps):
    state, outputs = stepped(task_of(gradient_accumulation_steps=accumulation_steps))
    params = initial_state().mdl_vars["params"]
    loss, grads = gradients(params)
    np.testing.assert_allclose(outputs["metrics"]["loss"], (loss, BATCH["weights"].sum()), 1e-6)
    for name, grad in grads.items():
        expected = params[name] - RATE * grad
        np.testing.assert_allclose(state.mdl_vars["params"][name], expected, atol=1e-6)
    num_calls = {1: 1, 8: 7}[accumulation_steps]  # Empty ones leave no trace.
    assert state.mdl_vars["non_trainable"]["num_calls"] == num_calls


def test_one_microbatch_is_the_step_written_out():
    """No loop, no cast, no other key: the same program, operation by operation."""
    task = task_of(optax.adamw, clip_gradient_norm_to_value=0.5)
    bound = task.learner.bind(task.model.weight_specs()["params"])

    def train_step(state, inputs, key):
        key = jax.random.fold_in(key, state.step)
        params, others = state.mdl_vars["params"], state.mdl_vars["non_trainable"]

        def loss_fn(params):
            module = task.model.module({"params": params, "non_trainable": others})
            metrics = dict(task.compute_loss(module, inputs, key))
            return metrics["loss"][0], (metrics, mdl_vars_of(module)["non_trainable"])

        (loss, (metrics, new)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        params, opt_states, scalars, is_skipped = bound.update(
            grads, state.opt_states, params, loss
        )
        new = jax.tree.map(lambda n, o: jnp.where(is_skipped, o, n), new, others)
        mdl_vars = {"params": params, "non_trainable": new}
        state = TrainState(state.step + 1, mdl_vars, opt_states)
        return state, {"metrics": metrics, "learner": scalars}

    key = jax.random.key(0)
    state = jax.eval_shape(lambda: steps.init_state(task, key))
    written_out = jax.jit(train_step).lower(state, BATCH, key).as_text()
    step = functools.partial(steps.train_step, task)
    step.__name__ = "train_step"
    assert jax.jit(step).lower(state, BATCH, key).as_text() == written_out


def test_a_frozen_weight_has_no_gradient_and_stays():
    def num_products(task):
        state = jax.eval_shape(lambda: steps.init_state(task, jax.random.key(0)))
        step = functools.partial(steps.train_step, task)
        return str(jax.make_jaxpr(step)(state, BATCH, jax.random.key(0))).count("dot_general[")

    task = task_of(bprop_variable_exclusion=["w"])
    assert num_products(task_of()) == 2  # The logits, and the gradient of w.
    assert num_products(task) == 1
    new, _ = stepped(task)
    old = initial_state().mdl_vars["params"]
    np.testing.assert_array_equal(new.mdl_vars["params"]["w"], old["w"])
    assert np.abs(new.mdl_vars["params"]["b"] - old["b"]).max() > 1e-2


def test_gradients_at_noisy_weights_update_the_clean_ones():
    noise = VariationalNoise(scale=0.5, regex="w")
    state, outputs = stepped(task_of(variational_noise=noise, gradient_accumulation_steps=4))
    clean = initial_state().mdl_vars["params"]
    key = jax.random.fold_in(jax.random.key(3), 0)
    noisy = jax.device_get(noise.apply(clean, key, 0))
    assert np.abs(noisy["w"] - clean["w"]).max() > 0.1
    loss, grads = gradients(noisy)  # One noise for all microbatches.
    np.testing.assert_allclose(outputs["metrics"]["loss"][0], loss, rtol=1e-5)
    np.testing.assert_allclose(
        state.mdl_vars["params"]["w"], clean["w"] - RATE * grads["w"], atol=1e-5
    )
