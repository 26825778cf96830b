"""Weights in the host's memory, a layer of which is on the device in its turn: the same numbers."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import Partitioner
from praxis_lite.core.collectives import ExplicitCollectives
from praxis_lite.layers import Pipeline, Repeat, TransformerFeedForward
from praxis_lite.optimizers import VariationalNoise
from tests.support import offload_runs
from tests.support.marks import nightly_but
from tests.support.offload_runs import assert_restored, assert_same

Offloading = functools.partial(Repeat, offload_weights=True)
# The model of offload_runs has six matrices in a block.
NUM_MATRICES = 6
SETTINGS = {
    "weights": {},
    "slots too": {"host_slots": ".*", "ema_decay": 0.9},
    "microbatches": {"gradient_accumulation_steps": 11},
    "feed-forward layers frozen": {"bprop_variable_exclusion": (".*/ff_layer/.*",)},
}


@functools.cache
def partitioner_of(stack, dims, case):
    return offload_runs.partitioner(
        "save_nothing", stack=stack, dims=getattr(offload_runs, dims), **SETTINGS[case]
    )


@functools.cache
def initial(dims, case):
    """Returns an initial state as NumPy arrays; its weights were drawn into host memory."""
    made = partitioner_of(Offloading, dims, case)
    return jax.tree.map(np.asarray, made.init(made.key(0)))


@functools.cache
def run(stack, dims="EVEN", case="slots too"):
    """Returns the partitioner, and what `offload_runs.trained` does."""
    made = partitioner_of(stack, dims, case)
    return made, *offload_runs.trained(made, initial(dims, case))


@pytest.mark.parametrize("case", nightly_but({"slots too"}, SETTINGS))
def test_on_a_mesh_all_numbers_are_the_same_bit_for_bit(case):
    _, expected_losses, expected, _ = run(Repeat, case=case)
    _, losses, state, _ = run(Offloading, case=case)
    np.testing.assert_array_equal(losses, expected_losses)
    assert_same(state, expected)


@pytest.mark.slow
def test_padded_weights_are_the_same_but_for_a_rounding():
    """XLA:CPU fuses padding with what is computed of it, and rounds a sum once less."""
    _, expected_losses, expected, _ = run(Repeat, "DIMS", "weights")
    _, losses, state, _ = run(Offloading, "DIMS", "weights")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_same(state, expected, rtol=1e-5)


def test_just_the_matrices_of_the_blocks_lie_on_the_host():
    made, _, _, state = run(Offloading)
    layout = made.layout.select("mdl_vars")
    leaves = list(layout.leaves())
    for leaf, x in zip(leaves, jax.tree.leaves(state.mdl_vars), strict=True):
        # [layers, rows, columns] and more dims: biases and scales have two.
        is_expected = "params/transformer/" in leaf.path and x.ndim > 2
        assert x.sharding.memory_kind == ("pinned_host" if is_expected else "device"), leaf.path
        assert x.sharding.spec == leaf.spec
    assert sum(leaf.is_on_host for leaf in leaves) == NUM_MATRICES


@pytest.mark.slow
def test_evaluation_is_the_same_and_decoding_has_all_weights_on_the_device():
    (made, *_, state), (other, *_, expected) = run(Offloading), run(Repeat)
    batch = offload_runs.batch()
    actual = made.eval_step(state.mdl_vars, made.global_batch(batch))
    assert_same(actual, other.eval_step(expected.mdl_vars, other.global_batch(batch)))
    actual = made.for_decoding(state.mdl_vars)
    assert_same(actual, other.for_decoding(expected.mdl_vars))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(actual)} == {"device"}


def test_a_checkpoint_is_restored_with_weights_on_the_host_or_not(tmp_path):
    made, other = (partitioner_of(stack, "EVEN", "slots too") for stack in (Offloading, Repeat))
    assert_restored(tmp_path / "host", run(Offloading), other)
    expected = run(Offloading)[2]
    state = offload_runs.placed_state(other, expected)
    assert_restored(tmp_path / "device", (other, None, expected, state), made)


def test_a_step_that_is_skipped_leaves_the_weights_as_they_were():
    made = run(Offloading)[0]
    state, batch = made.init(made.key(0)), offload_runs.batch()
    old = jax.tree.map(np.array, state.mdl_vars)
    batch["weights"] = np.full_like(batch["weights"], np.nan)
    state, _ = made.train_step(state, made.global_batch(batch), made.key(7))
    assert_same(state.mdl_vars, old)
    assert state.opt_states["num_skipped_steps"] == 1


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
    made = partitioner_of(Offloading, "EVEN", "weights")
    task, mesh = made.task, made.mesh
    with pytest.raises(ConfigError, match=r"ExplicitCollectives .*Repeat.offload_weights"):
        Partitioner(task, mesh, gradients=ExplicitCollectives(("data",)))
    with pytest.raises(ConfigError, match=r"offload_weights is True.*'stage', such as a Pipeline"):
        Pipeline(repeated, 4, num_stages=2, num_microbatches=2, rngs=nnx.Rngs(0))
