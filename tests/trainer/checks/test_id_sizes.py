"""How many ids a batch's integers may be is read off any model's program."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import Learner, NnxModel
from praxis_lite.core.sharding.batch_sharding import check_ids
from praxis_lite.models import FunctionModel, LinenModel
from praxis_lite.tasks.loss import LossTask
from praxis_lite.trainer.checks.id_sizes import num_ids_of

VOCAB, CLASSES, DIMS = 37, 7, 5
SPEC = {
    "tokens": jax.ShapeDtypeStruct((3, 11), jnp.int32),
    "target": jax.ShapeDtypeStruct((3,), jnp.int32),
    "x": jax.ShapeDtypeStruct((3, 2), jnp.float32),
}


def init(key):
    return {"table": jnp.ones((VOCAB, DIMS)), "out": jnp.ones((DIMS, CLASSES))}


def logits_of(params, inputs):
    return params["table"][inputs["tokens"]].mean(1) @ params["out"]


LOSSES = {
    "optax": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y),
    "one-hot": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, CLASSES)),
    "smooth": lambda z, y: optax.softmax_cross_entropy(
        z, optax.smooth_labels(jax.nn.one_hot(y, CLASSES), 0.1)
    ),
    "take_along_axis": lambda z, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None].astype(jnp.int32), axis=1)[:, 0]
    ),
    "a row at a time": lambda z, y: -jax.vmap(lambda z, y: z[y])(jax.nn.log_softmax(z), y),
    "a slice at a time": lambda z, y: (
        -jax.vmap(lambda z, y: jax.lax.dynamic_index_in_dim(z, y, keepdims=False))(
            jax.nn.log_softmax(z), y
        )
    ),
    "behind a barrier": lambda z, y: LOSSES["optax"](*jax.lax.optimization_barrier((z, y))),
    "two indices": lambda z, y: -jax.nn.log_softmax(z)[jnp.arange(3), y],
}


@pytest.mark.parametrize("name", LOSSES)
def test_labels_and_tokens_of_plain_functions(name):
    def loss(params, inputs, key):
        return LOSSES[name](logits_of(params, inputs), inputs["target"])

    task = LossTask(FunctionModel(init), loss, Learner(optax.sgd, 0.1))
    assert num_ids_of(task, SPEC) == {"tokens": VOCAB, "target": CLASSES}
    batch = {"target": np.array([0, CLASSES, 1], np.int32), "tokens": np.zeros((3, 11), np.int32)}
    with pytest.raises(ConfigError, match="1.*target.* 7;.* 6"):
        check_ids(batch, num_ids_of(task, SPEC), "datasets.train, batch 0")


def test_a_task_can_declare_another_size_than_its_loss_shows():
    class Smaller(LossTask):
        def num_ids(self):
            return {"target": 3}

    def loss(params, inputs, key):
        return LOSSES["optax"](logits_of(params, inputs), inputs["target"])

    task = Smaller(FunctionModel(init), loss, Learner(optax.sgd, 0.1))
    assert num_ids_of(task, SPEC) == {"tokens": VOCAB, "target": 3}


@pytest.mark.parametrize(
    "safe",
    [
        lambda y: jnp.where(y < 0, 0, y),
        lambda y: y % CLASSES,
        lambda y: jnp.clip(y, 0, 6),
        lambda y: jnp.minimum(y, 6),
        lambda y: y - 1,
    ],
)
def test_numbers_that_a_loss_changes_first_are_its_own_affair(safe):
    def loss(params, inputs, key):
        z = jnp.take(params["table"], inputs["tokens"], axis=0, mode="clip").mean(1) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(z, safe(inputs["target"]))

    task = LossTask(FunctionModel(init), loss, Learner(optax.sgd, 0.1))
    assert num_ids_of(task, SPEC) == {}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(CLASSES)(nn.Embed(VOCAB, DIMS)(tokens).mean(1))


class Nnx(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCAB, DIMS, rngs=rngs)
        self.out = nnx.Linear(DIMS, CLASSES, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.embed(tokens).mean(1))


@pytest.mark.parametrize(
    "model", [LinenModel(Linen(), jnp.zeros((1, 11), jnp.int32)), NnxModel(Nnx)]
)
def test_models_of_flax(model):
    def loss(model, inputs, key):
        return LOSSES["optax"](model(inputs["tokens"]), inputs["target"])

    task = LossTask(model, loss, Learner(optax.sgd, 0.1))
    assert num_ids_of(task, SPEC) == {"tokens": VOCAB, "target": CLASSES}
