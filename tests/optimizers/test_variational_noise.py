"""Variational noise, and what keys dropout gets: per step, layer and microbatch, on any mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, Task
from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    WeightSpec,
    constrain,
    make_mesh,
)
from praxis_lite.layers import BaseLayer, Dropout, Repeat
from praxis_lite.optimizers import VariationalNoise

SPLIT = {"map_2d": (("replica", "data"), "mdl")}
NUM_LAYERS, ROWS, WIDTH = 3, 11, 13


def weights():
    rng = np.random.default_rng(0)
    shapes = {"a": (257, 37), "b": (257, 37), "stack": (3, 37)}
    lm = {name: {"w": rng.normal(size=s).astype(np.float32)} for name, s in shapes.items()}
    return {"lm": lm, "head": {"w": rng.normal(size=(7,)).astype(np.float32)}}


def noise_of(regex, key=0, step=0, params=None, **settings):
    """Returns the noise of each weight, by the first names of its path."""
    params = params or weights()
    noise = VariationalNoise(scale=0.3, regex=regex, **settings)
    # In float64, so that the difference is what was added, rounded once.
    added = jax.tree.map(
        lambda new, old: np.asarray(new, np.float64) - old,
        noise.apply(params, jax.random.key(key), jnp.int32(step)),
        params,
    )
    lm = {f"lm/{name}": x["w"] for name, x in added.get("lm", {}).items()}
    return lm | ({"head": added["head"]["w"]} if "head" in added else {})


def test_noise_is_gaussian_of_the_scale_where_the_pattern_matches_from_the_start():
    noise = noise_of("lm/(a|b)")
    for name in ("lm/a", "lm/b"):
        np.testing.assert_allclose(np.std(noise[name]), 0.3, rtol=0.02)
        np.testing.assert_allclose(np.mean(noise[name]), 0.0, atol=0.01)
    assert not noise["lm/stack"].any() and not noise["head"].any()
    # Pax's too is `re.match`: a prefix is enough, and the middle of a path is not.
    assert noise_of("he")["head"].any() and not noise_of("w|head")["lm/a"].any()


def test_each_weight_and_each_key_has_noise_of_its_own():
    noise = noise_of("lm")
    assert np.abs(np.corrcoef(noise["lm/a"].ravel(), noise["lm/b"].ravel())[0, 1]) < 0.05
    assert np.abs(np.corrcoef(noise["lm/stack"])[0, 1:]).max() < 0.5  # The layers of a stack.
    other = noise_of("lm", key=1)
    assert np.abs(np.corrcoef(noise["lm/a"].ravel(), other["lm/a"].ravel())[0, 1]) < 0.05


def test_a_weights_noise_does_not_depend_on_the_other_weights():
    alone = {"lm": {"b": weights()["lm"]["b"]}}
    np.testing.assert_array_equal(noise_of("lm", params=alone)["lm/b"], noise_of("")["lm/b"])


def test_there_is_no_noise_before_start_step():
    assert not any(x.any() for x in noise_of("", step=4, start_step=5).values())
    assert all(x.any() for x in noise_of("", step=5, start_step=5).values())


def test_bfloat16_weights_keep_their_type():
    params = {"w": jnp.ones((5,), jnp.bfloat16)}
    noise = VariationalNoise(scale=0.3, regex="w")
    noisy = noise.apply(params, jax.random.key(0), jnp.int32(0))
    assert noisy["w"].dtype == jnp.bfloat16 and (noisy["w"] != 1).any()


def test_noise_has_the_same_bits_on_every_mesh(mesh_of):
    noise = VariationalNoise(scale=0.3, regex="lm/a")

    @functools.partial(jax.jit, static_argnums=0)
    def noisy(split, params, key):
        params["lm"]["a"]["w"] = constrain(params["lm"]["a"]["w"], split)  # 257 x 37: uneven.
        return noise.apply(params, key, jnp.int32(0))["lm"]["a"]["w"]

    actual = []
    for shape in ((1, 1, 1), (1, 4, 2)):
        with jax.set_mesh(mesh_of(*shape)):
            actual.append(np.asarray(noisy(("data", "mdl"), weights(), jax.random.key(3))))
    np.testing.assert_array_equal(*actual)


def test_a_pattern_that_matches_nothing_is_an_error_with_the_paths_there_are():
    specs = jax.tree.map(lambda x: WeightSpec(x.shape, x.dtype), weights())
    VariationalNoise(0.1, "lm/a").check(specs)
    message = "'linear'.*head/w, lm/a/w, lm/b/w, lm/stack/w"
    with pytest.raises(ConfigError, match=message):
        VariationalNoise(0.1, "linear").check(specs)
    with pytest.raises(ConfigError, match="params/"):
        noise_of("params/lm")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"scale": 0.0}, "scale.*0.0"),
        ({"scale": float("nan")}, "scale.*nan"),
        ({"start_step": -1}, "start_step.*-1"),
        ({"regex": "lm/("}, re.escape("'lm/('")),
    ],
)
def test_ill_formed_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        VariationalNoise(**{"scale": 0.1, "regex": "lm", **settings})


class Recorder(BaseLayer):
    """Drops out ones, and keeps each mask in a variable: a row per microbatch of a step."""

    def __init__(self, *, num_calls, rngs):
        self.dropout = Dropout(0.5)
        self.w = self.weight((WIDTH,), ("mdl",), rngs=rngs, init=nnx.initializers.ones)
        shape = (num_calls, ROWS * 2 // num_calls, WIDTH)
        self.masks = nnx.Variable(jnp.zeros(shape, bool))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, *, key=None, cache=None):
        dropped = self.dropout(jnp.ones_like(x), key)
        # The mesh has only to do with where this is computed.
        dropped = constrain(dropped, (("replica", "data"), "mdl"))
        count = self.count[...]
        self.masks.set_value(self.masks[...].at[count].set(dropped > 0))
        self.count.set_value((count + 1) % self.masks.shape[0])
        return x * dropped * self.w[...][None], cache


class RecordedTask(Task):
    def compute_loss(self, model, inputs, key):
        outputs, _ = model(inputs["x"], key=key)
        return {"loss": (jnp.mean(outputs), jnp.float32(len(outputs)))}


@functools.cache
def masks(shape, *, num_calls, unroll=False, num_steps=1):
    """Returns [steps, layers, microbatches, rows, width] of bool."""
    recorder = functools.partial(Recorder, num_calls=num_calls)
    task = RecordedTask(
        functools.partial(Repeat, recorder, NUM_LAYERS, unroll=unroll),
        Learner(optax.sgd, 0.0, gradient_accumulation_steps=num_calls),
        inputs_split_mapping=SPLIT,
    )
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))
    key = partitioner.key(0)
    state, recorded = partitioner.init(key), []
    batch = partitioner.global_batch({"x": np.ones((ROWS * 2, WIDTH), np.float32)})
    for _ in range(num_steps):
        state, _ = partitioner.train_step(state, batch, key)
        kept = jax.tree.leaves_with_path(state.mdl_vars["non_trainable"])
        # `count` is the other variable.
        of_step = [np.asarray(x) for path, x in kept if "masks" in jax.tree_util.keystr(path)]
        recorded.append(np.stack(of_step) if unroll else of_step[0])
    return np.stack(recorded)


def assert_unlike(a, b):
    """Checks that two masks agree no more than by chance, half the elements."""
    assert 0.35 < np.mean(a == b) < 0.65


@pytest.mark.slow
def test_dropout_masks_differ_between_steps_layers_and_microbatches():
    actual = masks((1, 1, 1), num_calls=2, num_steps=2)
    assert actual.shape == (2, NUM_LAYERS, 2, ROWS, WIDTH)
    assert 0.4 < actual.mean() < 0.6
    flat = actual.reshape(-1, ROWS, WIDTH)
    for i in range(len(flat)):
        for j in range(i):
            assert_unlike(flat[i], flat[j])


@pytest.mark.slow
def test_an_unrolled_stack_has_the_masks_of_a_scanned_one():
    scanned = masks((1, 1, 1), num_calls=2, num_steps=2)[:1]
    np.testing.assert_array_equal(masks((1, 1, 1), unroll=True, num_calls=2), scanned)


def test_dropout_masks_have_the_same_bits_on_every_mesh():
    on_mesh = masks((1, 4, 2), num_calls=2, num_steps=2)
    np.testing.assert_array_equal(on_mesh, masks((1, 1, 1), num_calls=2, num_steps=2))


def test_gradients_are_of_noisy_weights_and_the_update_of_those_without():
    class Square(BaseLayer):
        def __init__(self, *, rngs):
            self.w = self.weight((7, 13), ("data", "mdl"), rngs=rngs)

    class SquareTask(Task):
        def compute_loss(self, model, inputs, key):
            loss = 0.5 * jnp.sum(jnp.square(model.w[...])) + 0.0 * jnp.sum(inputs["x"])
            return {"loss": (loss, jnp.float32(1.0))}

    learner = Learner(optax.sgd, 0.5, variational_noise=VariationalNoise(0.3, "w", start_step=1))
    task = SquareTask(Square, learner, inputs_split_mapping=SPLIT)
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2))))
    key = partitioner.key(0)
    state = partitioner.init(key)
    batch = partitioner.global_batch({"x": np.ones((8, 2), np.float32)})
    seen = [np.asarray(state.mdl_vars["params"]["w"].copy())[:7, :13]]
    for _ in range(3):
        state, _ = partitioner.train_step(state, batch, key)
        seen.append(np.asarray(state.mdl_vars["params"]["w"].copy())[:7, :13])
    # The gradient is the noisy weight itself.
    noise = [(old - new) / 0.5 - old for old, new in zip(seen, seen[1:], strict=False)]
    np.testing.assert_allclose(noise[0], 0.0, atol=1e-6)
    for item in noise[1:]:
        np.testing.assert_allclose(np.std(item), 0.3, rtol=0.3)
    assert np.abs(np.corrcoef(noise[1].ravel(), noise[2].ravel())[0, 1]) < 0.35
