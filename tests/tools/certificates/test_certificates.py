"""Certificates of training steps: correct jobs are certified, and each fault is located."""

import contextlib
import dataclasses
import functools
import itertools
import json
import types

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import praxis_lite
from praxis_lite import ConfigError, NotCertified
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.step_store import DiskSteps
from praxis_lite.core.learner.optimizer_groups import AuxiliaryOptimizer
from praxis_lite.core.partitioner.compiled_steps import TrainStep
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.optimizers import DynamicLossScale
from praxis_tools.certificates import element_hash, rerun
from praxis_tools.certificates.certificates_hook import NotRestored
from praxis_tools.certificates.diagnosis import (
    CauseSearch,
    replica_differences,
    restored_state_differences,
)
from praxis_tools.certificates.placements import MeshTransfer, other_meshes, rotated_order
from praxis_tools.certificates.state_digests import StateDigests
from praxis_tools.certificates.update import UpdateCheck
from praxis_tools.check import tolerances
from tests.support.marks import slow_or_nightly
from tests.tools.certificates import planted
from tests.tools.certificates.faults import all_faults
from tests.tools.check import tiny

RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True, scope="module")
def eight_devices():
    """Starts JAX with the devices of conftest.py, before a job simulates fewer."""
    jax.devices()


def digest_by_hand(x):
    """Returns the digest of an array, from the definition in integers of Python."""

    def mixed(h):
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    lanes = [0, 0]
    for index, word in enumerate(np.asarray(x).reshape(-1).view(np.uint32).tolist()):
        first = mixed(word ^ mixed((index * 0x9E3779B9 + 0x7F4A7C15) % 2**32))
        lanes = [(lanes[0] + first) % 2**32, (lanes[1] + mixed(first ^ 0x85EBCA6B)) % 2**32]
    return "".join(f"{lane:08x}" for lane in lanes)


@functools.cache
def state_on(shape):
    """Returns a layout, a mesh and a state of tiny.Points on it: the same numbers on each."""
    job = planted.Job(tiny.Points, shape, num_steps=0)
    return job.own.layout, job.mesh, job.state


def test_digests_are_the_same_on_every_mesh_and_as_by_hand():
    saved = {}
    for shape in ((2, 2), (4, 1)):  # Five hidden features: with padding, and without.
        layout, mesh, state = state_on(shape)
        digests = StateDigests(layout, mesh)(state)
        assert not list(digests.replica_mismatches())
        w = np.asarray(state.mdl_vars["params"]["first"]["w"])[:6, :5]
        assert digests.by_leaf["mdl_vars/params/first/w"] == digest_by_hand(w)
        if saved:
            assert digests.by_leaf == saved["leaves"]
            assert digests.of_state == saved["state"]
            assert not restored_state_differences(layout, mesh, saved, digests)
        saved = digests.to_save()


def test_padding_behind_the_127th_element_of_a_block_is_not_in_a_digest(mesh_of):
    mesh = mesh_of(2, axis_names=("data",))
    shapes = {"w": jax.ShapeDtypeStruct((263,), np.float32)}
    layout = StateLayout(shapes, {"w": PartitionSpec("data")}, {"data": 2})
    w = RNG.normal(size=264).astype(np.float32)  # The last element is padding.
    state = jax.device_put({"w": w}, layout.shardings(mesh))
    assert StateDigests(layout, mesh)(state).by_leaf == {"w": digest_by_hand(w[:263])}


