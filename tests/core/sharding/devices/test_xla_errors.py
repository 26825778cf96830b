"""What XLA's partitioners compute wrong is right here; canaries: test_upstream_reports.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite.core import Learner, Partitioner, WeightSharding, constrain
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.tasks.loss import LossTask
from praxis_tools.check.asserts.layers import assert_near

IDS = np.array([1, 2, 3, 1], np.int32)  # Four, on three devices; none is 0.
UPDATES = np.array([2.0, 0.5, -3.0, 4.0], np.float32)
SCATTERS = {"add": np.add, "max": np.maximum, "min": np.minimum, "multiply": np.multiply}


def scattered(operation, initial, ids, updates):
    """Returns a split array with updates of an uneven number of rows scattered into it."""
    ids, updates = constrain(ids, ("data",)), constrain(updates, ("data",))
    updates = jnp.exp(jnp.log(jnp.abs(updates))) * jnp.sign(updates) + 0.25  # Filler is not 0.
    initial = constrain(jnp.full(5, initial), ("mdl",))
    return constrain(getattr(initial.at[ids], operation)(updates), ("mdl",))


def scattered_by_hand(operation, initial, ids, updates):
    out = np.full(5, initial, np.float32)
    SCATTERS[operation].at(out, ids, updates + 0.25)
    return out


@pytest.mark.parametrize("operation", SCATTERS)
def test_filler_is_not_scattered(operation, mesh_of, partitioner):
    """In a program's loops, branches and calls; for numbers that the filler would change."""

    def run(initial, ids, updates):
        @jax.jit
        def one(initial, ids, updates):
            return scattered(operation, initial, ids, updates)

        in_a_loop = jax.lax.map(lambda i: one(i, ids, updates), initial)
        in_a_branch = jax.lax.cond(
            ids[0] == 1, lambda i: one(i, ids, updates), lambda i: jnp.zeros(5), initial[0]
        )
        in_remat = jax.checkpoint(functools.partial(scattered, operation))(initial[0], ids, updates)
        return in_a_loop, in_a_branch, in_remat

    with jax.set_mesh(mesh_of(1, 3, 2)):
        actual = jax.jit(without_xla_errors(run))(jnp.array([-7.0, 7.0]), IDS, UPDATES)
    expected = [scattered_by_hand(operation, initial, IDS, UPDATES) for initial in (-7.0, 7.0)]
    np.testing.assert_allclose(actual[0], expected, rtol=1e-6)
    for item in actual[1:]:
        np.testing.assert_allclose(item, expected[0], rtol=1e-6)


