"""Weights and slots in the host's memory: the same numbers as on the device, wherever they lie."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import Partitioner
from praxis_lite.core.collectives import ExplicitCollectives
from praxis_lite.layers import Pipeline, Repeat, TransformerFeedForward
from praxis_lite.optimizers import VariationalNoise
from praxis_lite.trainer.layout_table import layout_table
from tests.support import offload_runs
from tests.support.marks import nightly_but
from tests.support.offload_runs import assert_restored, assert_same

Offloading = functools.partial(Repeat, offload_weights=True)
# The model of offload_runs has six matrices in a block.
NUM_MATRICES = 6
# Settings of the learner.
SETTINGS = {
    "averages": {"ema_decay": 0.9},
    "microbatches": {"gradient_accumulation_steps": 11},
    "feed-forward layers frozen": {"bprop_variable_exclusion": (".*/ff_layer/.*",)},
}


@functools.cache
def partitioner_of(stack, dims, case):
    settings = dict(SETTINGS[case])
    if stack is Offloading and case == "averages":
        settings["host_slots"] = ".*/ff_layer/.*"
    dims = getattr(offload_runs, dims)
    return offload_runs.partitioner("save_nothing", stack=stack, dims=dims, **settings)


@functools.cache
def initial(dims, case):
    """Returns an initial state as NumPy arrays; it was drawn into host memory."""
    made = partitioner_of(Offloading, dims, case)
    return jax.tree.map(np.asarray, made.init(made.key(0)))


@functools.cache
def run(stack, dims="EVEN", case="averages"):
    """Returns the partitioner, and what `offload_runs.trained` does."""
    made = partitioner_of(stack, dims, case)
    return made, *offload_runs.trained(made, initial(dims, case))


@pytest.mark.parametrize("case", nightly_but({"averages"}, SETTINGS))
def test_on_a_mesh_all_numbers_are_the_same_bit_for_bit(case):
    _, expected_losses, expected, _ = run(Repeat, case=case)
    _, losses, state, _ = run(Offloading, case=case)
    np.testing.assert_array_equal(losses, expected_losses)
    assert_same(state, expected)


@pytest.mark.slow
def test_padded_weights_and_slots_are_the_same_but_for_a_rounding():
    """XLA:CPU fuses padding with what is computed of it, and rounds a sum once less."""
    _, expected_losses, expected, _ = run(Repeat, "DIMS")
    _, losses, state, _ = run(Offloading, "DIMS")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_same(state, expected, rtol=1e-5)


def is_on_host(path, x):
    if path.startswith("mdl_vars/params/transformer/"):
        # [layers, rows, columns] and more dims: biases and scales have two.
        return x.ndim > 2
    return path.startswith("opt_states/") and "/ff_layer/" in path


def test_just_the_matrices_of_the_blocks_and_the_slots_that_are_named_lie_on_the_host():
    made, _, _, state = run(Offloading)
    leaves = list(made.layout.leaves())
    for leaf, x in zip(leaves, jax.tree.leaves(state), strict=True):
        expected = "pinned_host" if is_on_host(leaf.path, x) else "device"
        assert x.sharding.memory_kind == expected, leaf.path
        assert x.sharding.spec == leaf.spec
    on_host = [leaf.path.split("/")[:2] for leaf in leaves if leaf.is_on_host]
    assert on_host.count(["mdl_vars", "params"]) == NUM_MATRICES
    # Adam's two moments, and the average, of five weights: two norms' and three matrices'.
    assert on_host.count(["opt_states", "slots"]) == 2 * on_host.count(["opt_states", "ema"]) > 0
    text = layout_table(made.layout)
    assert len(re.findall(r"\) on the host", text)) == len(on_host)
    on_device = layout_table(partitioner_of(Repeat, "EVEN", "averages").layout)
    assert "are in host memory" in text and "are in host memory" not in on_device


def test_evaluation_is_the_same_and_decoding_has_all_weights_on_the_device():
    (made, *_, state), (other, *_, expected) = run(Offloading), run(Repeat)
    batch = offload_runs.batch()
    actual = made.eval_step(state.mdl_vars, made.global_batch(batch))
    assert_same(actual, other.eval_step(expected.mdl_vars, other.global_batch(batch)))
    averages = made.eval_mdl_vars(state, use_ema=True)
    assert_same(averages, other.eval_mdl_vars(expected, use_ema=True))
    assert memory_kinds(averages) == memory_kinds(state.mdl_vars)
    decoding = made.for_decoding(state.mdl_vars)
    assert_same(decoding, other.for_decoding(expected.mdl_vars))
    assert set(memory_kinds(decoding)) == {"device"}


def memory_kinds(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def test_a_checkpoint_is_restored_with_weights_and_slots_on_the_host_or_not(tmp_path):
    """Saved from there, restored here; and the other way round."""
    source, other = run(Offloading), partitioner_of(Repeat, "EVEN", "averages")
    assert_restored(tmp_path / "host", source, other)
    made, _, expected, _ = source
    state = offload_runs.placed_state(other, expected)
    assert_restored(tmp_path / "device", (other, None, expected, state), made)


def test_a_step_that_is_skipped_leaves_what_is_on_the_host_as_it_was():
    made = run(Offloading)[0]
    first, key, batch = made.init(made.key(0)), made.key(7), offload_runs.batch()
    state, _ = made.train_step(first, made.global_batch(batch), key)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))  # Donated, wherever it lay.
    old = jax.tree.map(np.array, state)
    batch["weights"] = np.full_like(batch["weights"], np.nan)
    new, _ = made.train_step(state, made.global_batch(batch), key)
    assert_same(new.mdl_vars, old.mdl_vars)
    for name in ("slots", "ema"):
        assert_same(new.opt_states[name], old.opt_states[name])
    assert new.opt_states["num_skipped_steps"] == 1


def repeated(rngs, stack=Offloading):
    def block(rngs):
        return TransformerFeedForward(input_dims=8, hidden_dims=16, rngs=rngs)

    return stack(block, 2, rngs=rngs)


@pytest.mark.parametrize(
    "setting, value",
    [
        ("unroll", True),
        ("stack_split", "mdl"),
        ("checkpoint_policy", "save_everything"),
    ],
)
def test_what_would_keep_all_weights_on_the_device_is_refused(setting, value):
    stack = functools.partial(Offloading, **{setting: value})
    with pytest.raises(ConfigError, match=f"Repeat.offload_weights .*{setting}={value!r}"):
        repeated(nnx.Rngs(0), stack)


def test_what_cannot_have_weights_on_the_host_says_so():
    noise = VariationalNoise(0.1, ".*")
    with pytest.raises(ConfigError, match=r"variational_noise .*Repeat.offload_weights"):
        offload_runs.partitioner("save_nothing", stack=Offloading, variational_noise=noise)
    made = partitioner_of(Offloading, "EVEN", "averages")
    task, mesh = made.task, made.mesh
    with pytest.raises(ConfigError, match=r"ExplicitCollectives .*Repeat.offload_weights"):
        Partitioner(task, mesh, gradients=ExplicitCollectives(("data",)))
    with pytest.raises(ConfigError, match=r"offload_weights is True.*'stage', such as a Pipeline"):
        Pipeline(repeated, 4, num_stages=2, num_microbatches=2, rngs=nnx.Rngs(0))


def test_a_pattern_of_slots_that_matches_no_weight_is_refused():
    with pytest.raises(ConfigError, match=r"Learner.host_slots: '.\*/ff_layr.*' matches no weight"):
        offload_runs.partitioner("save_nothing", host_slots=".*/ff_layr/.*")