def test_arrays_and_keys_move_to_another_order_of_the_devices(mesh_of):
    mesh = mesh_of(4, axis_names=("data",))
    devices = mesh.devices[[2, 0, 3, 1]]
    other = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    keys = jax.random.split(jax.random.key(7), 4)
    arrays = {"keys": keys, "w": RNG.normal(size=(8, 3)).astype(np.float32)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    specs = {"keys": PartitionSpec("data"), "w": PartitionSpec("data", None)}
    layout = StateLayout(shapes, specs, {"data": 4})
    state = jax.device_put(arrays, layout.shardings(mesh))
    moved = MeshTransfer(layout, mesh, layout, other)(state)
    assert all(x.sharding.mesh == other for x in moved.values())
    np.testing.assert_array_equal(moved["w"], arrays["w"])
    np.testing.assert_array_equal(*map(jax.random.key_data, (moved["keys"], keys)))


def test_a_copy_that_drifts_and_a_stale_block_are_named():
    layout, mesh, state = state_on((4, 1))
    digests_of = StateDigests(layout, mesh)
    saved = digests_of(state).to_save()
    leaf = "mdl_vars/params/first/b"
    drifted = planted.changed(state, leaf, lambda x: planted.with_copy(x, [2], planted.one_bit))
    (actual,) = replica_differences(layout, mesh, digests_of(drifted))
    assert (actual.device, actual.axis) == ("device 2 (cpu) of process 0", "data")
    assert (actual.layer, actual.leaf, actual.kind) == ("first", leaf, "replicas")
    leaf = "mdl_vars/params/first/w"
    stale = planted.changed(state, leaf, lambda x: planted.with_copy(x, [1], np.zeros_like))
    # No other device has that block.
    assert not replica_differences(layout, mesh, digests_of(stale))
    (actual,) = restored_state_differences(layout, mesh, saved, digests_of(stale))
    assert (actual.device, actual.leaf) == ("device 1 (cpu) of process 0", leaf)
    assert (actual.layer, actual.kind) == ("first", "restored state")


def test_a_digest_tells_elements_that_change_places_and_bits_of_any_type():
    digest = lambda x: element_hash.digest(x, element_hash.indices(x.shape, x.shape)).tolist()  # noqa: E731
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.float8_e4m3fn):
        # By NumPy, because not every CPU computes in every type.
        x = np.asarray([0, 1, 0, 0], dtype)
        assert digest(jnp.asarray(x)) != digest(jnp.asarray(np.roll(x, 1)))
        assert digest(jnp.asarray(x)) == digest(jnp.asarray(x.copy()))
    assert digest(jnp.asarray([0.0])) != digest(jnp.asarray([-0.0]))


def test_tolerances_follow_what_rounding_moves():
    leaves = {f"gradients/{k}": RNG.normal(size=5).astype(np.float32) for k in range(7)}
    leaves["metrics/loss/value"] = np.float32(2.5)

    def moved(share):
        return {
            k: (x * (1 + share * RNG.normal(size=x.shape))).astype(np.float32)
            for k, x in leaves.items()
        }

    def failed(rounding, actual):
        compared = tolerances.by_rounding("mesh", leaves, [moved(rounding)], actual)
        return [x.leaf for x in compared if not x.is_equal]

    for rounding in (1e-7, 1e-3):
        assert not failed(rounding, moved(rounding))
        wrong = {**moved(rounding), "gradients/3": leaves["gradients/3"] * (1 + 300 * rounding)}
        assert failed(rounding, wrong) == ["gradients/3"]


def test_meshes_that_share_no_split_come_first(mesh_of):
    meshes = [tuple(item.devices.shape) for item in other_meshes(mesh_of(1, 8, 1))]
    assert meshes[0] == (4, 1, 2)
    assert (1, 8, 1) not in meshes
    assert len(meshes) == 10
    assert meshes[-1] == (1, 1, 1, 8)
    single, whole = other_meshes(mesh_of(8, axis_names=("data",)))
    assert dict(single.shape) == {"data": 4, "copies": 2}
    assert dict(whole.shape) == {"data": 1, "copies": 8}
    (alone,) = other_meshes(mesh_of(1, axis_names=("data",)))
    assert dict(alone.shape) == {"data": 1, "copies": 1}
    assert rotated_order([1, 4, 6], 8) == [0, 4, 2, 3, 6, 5, 1, 7]


@pytest.mark.slow
def test_a_right_step_is_certified_and_one_bit_of_a_gradient_is_not():
    job = planted.Job(tiny.Points, (2, 2))
    certifier = job.certifier()
    made = certifier.certify(job.state, job.batch, job.key, job.step)
    assert not made.failed
    assert certifier.is_exact
    assert certifier.reruns[2].name == "data 4"
    assert {x.mesh for x in made.comparisons} == {rerun.MOVED, "data 4"}
    assert made.update is None  # The state before the step was not kept.
    digests = {k: x.copy() for k, x in made.baseline.digests.items()}
    digests["gradients/last/w"][0] ^= 1
    turned = dataclasses.replace(made.baseline, digests=digests)
    (failed,) = [x for x in rerun.compare_bits(made.baseline, turned) if not x.is_equal]
    assert failed.leaf == "gradients/last/w"

    # The update too, and one bit of a block that no other device has.
    for leaf in ("", "mdl_vars/params/first/w", "opt_states/slots/unstacked/0/nu/last/w"):
        certifier.take_snapshot(job.state, job.step)
        job.train()
        if leaf:
            job.state = planted.changed(
                job.state, leaf, lambda x: planted.with_copy(x, [3], planted.one_bit)
            )
        made = certifier.certify(job.state, job.batch, job.key, job.step)
        assert (made.update.num_arrays, made.update.is_exact) == (17, True)
        assert [x.leaf for x in made.failed] == ([leaf] if leaf else [])
        if leaf:
            difference = CauseSearch(certifier, made).find()
            assert (difference.device, difference.leaf) == ("device 3 (cpu) of process 0", leaf)
            assert difference.axis == "data 1, mdl 1"
    certifier.close()


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="certify_every_steps is 0"):
        praxis_lite.RunConfig(num_train_steps=3, certify_every_steps=0)
    with pytest.raises(ConfigError, match="certify_action is 'go on'.*stop, report"):
        praxis_lite.RunConfig(num_train_steps=3, certify_action="go on")