class Tagger(nnx.Module):
    """A foreign model: classes of ids, by an embedding split over `mdl`."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(11, 6, rngs=rngs)
        self.out = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, ids):
        return self.out(jnp.tanh(self.embed(ids)))


def mean_loss(module, inputs, key):
    # The mean's gradient is the same for every row, and so not 0 for the filler.
    logits = module(inputs["ids"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, inputs["labels"]))


@pytest.mark.slow
def test_a_foreign_embedding_has_the_gradient_of_one_device_for_rows_that_do_not_divide(mesh_of):
    rng = np.random.default_rng(4)
    batch = {
        "ids": rng.integers(0, 11, (7, 3)).astype(np.int32),
        "labels": rng.integers(0, 5, (7, 3)).astype(np.int32),
    }
    task = LossTask(
        Tagger,
        mean_loss,
        Learner(optax.sgd, 1.0),
        weight_sharding=WeightSharding(strategy=[("embed/embedding", 'shard_dim("mdl", 0)')]),
        inputs_split_mapping={"map_2d": (("replica", "data"), None)},
    )
    partitioner = Partitioner(task, mesh_of(1, 3, 2))
    key = partitioner.key(0)
    state = partitioner.init(key)
    before = jax.tree.map(np.array, partitioner.layout.unpad(state).mdl_vars["params"])

    def loss(params):
        module = task.model.module({"params": params, "non_trainable": {}})
        return mean_loss(module, batch, None)

    expected = jax.grad(loss)(before)
    state, _ = partitioner.train_step(state, partitioner.global_batch(batch), key)
    after = partitioner.layout.unpad(state).mdl_vars["params"]
    actual = jax.tree.map(lambda old, new: old - np.asarray(new), before, after)
    # Rounded as the weights are, of size 1.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-7), actual, expected)


def windowed(x):
    """Returns sums and maxima over windows of one array that is split where they slide."""
    x = constrain(2.0 * x, (None, "data", None, None))
    window = {"window_dimensions": (1, 3, 3, 1), "window_strides": (1,) * 4, "padding": "SAME"}
    return {
        "cummax": jax.lax.cummax(x, 1),
        "cumsum": jnp.cumsum(x, 1),
        "cumprod": jnp.cumprod(x, 1),
        "max": jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **window),
        "sum": jax.lax.reduce_window(x, 0.0, jax.lax.add, **window),
        "convolution": jax.lax.conv_general_dilated(
            x, jnp.ones((3, 3, 1, 1)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    }


X = np.random.default_rng(1).normal(size=(2, 7, 4, 1)).astype(np.float32)


def windowed_by_hand():
    x = 2.0 * X
    around = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    sums = sum(around[:, i : i + 7, j : j + 4] for i in range(3) for j in range(3))
    around = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    maxima = np.maximum.reduce(
        [around[:, i : i + 7, j : j + 4] for i in range(3) for j in range(3)]
    )
    return {
        "cummax": np.maximum.accumulate(x, 1),
        "cumsum": np.cumsum(x, 1),
        "cumprod": np.cumprod(x, 1),
        "max": maxima,
        "sum": sums,
        "convolution": sums,
    }


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 4, 2)], ids=str)
def test_each_window_has_its_own_filler(shape, mesh_of, partitioner):
    with jax.set_mesh(mesh_of(*shape)):
        actual = jax.jit(without_xla_errors(windowed))(X)
    expected = windowed_by_hand()
    for name, x in actual.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=2e-6, err_msg=name)


def test_gradients_of_windows_are_those_of_one_device(mesh_of, partitioner):
    def total(x):
        return sum(jnp.sum(jnp.sin(y)) for name, y in windowed(x).items() if name != "cumprod")

    expected = jax.jit(jax.grad(total))(X)
    with jax.set_mesh(mesh_of(1, 2, 1)):
        actual = jax.jit(without_xla_errors(jax.grad(total)))(X)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


BATCH = ("replica", "data")


def convolved(settings, inputs, weights):
    """Returns outputs [B, H, W, D], and gradients of inputs and weights; each array is split."""
    groups, stride, dilation, of_images, of_weights = settings

    def total(x, w):
        x, w = constrain(2.0 * x, of_images), constrain(0.1 * w, of_weights)
        y = jax.lax.conv_general_dilated(
            x,
            w,
            (stride, 1),
            ((1, 1), (0, 2)),
            rhs_dilation=(1, dilation),
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y = constrain(y, of_images)
        return jnp.sum(jnp.sin(y)), y

    (_, y), (x, w) = jax.value_and_grad(total, (0, 1), has_aux=True)(inputs, weights)
    return y, constrain(x, of_images), constrain(w, of_weights)


IN_ROWS, IN_CHANNELS = (BATCH, None, None, None), (BATCH, None, None, "mdl")
CONVOLUTIONS = {  # Groups, stride, dilation, how images split, how filters do.
    "channels": (1, 2, 1, IN_CHANNELS, (None, None, "data", "mdl")),
    "channels the other way": (1, 1, 1, IN_CHANNELS, (None, None, "mdl", "data")),
    "places": (1, 2, 1, (None, "replica", None, "data"), (None, None, "data", ("mdl", "replica"))),
    "depthwise": (12, 1, 1, IN_ROWS, None),
    "depthwise, channels": (12, 2, 2, IN_CHANNELS, (None, None, None, "mdl")),
    "grouped": (3, 2, 2, IN_ROWS, (None, None, None, "data")),
    "grouped, channels": (3, 1, 1, IN_CHANNELS, None),
    "grouped, features": (6, 1, 1, (None, None, None, BATCH), (None, None, "data", None)),
    "dilated": (1, 1, 2, (None, None, "data", None), (None, None, None, "data")),
    "places and outputs": (1, 1, 1, (None, None, "data", None), (None, None, None, "data")),
    "grouped, places": (3, 1, 1, (None, "data", "mdl", None), None),
}


def images_and_filters(num_images, groups):
    rng = np.random.default_rng(num_images)
    images = rng.normal(size=(num_images, 4, 4, 12)).astype(np.float32)
    return images, rng.normal(size=(3, 3, 12 // groups, 12)).astype(np.float32)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 3, 2), marks=pytest.mark.slow),
        *(pytest.param(shape, marks=pytest.mark.nightly) for shape in ((2, 2, 2), (1, 4, 2))),
    ],
    ids=str,
)
def test_convolutions_and_their_gradients_are_those_of_one_device(shape, mesh_of, partitioner):
    """Of 7 images and of 8; with strides, dilations, groups."""
    arrays = {
        f"{name}: {rows}": images_and_filters(rows, settings[0])
        for name, settings in CONVOLUTIONS.items()
        for rows in (7, 8)
    }

    def run(arrays):
        return {
            key: convolved(CONVOLUTIONS[key.split(":")[0]], *value) for key, value in arrays.items()
        }

    expected = jax.jit(run)(arrays)
    with jax.set_mesh(mesh_of(*shape)):
        actual = jax.jit(without_xla_errors(run))(arrays)
    assert_near(actual, expected, tolerance=5e-6)
