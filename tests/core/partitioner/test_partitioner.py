"""One device's answer on every mesh: losses, weights, decoding; padding, donation, compiles."""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from praxis_tools.explain import hlo
from tests.decode.toy_models import num_compiled
from tests.support import plain_training
from tests.support.lm_runs import (
    MAX_NORM,
    MESHES,
    NUM_NEW_TOKENS,
    NUM_STEPS,
    PROMPT_LENGTHS,
    batches,
    lm_of,
    partitioner_of,
    plain,
    prompts,
    structs,
    trained,
)

# Axes of one device and of all; sizes that divide and that do not; slots of two kinds.
QUICK, SLOW = (
    {("uneven", "adamw", (1, 4, 2))},
    {
        ("even", "adafactor", (2, 2, 2)),
    },
)


def marks_of(*run):
    if run in QUICK:
        return []
    return [pytest.mark.slow] if run in SLOW else [pytest.mark.nightly]


every_run = pytest.mark.parametrize(
    ("size", "optimizer", "shape"),
    [
        pytest.param(*run, marks=marks_of(*run))
        for run in [
            *(("uneven", "adamw", shape) for shape in MESHES),
            ("uneven", "adafactor", (1, 4, 2)),
            ("uneven", "adafactor", (1, 3, 2)),
            ("even", "adamw", (1, 4, 2)),
            ("even", "adafactor", (2, 2, 2)),
        ]
    ],
    ids=str,
)


@every_run
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
def test_a_trained_state_has_zero_padding_donated_buffers_and_the_layouts_bytes(
    size, optimizer, shape
):
    run = trained(size, optimizer, shape)
    leaves = list(run.partitioner.layout.leaves())
    bytes_per_device = sum(leaf.bytes_per_device for leaf in leaves)
    assert hlo.num_donated(run.compiled) == len(leaves)
    assert hlo.donated_bytes(run.compiled) == bytes_per_device
    assert run.num_left == 0
    held = dict.fromkeys(run.partitioner.mesh.devices.flat, 0)
    for x in jax.tree.leaves(run.state):
        for shard in x.addressable_shards:
            held[shard.device] += math.prod(shard.data.shape) * shard.data.dtype.itemsize
    assert set(held.values()) == {bytes_per_device}
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


@functools.cache
def plain_model():
    """Returns the structure and the drawn weights of the model, without a mesh."""
    return plain_training.split_model(lm_of("uneven"))


@pytest.mark.slow
def test_init_draws_the_same_weights_on_every_mesh():
    initial, other = (trained("uneven", "adamw", shape).initial for shape in ((1, 4, 2), (1, 3, 2)))
    jax.tree.map(np.testing.assert_array_equal, other, initial)
    w = initial.mdl_vars["params"]["softmax"]["logits_ffn"]["linear"]["w"]
    expected = plain_model()[1]["softmax"]["logits_ffn"]["linear"]["w"].get_value()
    np.testing.assert_allclose(w, np.asarray(expected), atol=1e-6)


@functools.cache
def plain_eval():
    """Returns the loss of the first batch after training, on one device."""
    model = nnx.merge(plain_model()[0], plain("uneven", "adamw")[0])
    return float(plain_training.mean_loss(model, batches("uneven")[0]))


def test_eval_takes_no_slots_donates_nothing_and_agrees():
    run, inputs = trained("uneven", "adamw", (1, 4, 2)), batches("uneven")[0]
    partitioner, mdl_vars = run.partitioner, run.state.mdl_vars
    compiled = partitioner.eval_step.lower(structs(inputs)).compile()
    assert hlo.num_donated(compiled) == 0
    # Weights, batch, key.
    num_arguments = len(jax.tree.leaves((mdl_vars, inputs))) + 1
    assert len(jax.tree.leaves(compiled.in_avals)) == num_arguments
    compiled_by = [num_compiled()]
    for index, item in enumerate((inputs, inputs)):
        key = partitioner.batch_key(0, 5, index)
        metrics = partitioner.eval_step(mdl_vars, partitioner.global_batch(item), key)
        compiled_by.append(num_compiled())
    assert compiled_by[1] == compiled_by[2]
    assert not any(x.is_deleted() for x in jax.tree.leaves(mdl_vars))
    assert float(metrics["loss"][0]) == pytest.approx(plain_eval(), abs=1e-5)
    assert float(metrics["loss"][1]) == inputs["weights"].sum()


@functools.cache
def plain_decodes():
    """Returns (new tokens, log-probability, narrowest choice) per prompt, on one device."""
    weights, *_ = plain("uneven", "adamw")
    length = max(PROMPT_LENGTHS) + NUM_NEW_TOKENS
    decoder = plain_training.PlainDecoder(lm_of("uneven"), weights, length)
    rows = zip(prompts()["ids"], PROMPT_LENGTHS, strict=True)
    return [decoder.greedy(ids[:length], NUM_NEW_TOKENS) for ids, length in rows]


@pytest.mark.slow
def test_a_greedy_decode_takes_no_slots_and_gives_the_same_ids():
    run, inputs = trained("uneven", "adamw", (1, 3, 2)), prompts()
    partitioner, mdl_vars = run.partitioner, run.state.mdl_vars
    compiled = partitioner.decode_step.lower(structs(inputs)).compile()
    assert hlo.num_donated(compiled) == 0
    # Weights, batch, key.
    num_arguments = len(jax.tree.leaves((partitioner.for_decoding(mdl_vars), inputs))) + 1
    assert len(jax.tree.leaves(compiled.in_avals)) == num_arguments
    outputs = partitioner.decode_step(
        mdl_vars, partitioner.global_batch(inputs), partitioner.key(1)
    )
    assert partitioner.decode_step.num_compiled() == 1
    assert not any(x.is_deleted() for x in jax.tree.leaves(mdl_vars))
    expected = plain_decodes()
    # Only where no choice is a near tie must every mesh choose alike.
    assert min(margin for *_, margin in expected) > 1e-3
    np.testing.assert_array_equal(outputs["output_ids"][:, 0], [tokens for tokens, *_ in expected])
    np.testing.assert_allclose(
        outputs["scores"][:, 0], [log_prob for _, log_prob, _ in expected], atol=1e-4
    )


@pytest.mark.slow
def test_a_batch_smaller_than_the_device_count():
    partitioner = partitioner_of("uneven", "adamw", (2, 2, 2))
    key, inputs = partitioner.key(0), batches("uneven", num_rows=3)
    state, losses = partitioner.init(key), []
    for item in inputs:
        state, outputs = partitioner.train_step(state, partitioner.global_batch(item), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
    np.testing.assert_allclose(losses, plain("uneven", "adamw", 3)[1], atol=1e-5, rtol=0)


def test_its_repr_names_the_model_the_optimizer_the_mesh_and_the_bytes_of_a_device():
    partitioner = partitioner_of("uneven", "adamw", (1, 4, 2))
    leaves = list(partitioner.layout.select("mdl_vars").leaves())
    num_bytes = sum(leaf.bytes_per_device for leaf in leaves)
    assert repr(partitioner) == (
        "Partitioner(LanguageModelTask(TransformerLm, Learner(adamw, learning_rate=0.01)), "
        "mesh {'replica': 1, 'data': 4, 'mdl': 2}; 4,010 parameters, "
        f"{num_bytes / 1024:.1f} KiB on each device)"
    )