class Certified(tiny.Points):
    """Points, certified every two steps."""

    def run(self):
        config = super().run()
        config.num_train_steps, config.certify_every_steps = 4, 2
        return config


def lines_of(job):
    """Returns the lines of a job's certificates."""
    return [json.loads(line) for line in (job / "certificates.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_job_is_certified_and_a_stale_block_after_a_restore_ends_it(tmp_path, monkeypatch):
    train = functools.partial(praxis_lite.train, Certified, tmp_path, packages=["tests"])
    train()
    assert [(x["step"], x["certified"], x["rows"]) for x in lines_of(tmp_path)] == [
        (2, True, 4),
        (4, True, 4),
    ]
    updates = {"arrays": 17, "of_arrays": 17, "bits": True}
    assert [x["update"] for x in lines_of(tmp_path)] == [updates] * 2
    restore = Checkpoints.restore

    def stale(*args, **named):
        restored = restore(*args, **named)
        state = planted.changed(
            restored.state,
            "opt_states/ema/last/w",
            lambda x: planted.with_copy(x, [3], np.zeros_like),
        )
        return dataclasses.replace(restored, state=state)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "restore", stale)
        with pytest.raises(NotRestored, match="differs from the saved state.*device 3.*ema/last/w"):
            train(settings={"run.num_train_steps": 6})
    last = lines_of(tmp_path)[-1]
    assert (last["step"], last["certified"]) == (4, False)
    assert last["difference"]["leaf"] == "opt_states/ema/last/w"
    # On another mesh it is the same state.
    train(settings={"run.num_train_steps": 6, "mesh.ici_mesh_shape": (4, 1)})
    digests = {x["state_digest"] for x in lines_of(tmp_path) if x["step"] == 4 and x["certified"]}
    assert len(digests) == 1
    assert lines_of(tmp_path)[-1]["step"] == 6


@pytest.mark.parametrize(
    "every, action",
    [
        pytest.param(1, "stop", marks=pytest.mark.slow),
        pytest.param(2, "report", marks=pytest.mark.nightly),
    ],
)
def test_a_bit_that_flips_after_an_update_is_named(tmp_path, monkeypatch, every, action, caplog):
    make_step, leaf = TrainStep.__call__, "mdl_vars/params/last/w"

    def flipped(self, *args):
        state, outputs = make_step(self, *args)
        change = functools.partial(planted.with_copy, places=[1], change=planted.one_bit)
        return planted.changed(state, leaf, change), outputs

    monkeypatch.setattr(TrainStep, "__call__", flipped)
    words = f"Step {every} is not certified.*device 1 .*{leaf}"
    ends = action == "stop"
    with pytest.raises(NotCertified, match=words) if ends else contextlib.nullcontext():
        praxis_lite.train(
            Certified,
            tmp_path,
            packages=["tests"],
            settings={"run.certify_every_steps": every, "run.certify_action": action},
        )
    assert f"step {every} is NOT CERTIFIED" in caplog.text
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == ([1] if ends else [2, 4])
    assert {line["difference"]["kind"] for line in lines} == {"update of weights"}
    assert DiskSteps(tmp_path / "checkpoints").committed()[-1] == (1 if ends else 4)


class WideCertified(planted.Wide):
    """A job whose devices may be bad, certified every two steps."""

    def run(self):
        config = super().run()
        config.num_train_steps, config.certify_every_steps = 4, 2
        return config

    def mesh(self):
        config = super().mesh()
        config.ici_mesh_shape = (2, 2)
        return config


@pytest.mark.nightly
def test_a_bad_device_is_named_and_the_run_saves(tmp_path, caplog):
    words = "Step 2 is not certified.*device 2 .*saved"
    with planted.bad_device(2), pytest.raises(NotCertified, match=words):
        praxis_lite.train(WideCertified, tmp_path, packages=["tests"])
    assert "step 2 is NOT CERTIFIED" in caplog.text
    line = lines_of(tmp_path)[0]
    assert line["difference"]["cause"] == "device"
    assert line["difference"]["device"] == "device 2 (cpu) of process 0"
    assert line["difference"]["axis"] == "data 1, mdl 0"
    assert line["difference"]["layer"] == "first"
    assert DiskSteps(tmp_path / "checkpoints").committed() == [2]


def compared(job, check, place, spoil=lambda state: state):
    """Makes a step, and returns the update that a check compares with the state after it."""
    check.take_snapshot(job.state, job.step)
    job.train()
    job.state = spoil(job.state)
    rows = rerun.Rows(job.state, job.batch, job.key, salt=11)
    own, nudged = place.measure(rows), place.measure(rows, place.rounding)
    return check.compare(job.state, job.batch, job.key, own, nudged, 5, place.rounding)


def update_check(job, **settings):
    """Returns what checks the updates of a job, and its placement on the job's own mesh."""
    spec = job.pipeline.element_spec()
    place = rerun.Rerun(job.own, job.own)
    place.lower(spec, rerun.scalars_of(job.state))
    return UpdateCheck(job.own, spec, pytest.fail, **settings), place


NO_LIMIT = {"clip_gradient_norm_to_value": 0.0}
# An optimizer, and another setting that the update by hand follows.
LEARNERS = {
    "sgd, slots on the host": {
        "optimizer": fdl.Partial(optax.sgd, momentum=0.9, nesterov=True),
        "host_slots": ".*",
    },
    "adafactor, microbatches": {
        "optimizer": fdl.Partial(optax.adafactor, min_dim_size_to_factor=4),
        "gradient_accumulation_steps": 3,
    },
    "lamb, some steps skipped": {
        "optimizer": fdl.Partial(optax.lamb),
        "skip_step_gradient_norm_value": 0.9,
        **NO_LIMIT,
    },
    "lion, clipped by element": {
        "optimizer": fdl.Partial(optax.lion),
        "clip_gradient_to_value": 0.01,
        **NO_LIMIT,
    },
    "muon, clipped by weight": {
        "optimizer": fdl.Partial(optax.contrib.muon),
        "clip_gradient_single_norm_to_value": 0.1,
        **NO_LIMIT,
    },
    "prodigy, frozen weights": {
        "optimizer": fdl.Partial(optax.contrib.prodigy, estim_lr0=0.01),
        "bprop_variable_exclusion": "first/.*",
    },
    "schedule-free, slots on another axis": {
        "optimizer": fdl.Partial(optax.contrib.schedule_free_adamw),
        "slot_mesh_axes": ("data",),
    },
    "bfloat16 moments, loss scale": {
        "optimizer": fdl.Partial(optax.adamw, mu_dtype=jnp.bfloat16),
        "loss_scale": fdl.Config(DynamicLossScale),
    },
    "two optimizers": {
        "auxiliary_optimizers": [
            fdl.Config(
                AuxiliaryOptimizer,
                name="biases",
                optimizer=fdl.Partial(optax.sgd),
                learning_rate=0.1,
                regex=".*/b",
            )
        ],
        "apply_separate_scaling": True,
    },
}


SLOW_LEARNERS = ("adafactor, microbatches",)


@pytest.mark.parametrize("name", slow_or_nightly((), SLOW_LEARNERS, LEARNERS))
def test_right_updates_of_each_learner_are_certified_and_an_old_block_is_not(name):
    class Trained(tiny.Points):
        def task(self):
            task = super().task()
            for setting, value in LEARNERS[name].items():
                setattr(task.learner, setting, value)
            return task

    job = planted.Job(Trained, (2, 2), num_steps=0)
    check, place = update_check(job)
    for _ in range(3):
        made = compared(job, check, place)
        assert not made.failed
    leaf = "mdl_vars/params/last/w"
    old = planted.blocks_of(job.state, leaf)
    device = job.mesh.devices.flat[2]
    made = compared(
        job,
        check,
        place,
        lambda state: planted.changed(
            state, leaf, lambda x: planted.replaced_blocks(x, [device], old)
        ),
    )
    # By its bits, and by hand.
    assert [x.leaf for x in made.failed] == [leaf, leaf]
    assert made.positions == {leaf: (2,)}


@pytest.mark.slow
def test_arrays_take_turns_where_memory_is_bounded_and_every_one_is_covered():
    job = planted.Job(tiny.Points, (2, 2), num_steps=0)
    check, place = update_check(job, max_bytes=60)
    assert len(check.parts) == 3 and not check.is_exact
    leaf, seen = "opt_states/slots/unstacked/0/mu/last/w", set()
    for _ in check.parts:
        made = compared(
            job,
            check,
            place,
            lambda state: planted.changed(
                state, leaf, lambda x: planted.with_copy(x, [1], lambda data: 2 * data)
            ),
        )
        seen |= {item.leaf for item in made.comparisons}
        assert {item.leaf for item in made.failed} <= {leaf}
        # A moment that is wrong before a step too is what the update is made of.
        assert (leaf in made.positions) == (leaf in [item.leaf for item in made.comparisons])
        check.lower()
    assert seen == {x.path for x in job.own.layout.leaves()}


@pytest.mark.slow
def test_wrong_arrays_of_an_update_are_found_and_no_others():
    changes = planted.wrong_leaves().values()
    with planted.changed_updates(*(change for change, _ in changes)):
        job = planted.Job(tiny.Points, (2, 2))
        made = compared(job, *update_check(job))
    # By hand: the job's own program is wrong each time that it runs.
    assert made.is_exact
    assert sorted(x.leaf for x in made.failed) == sorted(leaf for _, leaf in changes)
    assert made.positions["opt_states/slots/unstacked/0/nu/first/w"] == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["an average that is not updated", "a learning rate of 1.01 times"],
        ["an average of the new weights", "weights that are updated twice"],
        ["an update that is made twice"],
        ["gradients that are not clipped"],
    ],
    ids=" and ".join,
)
def test_a_wrong_update_of_all_arrays_is_found(names):
    faults = [planted.wrong_programs()[name] for name in names]
    with contextlib.ExitStack() as patched:
        for patch, _ in faults:
            patched.enter_context(patch)
        job = planted.Job(tiny.Points, (2, 2))
        made = compared(job, *update_check(job))
    failed = {x.leaf for x in made.failed}
    slots = "opt_states/slots/unstacked/0"
    moved = ("mdl_vars/params/", f"{slots}/mu/", f"{slots}/nu/")
    for start in {start or moved for _, start in faults}:
        leaves = {x.path for x in job.own.layout.leaves() if x.path.startswith(start)}
        assert leaves and leaves <= failed
    assert all(leaf.startswith(tuple(start for _, start in faults)) for leaf in failed)


