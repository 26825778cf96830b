"""One device's answer on every mesh: losses, weights, decoding; padding, donation, compiles."""

import functools
import math
from typing import NamedTuple

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest

from praxis_lite import hlo
from praxis_lite.layers import TransformerLm, set_sharding_params
from praxis_lite.learner import Learner
from praxis_lite.partitioner import Partitioner
from praxis_lite.sharding import MeshConfig, make_mesh
from praxis_lite.train_state import TrainState
from tasks.language_model import LanguageModelTask
from tests import plain_training

MESHES = [(1, 1, 1), (1, 4, 2), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 3, 2)]
SIZES = {
    # No axis of any mesh divides these, but that the heads divide over 3 and 1.
    "uneven": dict(vocab_size=37, model_dims=13, hidden_dims=29, num_heads=3, dim_per_head=6),
    "even": dict(vocab_size=48, model_dims=24, hidden_dims=48, num_heads=8, dim_per_head=2),
}
OPTIMIZERS = {
    "adamw": optax.adamw,
    # Every matrix is factored, the tiny ones too.
    "adafactor": functools.partial(optax.adafactor, min_dim_size_to_factor=2),
}
NUM_ROWS = {"uneven": 11, "even": 24}
SEQ_LEN, NUM_STEPS, MAX_NORM, LEARNING_RATE = 7, 20, 0.5, 1e-2
PROMPT_LENGTHS, NUM_NEW_TOKENS = (5, 2, 1, 4, 3), 6


def lm_config(size):
    lm = fdl.Partial(TransformerLm, num_layers=2, **SIZES[size])
    return set_sharding_params(lm)


@functools.cache
def partitioner_of(size, optimizer, shape):
    task = LanguageModelTask(
        fdl.build(lm_config(size)),
        Learner(OPTIMIZERS[optimizer], LEARNING_RATE, clip_gradient_norm_to_value=MAX_NORM),
        inputs_split_mapping={
            "map_1d": (("replica", "data"),), "map_2d": (("replica", "data"), None),
        },
        max_decode_steps=NUM_NEW_TOKENS,
    )
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


