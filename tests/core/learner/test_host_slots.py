"""Slots in the host's memory: the same numbers as on the device, wherever they lie."""

import functools
import re

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.trainer.layout_table import layout_table
from tests.support import offload_runs
from tests.support.offload_runs import assert_restored, assert_same

FEED_FORWARD = ".*/ff_layer/.*"


@functools.cache
def partitioner_of(host_slots, dims):
    return offload_runs.partitioner(
        "save_nothing", host_slots=host_slots, ema_decay=0.9, dims=getattr(offload_runs, dims)
    )


@functools.cache
def initial(dims):
    """Returns an initial state as NumPy arrays; its slots were created in host memory."""
    made = partitioner_of(FEED_FORWARD, dims)
    return jax.tree.map(np.asarray, made.init(made.key(0)))


@functools.cache
def run(host_slots, dims="EVEN"):
    """Returns the partitioner, and what `offload_runs.trained` does."""
    made = partitioner_of(host_slots, dims)
    return made, *offload_runs.trained(made, initial(dims))


@pytest.mark.slow
def test_padded_slots_on_the_host_are_the_same_but_for_a_rounding():
    """XLA:CPU fuses the padding with the update there, and rounds a sum of products once less."""
    _, expected_losses, expected, _ = run((), "DIMS")
    _, losses, state, _ = run(FEED_FORWARD, "DIMS")
    np.testing.assert_array_equal(losses, expected_losses)
    assert_same(state.mdl_vars, expected.mdl_vars)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())


def test_just_the_slots_and_averages_of_the_weights_lie_on_the_host():
    made, _, _, state = run(FEED_FORWARD)
    leaves = list(made.layout.leaves())
    for leaf, x in zip(leaves, jax.tree.leaves(state), strict=True):
        is_expected = leaf.path.startswith("opt_states/") and "/ff_layer/" in leaf.path
        assert x.sharding.memory_kind == ("pinned_host" if is_expected else "device"), leaf.path
        assert x.sharding.spec == leaf.spec
    # Adam's two moments, and the average, of five weights: two norms' and three matrices'.
    on_host = [leaf for leaf in leaves if leaf.is_on_host]
    assert len(on_host) % 3 == 0 and {leaf.path.split("/")[1] for leaf in on_host} == {
        "slots",
        "ema",
    }
    text = layout_table(made.layout)
    assert len(re.findall(r"\) on the host", text)) == len(on_host)
    on_device = layout_table(partitioner_of((), "EVEN").layout)
    assert "are in host memory" in text and "are in host memory" not in on_device


def test_a_step_that_is_skipped_leaves_the_slots_on_the_host_as_they_were():
    made, key = run(FEED_FORWARD)[0], run(FEED_FORWARD)[0].key(7)
    batch, first = offload_runs.batch(), made.init(made.key(0))
    state, _ = made.train_step(first, made.global_batch(batch), key)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))  # Donated, wherever it lay.
    old = jax.tree.map(np.array, state.opt_states)
    batch["weights"] = np.full_like(batch["weights"], np.nan)
    new, _ = made.train_step(state, made.global_batch(batch), key)
    assert_same(new.opt_states["slots"], old["slots"])
    assert_same(new.opt_states["ema"], old["ema"])
    assert new.opt_states["num_skipped_steps"] == 1


def test_averages_on_the_host_are_evaluated_with():
    (made, _, expected, state), other = run(FEED_FORWARD), partitioner_of((), "EVEN")
    actual = made.eval_mdl_vars(state, use_ema=True)["params"]
    assert_same(actual, other.eval_mdl_vars(expected, use_ema=True)["params"])
    assert {x.sharding.memory_kind for x in jax.tree.leaves(actual)} == {"device"}


def test_a_checkpoint_is_restored_with_slots_on_the_host_or_not(tmp_path):
    """Saved from there, restored here; and the other way round."""
    made, other = (partitioner_of(host_slots, "EVEN") for host_slots in (FEED_FORWARD, ()))
    assert_restored(tmp_path / "host", run(FEED_FORWARD), other)
    expected = run(FEED_FORWARD)[2]
    state = offload_runs.placed_state(other, expected)
    assert_restored(tmp_path / "device", (other, None, expected, state), made)


def test_a_pattern_that_matches_no_weight_is_refused():
    with pytest.raises(ConfigError, match=r"Learner.host_slots: '.\*/ff_layr.*' matches no weight"):
        offload_runs.partitioner("save_nothing", host_slots=".*/ff_layr/.*")