FOUND_BY_SEARCH = (
    "weights that are updated twice",
    pytest.param("psum on the other axis", marks=pytest.mark.nightly),
    pytest.param(planted.spoiled_states()[-1].name, marks=pytest.mark.nightly),
)


class SimulatedSearch(CauseSearch):
    """A search in which the results depend on faulty devices, or on whether an axis is split."""

    _job_rerun = _rows = None

    def __init__(self, mesh, devices=(), axes=()):
        self._mesh, self._faulty, self._axes = mesh, set(devices), axes

    def _differing_rows(self, rerun):
        return None

    def _differs_if_rotated(self, positions):
        assert len(positions) > 1
        return not self._faulty.isdisjoint(positions)

    def _rerun_on(self, mesh):
        return types.SimpleNamespace(measure=lambda rows: dict(mesh.shape))

    def _differs_from_other_mesh(self, actual):
        return any(actual[axis] > 1 for axis in self._axes)


def test_the_faulty_devices_are_found_by_rotations_alone(mesh_of):
    mesh = mesh_of(2, 2, 2)
    for count in (1, 2, 3):
        for devices in itertools.combinations(range(8), count):
            assert SimulatedSearch(mesh, devices)._faulty_positions() == list(devices)


def test_the_faulty_axes_are_those_whose_split_gives_the_difference(mesh_of):
    for axes in (["data"], ["replica", "mdl"]):
        assert SimulatedSearch(mesh_of(2, 2, 2), axes=axes)._faulty_axes() == axes
    assert SimulatedSearch(mesh_of(1, 2, 2))._faulty_axes() == ["data", "mdl"]


@pytest.mark.slow
@pytest.mark.parametrize("start", FOUND_BY_SEARCH)
def test_faults_are_found_where_they_are(start):
    fault = next(x for x in all_faults() if x.name.startswith(start))
    assert not fault.missed(fault.found())
