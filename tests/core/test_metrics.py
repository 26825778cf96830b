"""Metrics that an experiment adds to a task: against NumPy on every mesh; what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    make_mesh,
    share_outputs,
    weighted_mean,
)
from praxis_lite.core.metrics import compute_metrics, weights_of
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.image_classification import ClassificationTask
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from tests.support.explicit_partitioner import explicit_partitioner

NUM_ROWS, NUM_FILLER, DIMS, LENGTH = 14, 3, 5, 7


def init(key):
    return {"w": jax.random.normal(key, (DIMS, LENGTH))}


def loss(params, inputs, key):
    predictions = inputs["x"] @ params["w"]
    share_outputs({"predictions": predictions, "name": "no array"})
    return jnp.mean(jnp.square(predictions), axis=-1)


def per_row(outputs, inputs):
    return jnp.max(outputs["predictions"], axis=-1)


def per_token(outputs, inputs):
    """Counts its tokens itself, and those of filler rows too."""
    return outputs["predictions"] > 0, 1.0 + jnp.abs(inputs["x"][:, :1]) * jnp.ones((1, LENGTH))


def scaled(outputs, inputs, factor):
    return outputs["loss"] * factor


def summed_itself(outputs, inputs):
    weights = inputs["weights"]
    return jnp.sum(outputs["loss"] * weights) / jnp.maximum(jnp.sum(weights), 1e-9), weights.sum()


METRICS = {
    "largest": per_row,
    "share": per_token,
    "scaled": functools.partial(scaled, factor=3.0),
    "itself": summed_itself,
}


def batch():
    rng = np.random.default_rng(7)
    weights = rng.uniform(0.5, 2.0, NUM_ROWS).astype(np.float32)
    weights[-NUM_FILLER:] = 0
    x = rng.normal(size=(NUM_ROWS, DIMS)).astype(np.float32)
    x[-NUM_FILLER:] = 1e3  # In all metrics, were it not that they weigh nothing.
    return {"x": x, "weights": weights}


def expected(params):
    """Returns each metric and its weight, in float64."""
    rows = {name: x[:-NUM_FILLER].astype(np.float64) for name, x in batch().items()}
    predictions, weights = rows["x"] @ np.asarray(params["w"], np.float64), rows["weights"]
    per_token_weights = (1 + np.abs(rows["x"][:, :1])) * np.ones(LENGTH)
    losses = np.mean(np.square(predictions), axis=-1)
    mean = np.average(losses, weights=weights)
    return {
        "largest": (np.average(predictions.max(-1), weights=weights), weights.sum()),
        "share": (np.average(predictions > 0, weights=per_token_weights), per_token_weights.sum()),
        "scaled": (3 * mean, weights.sum()),
        "itself": (mean, weights.sum()),
        "loss": (mean, weights.sum()),
    }


def task_of(metrics=METRICS, accumulation_steps=1, loss=loss):
    learner = Learner(optax.sgd, 0.1, gradient_accumulation_steps=accumulation_steps)
    return LossTask(FunctionModel(init), loss, learner, metrics=metrics)


@pytest.mark.parametrize(
    ("partitioner_class", "num_devices", "accumulation_steps"),
    [
        (Partitioner, 8, 1),
        (explicit_partitioner, 8, 7),
        pytest.param(Partitioner, 1, 7, marks=pytest.mark.slow),
        pytest.param(Partitioner, 8, 7, marks=pytest.mark.slow),
        pytest.param(explicit_partitioner, 8, 1, marks=pytest.mark.slow),
    ],
)
def test_metrics_of_training_and_evaluation_are_numpys(
    partitioner_class, num_devices, accumulation_steps
):
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, num_devices, 1)))
    partitioner = partitioner_class(task_of(accumulation_steps=accumulation_steps), mesh)
    key = partitioner.key(0)
    state = partitioner.init(key)
    inputs = partitioner.global_batch(batch(), NUM_ROWS)
    params = jax.device_get(state.mdl_vars["params"])
    evaluated = jax.device_get(partitioner.eval_step(state.mdl_vars, inputs, key))
    _, outputs = partitioner.train_step(state, inputs, key)
    trained = jax.device_get(outputs["metrics"])
    for name, pair in expected(params).items():
        for actual in (evaluated, trained):
            np.testing.assert_allclose(actual[name], pair, rtol=2e-6, err_msg=name)


WEIGHTS = {"w": np.random.default_rng(5).normal(size=(DIMS, LENGTH)).astype(np.float32)}


def metrics_of(task, inputs, model=None):
    """Returns the metrics of a loss; `model` is a function, or None for the WEIGHTS."""

    @jax.jit
    def metrics(weights, inputs):
        return task.outputs(task.compute_loss, model or weights, inputs, None)[0]

    return jax.device_get(metrics(WEIGHTS, inputs))


def test_a_batch_without_true_rows_weighs_nothing():
    metrics = metrics_of(task_of(), {**batch(), "weights": np.zeros(NUM_ROWS, np.float32)})
    assert {name: float(weight) for name, (_, weight) in metrics.items()} == dict.fromkeys(
        ["loss", *METRICS], 0.0
    )


def test_no_gradient_is_taken_through_a_metric():
    task = task_of({"rooted": lambda outputs, inputs: jnp.sqrt(outputs["loss"] * 0.0)})

    def total(params, inputs):
        pairs, _ = task.outputs(task.compute_loss, params, inputs, None)
        return pairs["loss"][0] + pairs["rooted"][0]

    assert np.all(np.isfinite(jax.jit(jax.grad(total))(WEIGHTS, batch())["w"]))


def test_the_outputs_of_the_librarys_own_tasks():
    labels, weights = np.asarray([[1, 2, 0], [2, 2, 1]]), np.asarray([[1, 1, 0], [1, 0, 0.5]])
    logits = np.random.default_rng(3).normal(size=(2, 3, 4)).astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    entropies = -(probs * np.log(probs)).sum(-1)

    def entropy(outputs, inputs):
        log_probs = jax.nn.log_softmax(outputs["logits"])
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    settings = {"learner": Learner(optax.sgd, 0.1), "metrics": {"entropy": entropy}}
    model = lambda ids, key: (jnp.asarray(logits), None)  # noqa: E731
    inputs = {"ids": labels, "labels": labels, "weights": weights.astype(np.float32)}
    lm = LanguageModelTask(FunctionModel(init), **settings)
    value, weight = metrics_of(lm, inputs, model)["entropy"]
    np.testing.assert_allclose(value, np.average(entropies, weights=weights), rtol=1e-6)
    assert weight == weights.sum()
    classes = ClassificationTask(FunctionModel(init), **settings)
    inputs = {
        "inputs": logits[:, 0],
        "labels": labels[:, 0],
        "weights": weights[:, 0].astype(np.float32),
    }
    value, _ = metrics_of(classes, inputs, lambda x: x)["entropy"]
    np.testing.assert_allclose(value, entropies[:, 0].mean(), rtol=1e-6)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda outputs: 0, r"metrics\['mine'\].*\(outputs, inputs\).*lambda"),
        (7, r"metrics\['mine'\].* 7;"),
    ],
)
def test_what_is_no_function_of_outputs_and_inputs_is_refused_at_once(metric, words):
    with pytest.raises(ConfigError, match=words):
        task_of({"mine": metric})


@pytest.mark.parametrize(
    ("name", "metric", "words"),
    [
        ("mine", lambda outputs, inputs: jnp.mean(outputs["loss"]), r"\['mine'\].* float32\[\]"),
        ("mine", lambda outputs, inputs: outputs["predictions"], r"\['mine'\].*float32\[14, 7\]"),
        ("mine", lambda outputs, inputs: (outputs["loss"], 1.0), r"\['mine'\].*\(float32\[14\],"),
        ("mine", lambda outputs, inputs: None, r"\['mine'\].* None"),
        ("mine", lambda outputs, inputs: outputs["logit"], r"\['mine'\].*outputs\['logit'\].*pred"),
        ("mine", lambda outputs, inputs: inputs["weight"], r"inputs\['weight'\].*weights\?"),
        ("loss", per_row, r"\['loss'\]"),
    ],
)
def test_a_metric_that_returns_or_reads_something_else_is_named(name, metric, words):
    task = task_of({name: metric})
    spec = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch().items()}
    with pytest.raises(ConfigError, match=words):
        jax.eval_shape(
            lambda inputs: task.outputs(task.compute_loss, init(jax.random.key(0)), inputs, None)[
                0
            ],
            spec,
        )


def test_values_of_another_number_of_rows_are_no_metric():
    assert weighted_mean((jnp.ones(3), jnp.ones(3)), jnp.ones(5)) is None
    assert weighted_mean("text", jnp.ones(5)) is None


def test_a_batch_of_scalars_alone_has_metrics_of_scalars():
    inputs = {"temperature": jnp.float32(2)}
    assert weights_of(inputs).shape == ()
    pairs = compute_metrics(
        "Task",
        {"half": lambda outputs, inputs: (inputs["temperature"] / 2, jnp.float32(3))},
        {},
        inputs,
        {},
    )
    assert tuple(map(float, pairs["half"])) == (1, 3)
    with pytest.raises(ConfigError, match="half"):
        compute_metrics("Task", {"half": lambda outputs, inputs: jnp.ones(2)}, {}, inputs, {})
