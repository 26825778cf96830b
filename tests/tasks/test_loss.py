"""The task of a loss that is a plain function: its means against NumPy, and what it refuses."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import Learner
from praxis_lite.core.partitioner import accumulation
from praxis_lite.inputs import InMemory
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask
from praxis_lite.trainer.evaluation import WeightedMean

WEIGHTS = np.asarray([1.0, 0.5, 2.0, 0.0, 1.0], np.float32)
X = np.asarray([3.0, -1.0, 0.25, np.nan, 7.0], np.float32)  # The row that weighs nothing is NaN.
BATCH = {"x": jnp.asarray(X), "weights": jnp.asarray(WEIGHTS)}


def task_of(loss, **settings):
    model = FunctionModel(lambda key: {"w": jnp.ones(())})
    return LossTask(model, loss, Learner(optax.sgd, 0.1), **settings)


def returning(value):
    return task_of(lambda model, inputs, key: value(inputs) if callable(value) else value)


def scalars(task, inputs=BATCH):
    pairs = jax.jit(lambda inputs: task.compute_loss(None, inputs, None))(inputs)
    return {name: (float(value), float(weight)) for name, (value, weight) in pairs.items()}


def test_a_value_per_row_is_averaged_with_the_weights_and_filler_counts_for_nothing():
    expected = float((X * WEIGHTS)[WEIGHTS > 0].sum() / WEIGHTS.sum())

    def loss(model, inputs, key):
        return inputs["x"], {"is_positive": inputs["x"] > 0, "rows": np.int32(5)}

    actual = scalars(task_of(loss))
    assert actual["loss"] == (pytest.approx(expected, rel=1e-6), 4.5)
    assert actual["is_positive"] == (pytest.approx(4.0 / 4.5), 4.5)
    assert actual["rows"] == (5.0, 4.5)


def test_a_scalar_is_a_mean_already_and_a_pair_has_a_weight_of_its_own():
    assert scalars(returning(lambda inputs: jnp.float32(3.0))) == {"loss": (3.0, 4.5)}
    actual = scalars(returning((2.0, {"masked": (jnp.bfloat16(0.5), jnp.int32(17))})))
    assert actual == {"loss": (2.0, 4.5), "masked": (0.5, 17.0)}
    assert scalars(returning(lambda inputs: (inputs["x"][0], 2))) == {"loss": (3.0, 2.0)}


def test_tokens_weigh_by_token_and_rows_without_weights_by_row():
    rng = np.random.default_rng(41)
    x, weights = rng.normal(size=(5, 7)), rng.integers(0, 2, (5, 7)).astype(np.float32)
    inputs = {"x": jnp.asarray(x, jnp.float32), "weights": jnp.asarray(weights)}
    actual = scalars(returning(lambda inputs: inputs["x"]), inputs)
    assert actual["loss"] == (pytest.approx(x[weights > 0].mean(), rel=1e-5), weights.sum())
    actual = scalars(returning(lambda inputs: inputs["x"][:, 0]), {"x": inputs["x"]})
    assert actual["loss"] == (pytest.approx(x[:, 0].mean(), rel=1e-5), 5.0)


def test_a_batch_of_filler_alone_weighs_nothing():
    inputs = {"x": jnp.full(3, jnp.nan), "weights": jnp.zeros(3)}
    assert scalars(returning(lambda inputs: inputs["x"]), inputs) == {"loss": (0.0, 0.0)}


def test_microbatches_of_unequal_weight_have_the_loss_and_gradient_of_the_batch():
    def loss(params, inputs, key):
        return (inputs["x"] * params["w"] - 1.0) ** 2

    task = task_of(loss)
    inputs = {"x": jnp.arange(6.0), "weights": jnp.asarray([1.0, 2.0, 0.0, 0.0, 3.0, 1.0])}

    def loss_fn(fixed, params, non_trainable, inputs, key):
        metrics = dict(task.compute_loss(params, inputs, key))
        return metrics["loss"][0], (metrics, non_trainable)

    args = (loss_fn, {}, {"w": jnp.float32(0.3)}, {}, inputs, jax.random.key(0))
    whole, parts = (accumulation.value_and_grad(*args, accumulation_steps=n) for n in (1, 3))
    x, w = np.arange(6.0), np.asarray(inputs["weights"])
    assert float(whole[0]["loss"][0]) == pytest.approx(np.average((0.3 * x - 1) ** 2, weights=w))
    grad = np.average(2 * (0.3 * x - 1) * x, weights=w)
    for metrics, _, grads in (whole, parts):
        assert float(grads["w"]) == pytest.approx(grad, rel=1e-5)
        assert float(metrics["loss"][0]) == pytest.approx(float(whole[0]["loss"][0]), rel=1e-6)
        assert float(metrics["loss"][1]) == 7.0


def test_an_evaluation_whose_last_batch_is_filled_up_is_the_mean_over_all_rows():
    x = np.random.default_rng(42).normal(size=17).astype(np.float32)
    task, mean = task_of(lambda model, inputs, key: (inputs["x"] - 1.0) ** 2), WeightedMean()
    for batch in InMemory({"x": x}, batch_size=5, shuffle=False).batches():
        mean.add(task.compute_loss(None, jax.tree.map(jnp.asarray, batch), None))
    assert mean.result()["loss"] == pytest.approx(np.mean((x - 1.0) ** 2), rel=1e-6)


def test_records_have_a_row_per_true_example_and_what_json_takes():
    def predict(model, inputs, key):
        x = inputs["x"]
        pairs = jnp.stack([x, 2 * x], 1).astype(jnp.bfloat16)
        return {"pair": pairs, "is_positive": x > 0, "count": jnp.arange(5)}

    task = task_of(lambda *_: 0.0, predict=predict)
    outputs = jax.device_get(task.decode(None, BATCH, jax.random.key(0)))
    records = task.decode_to_records(jax.device_get(BATCH), outputs)
    assert json.loads(json.dumps(records)) == [
        {"pair": [3.0, 6.0], "is_positive": True, "count": 0},
        {"pair": [-1.0, -2.0], "is_positive": False, "count": 1},
        {"pair": [0.25, 0.5], "is_positive": True, "count": 2},
        {"pair": [7.0, 14.0], "is_positive": True, "count": 4},
    ]


def test_an_array_by_itself_is_the_prediction_and_rows_without_weights_are_all_true():
    task = task_of(lambda *_: 0.0, predict=lambda model, inputs, key: inputs["x"] + 1.0)
    inputs = {"x": np.asarray([1.0, 2.0], np.float32)}
    outputs = jax.device_get(task.decode(None, jax.tree.map(jnp.asarray, inputs), None))
    records = [{"prediction": 2.0}, {"prediction": 3.0}]
    assert task.decode_to_records(inputs, outputs) == records
    # With a weight per token, a row is filler where none of its tokens weighs anything.
    inputs["weights"] = np.asarray([[0.0, 0.0], [0.0, 1.0]])
    assert task.decode_to_records(inputs, outputs) == records[1:]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "NoneType.*'loss'"),
        (lambda inputs: inputs["x"][:, None], r"float32\(5, 1\).*'loss'.*\(5,\)"),
        (lambda inputs: inputs["x"][:2], r"float32\(2,\).*'loss'"),
        (lambda inputs: (inputs["x"], inputs["x"]), r"tuple of 2 \(float32.*'loss'"),
        ((1.0, 2.0, 3.0), "tuple of 3 .*'loss'"),
        ((1.0, {"loss": 2.0}), "'loss'. Rename"),
        ((1.0, {"norms": {"w": 2.0}}), "dict.*'norms'"),
        ((1.0, {"z": 1j}), "complex.*'z'"),
        (lambda inputs: inputs["x"] > 0, r"bool\(5,\)"),
        (3, "type int "),
    ],
)
def test_what_a_loss_returns_is_refused_with_its_name(value, message):
    with pytest.raises(ConfigError, match=f"returning.<locals>.<lambda>.*{message}"):
        returning(value).compute_loss(None, BATCH, None)


def test_what_predict_returns_needs_the_rows_first():
    cases = ((jnp.ones(3), r"float32\(3,\) as 'prediction'"), ({"a": 3}, "int as 'a'"))
    for value, message in cases:
        task = task_of(lambda *_: 0.0, predict=lambda model, inputs, key, value=value: value)
        with pytest.raises(ConfigError, match=f"{message}.*5"):
            task.decode(None, BATCH, None)
    with pytest.raises(ConfigError, match="LossTask.predict"):
        task_of(lambda *_: 0.0).decode(None, BATCH, None)


def test_functions_of_other_arguments_are_refused_in_the_constructor():
    def two(params, inputs):
        return 0.0

    def four(params, scale, inputs, key):
        return scale

    with pytest.raises(ConfigError, match=r"\(model"):
        task_of(two)
    with pytest.raises(ConfigError, match="functools.partial"):
        task_of(four)
    with pytest.raises(ConfigError, match=r"LossTask.predict"):
        task_of(lambda *_: 0.0, predict=two)
    with pytest.raises(ConfigError, match="LossTask.loss.*3"):
        task_of(3)
    bound = functools.partial(lambda scale, params, inputs, key: scale, 2.0)
    assert scalars(task_of(bound)) == {"loss": (2.0, 4.5)}
