"""A model of many separate weights costs as much per weight as one of few."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval

from praxis_lite.core import Learner, MeshConfig, NnxModel, Partitioner, make_mesh
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.layers import Repeat, Transformer
from praxis_lite.tasks.loss import LossTask
from tests.support.marks import slow_but

DIMS, NUM_LAYERS, ROWS = 3, 2, 5
SPEC = {"x": jax.ShapeDtypeStruct((ROWS, DIMS), jnp.float32)}


class Wide(nnx.Module):
    """One of the library's layers, whose blocks return a pair, as a layer of a row."""

    def __init__(self, rngs):
        block = functools.partial(Transformer, DIMS - 1, 2, 1)
        self.blocks = Repeat(block, 2, unroll=True, rngs=rngs)

    def __call__(self, x):
        return x + self.blocks(x[None, :, 1:])[0].mean()


class InARow(nnx.Module):
    """Layers in a row, made by `layer(rngs=rngs)`."""

    def __init__(self, layer, *, rngs):
        self.first = nnx.Linear(DIMS, DIMS, rngs=rngs)
        self.layers = nnx.List([layer(rngs=rngs) for _ in range(NUM_LAYERS)])

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Counting(nnx.Module):
    """Assigns to variables of its own, as a user's layer may."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (DIMS,)))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.last = nnx.Cache(jnp.zeros((ROWS, DIMS)))

    def __call__(self, x):
        self.calls[...] += 1
        self.last[...] = x
        return x * self.w[None]


def with_own_streams():
    return InARow(functools.partial(nnx.Linear, DIMS, DIMS), rngs=nnx.Rngs(3))


def with_forked_streams(rngs):
    return InARow(functools.partial(nnx.Linear, DIMS, DIMS), rngs=rngs.fork())


MODELS = {
    "weights": functools.partial(InARow, functools.partial(nnx.Linear, DIMS, DIMS)),
    "streams of its own": with_own_streams,
    "forked streams": with_forked_streams,
    "dropout": functools.partial(InARow, functools.partial(nnx.Dropout, 0.5)),
    "batch norms": functools.partial(InARow, functools.partial(nnx.BatchNorm, DIMS)),
    "assigned variables": functools.partial(InARow, Counting),
    "own layers, unrolled": functools.partial(InARow, Wide),
}


def squares(model, inputs, key):
    return jnp.mean(jnp.square(model(inputs["x"])))


def partitioner_of(build):
    task = LossTask(build, squares, Learner(optax.adam, 0.1))
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1))))


@pytest.mark.parametrize("name", slow_but(set(MODELS) - {"own layers, unrolled"}, MODELS))
def test_no_trace_walks_the_program_before_it(name, monkeypatch):
    """JAX walks it for a message of an error; before 0.12 Flax asked for one at each assignment."""
    tracer = partial_eval.DynamicJaxprTracer
    monkeypatch.setattr(tracer, "_origin_msg", lambda self: pytest.fail("walks the program"))
    partitioner = partitioner_of(MODELS[name])
    partitioner.init.trace(partitioner.key(0))
    partitioner.train_step.trace(SPEC)
    partitioner.eval_step.trace(SPEC)


def test_a_partitioner_builds_its_model_once():
    num_built = []

    def build(rngs):
        num_built.append(1)
        return MODELS["weights"](rngs=rngs)

    partitioner = partitioner_of(build)
    assert len(num_built) == 1
    partitioner.train_step.trace(SPEC)
    assert len(num_built) == 1


@pytest.mark.parametrize("name", ["forked streams", "dropout", "assigned variables"])
def test_what_is_drawn_and_assigned_under_a_trace_is_what_flax_does_without_one(name):
    build, x = MODELS[name], np.ones((ROWS, DIMS), np.float32)
    plain, model = build(rngs=nnx.Rngs(jax.random.key(2))), NnxModel(build)
    traced = jax.jit(model.init)(jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, traced, mdl_vars_of(plain))

    @jax.jit
    def after_two_passes(key):
        module = build(rngs=nnx.Rngs(key))
        return module(x), module(x), mdl_vars_of(module)

    outputs = after_two_passes(jax.random.key(2))
    expected = plain(x), plain(x), mdl_vars_of(plain)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), outputs, expected)
