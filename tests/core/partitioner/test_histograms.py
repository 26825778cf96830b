"""Histograms of weights and gradients, compared with NumPy, on one device and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.core.partitioner.histograms import histograms
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

# No mesh divides these dims.
NUM_IN, NUM_OUT, NUM_ROWS = 13, 37, 7
RNG = np.random.default_rng(0)
BATCH = {
    "inputs": RNG.normal(size=(NUM_ROWS, NUM_IN)).astype(np.float32),
    "labels": RNG.normal(size=(NUM_ROWS, NUM_OUT)).astype(np.float32),
}


def check(actual, x, *, atol=0.0):
    """Compares a histogram with NumPy's over the same edges."""
    x = np.asarray(x, np.float32).ravel()
    finite = x[np.isfinite(x)]
    expected, edges = np.histogram(finite, bins=64)
    np.testing.assert_allclose(actual["edges"], edges, rtol=1e-5, atol=1e-6)
    counts = np.histogram(finite, bins=np.asarray(actual["edges"], np.float64))[0]
    # Rounding may move the extreme values out of the range, and others to the next bin.
    assert np.abs(actual["counts"] - counts).sum() <= atol + 2
    assert actual["counts"].sum() == finite.size
    np.testing.assert_allclose(actual["mean"], finite.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["std"], finite.std(), rtol=1e-4, atol=1e-6)
    assert actual["num_not_finite"] == x.size - finite.size


ARRAYS = {
    "outliers": np.random.default_rng(1).standard_cauchy((7, 13, 37)).astype(np.float32),
    "not_finite": np.float32([1.0, np.nan, -3.0, np.inf, 2.5, -np.inf]),
    "equal": np.zeros(5, np.float32),
    "scalar": np.asarray(-7.0, np.float32),
    "ints": np.arange(257, dtype=np.int8),
    "nothing_finite": np.full(3, np.nan, np.float32),
}


@functools.cache
def histograms_of_arrays():
    return jax.device_get(jax.jit(histograms)(ARRAYS))


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "nothing_finite"])
def test_a_histogram_is_numpys(name):
    check(histograms_of_arrays()[name], ARRAYS[name])


def test_nothing_is_counted_without_finite_values():
    actual = histograms_of_arrays()["nothing_finite"]
    assert actual["counts"].sum() == 0 and actual["num_not_finite"] == 3
    assert np.isfinite(actual["edges"]).all()


def partitioner_on(shape, **mesh):
    def loss(params, batch, key):
        error = batch["inputs"] @ params["w"] + params["b"][None] - batch["labels"]
        return jnp.mean(jnp.square(error), axis=-1)

    def init(key):
        return {"w": jax.random.normal(key, (NUM_IN, NUM_OUT)), "b": jnp.zeros(NUM_OUT)}

    model = FunctionModel(init, specs={"w": P("data", "mdl"), "b": P("mdl")})
    task = LossTask(model, loss, Learner(optax.sgd, 1.0))
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape, **mesh)))


def test_histograms_of_a_step_are_those_of_its_weights_and_gradients():
    partitioner = partitioner_on((1, 4, 2))
    key, batch = partitioner.key(0), partitioner.global_batch(BATCH)
    state = partitioner.init(key)
    actual = jax.device_get(partitioner.histogram_step(state, batch, key))
    w = np.asarray(partitioner.layout.unpad(state).mdl_vars["params"]["w"])
    b = np.zeros(NUM_OUT)
    check(actual["weights/w"], w)
    check(actual["weights/b"], b)
    error = 2 * (BATCH["inputs"] @ w + b - BATCH["labels"]) / (NUM_ROWS * NUM_OUT)
    check(actual["gradients/w"], BATCH["inputs"].T @ error, atol=4)
    check(actual["gradients/b"], error.sum(axis=0), atol=4)
    # The state was not donated.
    partitioner.train_step(state, batch, key)


def test_sharded_arrays_are_not_gathered_and_bins_take_no_memory():
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
    sharding = NamedSharding(mesh, P("data", "mdl"))
    shape = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=sharding)
    function = jax.jit(lambda x: histograms({"x": x}), out_shardings=NamedSharding(mesh, P()))
    compiled = function.lower(shape).compile()
    text = compiled.as_text()
    assert "all-reduce" in text and "all-gather" not in text and "all-to-all" not in text
    bytes_per_device = 4 * 512 * 1024 // 8
    # Far below an array with 64 bools for each value.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * bytes_per_device
