"""Every optimizer on meshes: one device's weights and slots, padding, aliasing, a restore."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_tools.explain import hlo
from tests.support.lm_runs import on_host
from tests.support.optimizer_runs import (
    NUM_STEPS,
    OPTIMIZERS,
    SAVED_STEP,
    continued,
    one_device,
    trained,
)

pytestmark = pytest.mark.slow

# Slots rounded to few bits may fall to either side, by what XLA sums first; eigenvectors differ by
# rounding over the gap between two eigenvalues. Weights follow, by a rate of 0.02.
ROUGH = ("adafactor_int8", "adafactor_bfloat16", "lion", "low_precision", "soap")


def assert_same(actual, expected):
    """Checks two states in NumPy, of true shapes."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(actual)
    assert treedef == jax.tree.structure(expected)
    far = []
    for (path, a), b in zip(paths, jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        a, b, dtype = a.astype(np.float32), b.astype(np.float32), str(a.dtype)
        rtol, atol = {"int8": (0, 1), "bfloat16": (2**-7, 1e-6)}.get(dtype, (1e-5, 2e-6))
        if any(f"/{rough}{end}" in name for rough in ROUGH for end in "./"):
            atol = max(atol, 1e-3)
        if not np.allclose(a, b, rtol=rtol, atol=atol * max(1.0, np.abs(b).max(initial=0))):
            far.append(f"{name} {dtype}: {np.abs(a - b).max():.2g} of {np.abs(b).max():.2g}")
    assert not far, "\n".join(far)


every_run = pytest.mark.parametrize(
    "name", ["uneven", pytest.param("zero1", marks=pytest.mark.nightly)]
)


@every_run
def test_five_steps_are_those_of_one_device(name):
    run = trained(name)
    assert_same(on_host(run.partitioner.layout, run.last), one_device()[-1])


def test_every_optimizer_moves_all_its_weights_and_no_frozen_one():
    before, after = one_device()[0], one_device()[-1]
    for name in OPTIMIZERS:
        old, new = (state.mdl_vars["params"][name] for state in (before, after))
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), old, new)
        moved = {"emb_var": moved["emb_var"], **moved["blocks"]}
        still = {weight for weight, change in moved.items() if change == 0}
        assert still == ({"emb_var", "b"} if name == "partly_frozen" else set()), name
        assert max(moved.values()) < 0.5, name
    assert int(after.opt_states["num_skipped_steps"]) == 0


@every_run
def test_padding_is_zero_in_every_slot(name):
    run = trained(name)
    num_padded = 0
    for leaf, x in zip(run.partitioner.layout.leaves(), jax.tree.leaves(run.last), strict=True):
        assert x.shape == leaf.padded_shape, leaf.path
        outside = np.ones(x.shape, bool)
        outside[tuple(slice(dim) for dim in leaf.shape)] = False
        assert np.all(np.asarray(x)[outside] == 0), leaf.path
        num_padded += outside.any() and "/slots/" in leaf.path
    assert num_padded > 2 * len(OPTIMIZERS)


@every_run
def test_every_donated_byte_is_aliased(name):
    run = trained(name)
    leaves = list(run.partitioner.layout.leaves())
    assert hlo.num_donated(run.step) == len(leaves)
    assert hlo.donated_bytes(run.step) == sum(leaf.bytes_per_device for leaf in leaves)


@pytest.mark.nightly
def test_saved_on_one_mesh_and_restored_on_another_it_goes_on_as_it_would_have(tmp_path):
    saved, other = trained("uneven"), trained("zero1")
    with Checkpoints(tmp_path, saving=SaveSettings(max_to_keep=1)) as checkpoints:
        checkpoints.save(SAVED_STEP, saved.saved, saved.partitioner.layout, {})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(other.partitioner.layout, other.partitioner.mesh)
    assert restored.step == SAVED_STEP
    jax.tree.map(
        np.testing.assert_array_equal,
        on_host(other.partitioner.layout, restored.state),
        on_host(saved.partitioner.layout, saved.saved),
    )
    state = continued(other.partitioner, other.step, restored.state, SAVED_STEP, NUM_STEPS)
    assert_same(on_host(other.partitioner.layout, state), one_device()[-1])


@pytest.mark.nightly
def test_slots_lie_over_the_data_axis():
    specs = {leaf.path: leaf.spec for leaf in trained("zero1").partitioner.layout.leaves()}
    w = "adamw/blocks/w"
    assert specs[f"mdl_vars/params/{w}"] == P(None, None, "mdl")
    for slot in ("ema", "slots/adamw.stack_2/0/mu", "slots/adamw.stack_2/0/nu"):
        assert specs[f"opt_states/{slot}/{w}"] == P(None, "data", "mdl")