def batches(size, num_rows=None):
    rng, rows = np.random.default_rng(3), num_rows or NUM_ROWS[size]
    out = []
    for _ in range(3):
        ids = rng.integers(0, SIZES[size]["vocab_size"], (rows, SEQ_LEN + 1)).astype(np.int32)
        weights = (rng.random((rows, SEQ_LEN)) < 0.8).astype(np.float32)
        out.append({"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights})
    return [out[i % 3] for i in range(NUM_STEPS)]


def prompts():
    ids = np.random.default_rng(5).integers(0, 37, (len(PROMPT_LENGTHS), 5)).astype(np.int32)
    lengths = np.array(PROMPT_LENGTHS, np.int32)
    return {"ids": ids, "prefix_lengths": lengths, "weights": np.ones(len(lengths), np.float32)}


def structs(inputs):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)


@functools.cache
def plain(size, optimizer, num_rows=None):
    return plain_training.train(
        fdl.build(lm_config(size)),
        OPTIMIZERS[optimizer](learning_rate=LEARNING_RATE),
        MAX_NORM,
        batches(size, num_rows),
    )


class Run(NamedTuple):
    partitioner: Partitioner
    initial: TrainState  # NumPy, true shapes
    state: TrainState
    losses: list[float]
    grad_norms: list[float]
    compiled: jax.stages.Compiled
    num_left: int  # arrays of old states that were not deleted


def on_host(layout, tree):
    return jax.tree.map(
        # Of a copy: a view would keep the buffer from being donated.
        lambda x, true: np.asarray(x.copy())[tuple(slice(dim) for dim in true.shape)],
        tree,
        layout.shapes,
    )


@functools.cache
def trained(size, optimizer, shape):
    partitioner = partitioner_of(size, optimizer, shape)
    key, inputs = partitioner.key(0), batches(size)
    compiled = partitioner.lower("train", structs(inputs[0])).compile()
    if shape == (1, 1, 1) or (size, optimizer) == ("uneven", "adamw"):
        state = partitioner.init(key)
        initial = on_host(partitioner.layout, state)
    else:  # To save time: init is the same for all, as a test below says.
        initial = trained(size, optimizer, (1, 1, 1)).initial
        padded = jax.tree.map(
            lambda x, to: np.pad(x, [(0, b - a) for a, b in zip(x.shape, to.shape, strict=True)]),
            initial,
            partitioner.layout.padded_shapes,
        )
        state = jax.device_put(padded, partitioner.layout.shardings(partitioner.mesh))
    losses, grad_norms, num_left = [], [], 0
    for one in inputs:
        old = state
        state, outputs = partitioner.train_step(old, partitioner.global_batch(one), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
        grad_norms.append(float(outputs["learner"]["grad_norm"]))
        num_left += sum(not x.is_deleted() for x in jax.tree.leaves(old))
        assert float(outputs["metrics"]["loss"][1]) == one["weights"].sum()
    assert partitioner.train_step._cache_size() == 1
    return Run(partitioner, initial, state, losses, grad_norms, compiled, num_left)


every_run = pytest.mark.parametrize("shape", MESHES, ids=str)
every_size = pytest.mark.parametrize("size", SIZES)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@every_run
@every_optimizer
@every_size
def test_losses_over_20_steps_are_those_of_one_device(size, optimizer, shape):
    run = trained(size, optimizer, shape)
    _, losses, norms = plain(size, optimizer)
    np.testing.assert_allclose(run.losses, losses, atol=1e-5, rtol=0)
    # A norm that saw padding, or a batch's padding rows, would differ.
    np.testing.assert_allclose(run.grad_norms, norms, atol=1e-5, rtol=1e-5)
    assert losses[-1] < losses[2] - 0.05
    assert max(norms) > MAX_NORM  # the clipping is at work
    assert int(run.state.step) == NUM_STEPS
    assert int(run.state.opt_states["num_skipped_steps"]) == 0


@every_run
@every_optimizer
@every_size
def test_padding_of_weights_and_slots_is_exactly_zero_after_training(size, optimizer, shape):
    run = trained(size, optimizer, shape)
    leaves = list(run.partitioner.layout.leaves())
    num_padded = 0
    for leaf, x in zip(leaves, jax.tree.leaves(run.state), strict=True):
        assert x.shape == leaf.padded_shape, leaf.path
        outside = np.ones(x.shape, bool)
        outside[tuple(slice(dim) for dim in leaf.shape)] = False
        assert np.all(np.asarray(x)[outside] == 0.0), leaf.path
        num_padded += outside.any()
        if leaf.path.startswith("mdl_vars/"):
            assert np.any(np.asarray(x)[~outside] != 0.0), leaf.path
    assert (num_padded > 10) == (size == "uneven" and shape != (1, 1, 1))
    if size == "even":
        assert num_padded == 0
    if optimizer == "adafactor":
        factored = [leaf for leaf in leaves if "/v_row/" in leaf.path and leaf.shape[-1] > 1]
        assert len(factored) == 7  # six matrices of a block, and the softmax


@every_run
@every_optimizer
@every_size
def test_every_donated_buffer_is_aliased_and_the_old_state_deleted(size, optimizer, shape):
    run = trained(size, optimizer, shape)
    leaves = list(run.partitioner.layout.leaves())
    assert hlo.num_donated(run.compiled) == len(leaves)
    assert hlo.donated_bytes(run.compiled) == sum(leaf.bytes_per_device for leaf in leaves)
    assert run.num_left == 0


@every_run
def test_init_draws_the_same_weights_on_every_mesh(shape):
    run, single = trained("uneven", "adamw", shape), trained("uneven", "adamw", (1, 1, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), run.initial, single.initial
    )
    w = run.initial.mdl_vars["params"]["softmax"]["w"]
    _, drawn = plain_training.split_model(fdl.build(lm_config("uneven")))
    np.testing.assert_allclose(w, np.asarray(drawn["softmax"]["w"].get_value()), atol=1e-6)


@every_run
def test_what_a_device_holds_is_what_the_layout_says(shape):
    run = trained("uneven", "adafactor", shape)
    held = dict.fromkeys(run.partitioner.mesh.devices.flat, 0)
    for x in jax.tree.leaves(run.state):
        for shard in x.addressable_shards:
            held[shard.device] += math.prod(shard.data.shape) * shard.data.dtype.itemsize
    assert set(held.values()) == {
        sum(leaf.bytes_per_device for leaf in run.partitioner.layout.leaves())
    }


@every_run
def test_eval_takes_no_slots_donates_nothing_and_agrees(shape):
    run, inputs = trained("uneven", "adamw", shape), batches("uneven")[0]
    partitioner, mdl_vars = run.partitioner, run.state.mdl_vars
    compiled = partitioner.lower("eval", structs(inputs)).compile()
    assert hlo.num_donated(compiled) == 0
    num_arguments = len(jax.tree.leaves((mdl_vars, inputs)))
    assert len(jax.tree.leaves(compiled.in_avals)) == num_arguments
    for one in (inputs, inputs):
        metrics = partitioner.eval_step(mdl_vars, partitioner.global_batch(one))
    assert partitioner.eval_step._cache_size() == 1
    assert not any(x.is_deleted() for x in jax.tree.leaves(mdl_vars))
    weights, *_ = plain("uneven", "adamw")
    graphdef, _ = plain_training.split_model(fdl.build(lm_config("uneven")))
    wanted = plain_training.mean_loss(plain_training.nnx.merge(graphdef, weights), inputs)
    assert float(metrics["loss"][0]) == pytest.approx(float(wanted), abs=1e-5)
    assert float(metrics["loss"][1]) == inputs["weights"].sum()


@functools.cache
def plain_decodes():
    """Returns (new tokens, log-probability, narrowest choice) per prompt, on one device."""
    weights, *_ = plain("uneven", "adamw")
    decoder = plain_training.PlainDecoder(
        fdl.build(lm_config("uneven")), weights, max(PROMPT_LENGTHS) + NUM_NEW_TOKENS
    )
    rows = zip(prompts()["ids"], PROMPT_LENGTHS, strict=True)
    return [decoder.greedy(ids[:length], NUM_NEW_TOKENS) for ids, length in rows]


@every_run
def test_a_greedy_decode_takes_no_slots_and_gives_the_same_ids(shape):
    run, inputs = trained("uneven", "adamw", shape), prompts()
    partitioner, mdl_vars = run.partitioner, run.state.mdl_vars
    compiled = partitioner.lower("decode", structs(inputs)).compile()
    assert hlo.num_donated(compiled) == 0
    # Weights, batch, key.
    num_arguments = len(jax.tree.leaves((mdl_vars, inputs))) + 1
    assert len(jax.tree.leaves(compiled.in_avals)) == num_arguments
    outputs = partitioner.decode_step(
        mdl_vars, partitioner.global_batch(inputs), partitioner.key(1)
    )
    assert partitioner.decode_step._cache_size() == 1
    assert not any(x.is_deleted() for x in jax.tree.leaves(mdl_vars))
    wanted = plain_decodes()
    # Only where no choice is a near tie must every mesh choose alike.
    assert min(margin for *_, margin in wanted) > 1e-3
    np.testing.assert_array_equal(outputs["output_ids"], [tokens for tokens, *_ in wanted])
    np.testing.assert_allclose(
        outputs["log_probs"], [log_prob for _, log_prob, _ in wanted], atol=1e-4
    )


@pytest.mark.parametrize("shape", [(1, 4, 2), (2, 2, 2)], ids=str)
def test_a_batch_smaller_than_the_device_count(shape):
    partitioner = partitioner_of("uneven", "adamw", shape)
    key, inputs = partitioner.key(0), batches("uneven", num_rows=3)
    state, losses = partitioner.init(key), []
    for one in inputs:
        state, outputs = partitioner.train_step(state, partitioner.global_batch(one), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
    np.testing.assert_allclose(losses, plain("uneven", "adamw", 3)[1], atol=1e-5, rtol=0)
