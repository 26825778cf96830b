"""Saving: in an order that no kill can spoil, errors told at once, nothing left behind."""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import itertools
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.checkpointers import async_checkpointer
from orbax.checkpoint._src.serialization import serialization

from praxis_lite import BestCheckpoints, ConfigError, FailedSave
from praxis_lite.checkpoints.background_save import why
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.save_checks import check_names
from praxis_lite.checkpoints.save_queue import SaveQueue
from praxis_lite.checkpoints.steps.manifest import digest_of_config
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.checkpoints.steps.step_store import DiskSteps
from praxis_lite.checkpoints.tools import manifest_of
from praxis_lite.core import StateLayout, TrainState
from praxis_lite.job.job_dir import JobDir
from tests.checkpoints.test_checkpoints import SMALL, small_state
from tests.checkpoints.test_damage import mesh
from tests.support.job_runs import CHECKOUT, launch, lines_of, succeed
from tests.support.line_jobs import LINE
from tests.support.marks import slow_but

RETRYING = SaveSettings(retries=2, retry_seconds=0.0)


def save(checkpoints, step, **kwargs):
    checkpoints.save(step, small_state(mesh(), step), SMALL, {"next_batch": step}, **kwargs)


@pytest.mark.parametrize("hours", [2, -2, 10**6])
def test_a_save_does_not_depend_on_the_wall_clock(tmp_path, monkeypatch, hours):
    # It jumps at each call, as while a host is set right again and again.
    jumps, clock = itertools.count(), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours * next(jumps))
    with Checkpoints(tmp_path, saving=RETRYING) as checkpoints:
        for step in (1, 2):
            save(checkpoints, step)
        checkpoints.wait()
    assert DiskSteps(tmp_path).committed() == [1, 2]
    assert names_in(tmp_path) == ["1", "2"]


@pytest.mark.parametrize("num_made", range(6))
def test_a_disk_that_takes_no_more_folders_fails_the_save_at_once(tmp_path, monkeypatch, num_made):
    made, mkdir = itertools.count(), os.mkdir

    def full(path, *args, **kwargs):
        if ".saving" in str(path) and next(made) >= num_made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *args, **kwargs)

    began = time.monotonic()
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        with monkeypatch.context() as patch, contextlib.suppress(FailedSave):
            patch.setattr(os, "mkdir", full)
            save(checkpoints, 1)
            checkpoints.wait()
            assert next(made) <= num_made  # It needs no more.
        assert time.monotonic() - began < 30
        assert names_in(tmp_path) in ([], ["1"])
        save(checkpoints, 2)
        checkpoints.wait()
    assert "2" in names_in(tmp_path)


def until_over(checkpoints):
    """Waits for the save in the background, and does not ask how it ended."""
    while checkpoints.is_saving():
        time.sleep(0.001)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """Stands for a kill: nothing of ours handles it."""


@contextlib.contextmanager
def failing(monkeypatch, name, error, *, after=0):
    """Makes a method of DiskSteps raise when it is called, from its call number `after` on."""
    function, calls = getattr(DiskSteps, name), []

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) > after:
            raise error
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DiskSteps, name, fails)
        yield calls


FULL = OSError(28, "No space left on device", "/disk/7.saving/mdl_vars/d/0123")


def test_a_step_has_its_number_last(tmp_path, monkeypatch):
    """What is on disk when each thing that makes a step has been done, and in which order."""
    seen, publish, commit, fsync = [], DiskSteps.publish, DiskSteps.commit, os.fsync
    synced = []

    def recorded(what, function):
        def call(*args):
            files = sorted(os.listdir(tmp_path / "3.saving"))
            seen.append((what, names_in(tmp_path), files, len(synced)))
            return function(*args)

        return call

    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(DiskSteps, "commit", recorded("commit", commit))
    monkeypatch.setattr(DiskSteps, "publish", recorded("publish", publish))
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 3)
    monkeypatch.setattr(os, "fsync", fsync)
    (first, before, files, num_synced), (second, at_publish, whole, num_committed) = seen
    assert (first, second) == ("commit", "publish")
    assert before == at_publish == ["3.saving"] and names_in(tmp_path) == ["3"]
    assert set(whole) - set(files) == {"manifest.json", "commit.json"}
    # Each file and each folder is on disk before the commit, the commit before the number.
    below = [str(p) for p in (tmp_path / "3").rglob("*") if p.parent != tmp_path / "3"]
    below = {path.replace("/3/", "/3.saving/") for path in below}
    assert below <= set(synced[:num_synced])
    saving = f"{tmp_path}/3.saving"
    assert synced[num_synced:] == [
        f"{saving}/manifest.json",
        f"{saving}/commit.json",
        saving,
        str(tmp_path),
    ]
    assert num_committed == len(synced) - 1


def test_the_manifest_says_what_a_step_is_made_of(tmp_path):
    config = '{"experiment": "a.B", "overrides": [], "config": {"x": 1}}'
    best = BestCheckpoints(metric="heldout/loss")
    with Checkpoints(tmp_path, saving=SaveSettings(best=best), config_json=config) as checkpoints:
        save(checkpoints, 3, metrics={"heldout/loss": np.float32(0.5)})
    manifest = manifest_of(tmp_path / "3")
    assert manifest["leaves"]["mdl_vars/params/w"] == {
        "shape": [7, 5],
        "padded_shape": [8, 6],
        "dtype": "float32",
        "spec": ["data", "mdl"],
    }
    assert sorted(manifest["leaves"]) == ["mdl_vars/params/w", "opt_states/count"]
    files = {
        str(p.relative_to(tmp_path / "3")): p.stat().st_size
        for p in (tmp_path / "3").rglob("*")
        if p.is_file() and p.name not in ("manifest.json", "commit.json")
    }
    assert {name: file["size"] for name, file in manifest["files"].items()} == files
    assert manifest["step"] == 3 and manifest["data"] == {"next_batch": 3}
    assert manifest["mesh"] == {"replica": 1, "data": 4, "mdl": 2}
    assert manifest["versions"]["jax"] == jax.__version__
    assert manifest["metrics"] == {"heldout/loss": 0.5}
    assert manifest["best"] == dataclasses.asdict(best)
    other_settings = config.replace("[]", '["x=1"]')
    assert manifest["config_xxh3_128"] == digest_of_config(other_settings) != ""
    assert digest_of_config(config.replace('"x": 1', '"x": 2')) != digest_of_config(config)


@pytest.mark.parametrize(
    ("name", "left", "steps"),
    [
        ("file_entries", ["3", "7.saving"], [3]),
        ("commit", ["3", "7.saving"], [3]),
        # Whole, but without its number: the next start gives it that.
        ("publish", ["3", "7.saving"], [3, 7]),
    ],
)
def test_a_kill_in_a_save_loses_no_step(tmp_path, monkeypatch, name, left, steps):
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 3)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with failing(monkeypatch, name, Killed()):
        checkpoints = Checkpoints(tmp_path, saving=SaveSettings())
        save(checkpoints, 7)
        until_over(checkpoints)
    assert names_in(tmp_path) == left
    lines = []
    with Checkpoints(tmp_path, saving=SaveSettings(), note=lines.append) as checkpoints:
        assert checkpoints.latest_step() == steps[-1] and checkpoints.all_steps() == steps
        restored = checkpoints.restore(SMALL, mesh())
        assert restored.step == int(restored.state.opt_states["count"]) == steps[-1]
    assert names_in(tmp_path) == [str(step) for step in steps] and len(lines) == 1
    assert ("7.saving, left by an interrupted save" in lines[0]) == (steps == [3])


def test_a_kill_while_an_old_step_is_deleted_leaves_none_that_is_half(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def half(self, name):
        shutil.rmtree(tmp_path / name / "mdl_vars")
        raise Killed

    with Checkpoints(tmp_path, saving=SaveSettings(max_to_keep=2)) as checkpoints:
        for step in (1, 2):
            save(checkpoints, step)
        checkpoints.wait()
        monkeypatch.setattr(DiskSteps, "remove_leftover", half)
        save(checkpoints, 3)
    monkeypatch.undo()
    assert names_in(tmp_path) == ["1.deleting", "2", "3"]
    lines = []
    with Checkpoints(tmp_path, saving=SaveSettings(), note=lines.append) as checkpoints:
        assert checkpoints.all_steps() == [2, 3] and checkpoints.latest_step() == 3
    assert lines == ["removed 1.deleting, left by an interrupted deletion"]
    assert names_in(tmp_path) == ["2", "3"]


def test_the_reason_of_a_tensorstore_error_is_the_message_of_the_operating_system(tmp_path):
    step_dir = tmp_path / "7.saving"
    step_dir.mkdir()
    (step_dir / "mdl_vars").touch()  # A file in place of a folder.
    spec = {"driver": "file", "path": f"{step_dir}/mdl_vars/d/"}
    with pytest.raises(ValueError) as caught:
        tensorstore.KvStore.open(spec).result().write("0123", b"x").result()
    assert why(caught.value) == f"Not a directory ({step_dir})"


def test_a_save_that_fails_is_told_before_the_next_step(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 3)
        checkpoints.wait()
        with failing(monkeypatch, "commit", FULL):
            save(checkpoints, 7)
            until_over(checkpoints)
        with pytest.raises(FailedSave) as caught:
            checkpoints.raise_if_failed()
        checkpoints.raise_if_failed()  # Once.
    assert caught.value.__cause__ is FULL
    assert str(caught.value).startswith(
        "The checkpoint of step 7 could not be saved: No space left on device (/disk/7.saving). "
        f"The newest checkpoint is of step 3, in {tmp_path}. Free disk space or fix the cause; the "
        "same command then resumes from that checkpoint."
    )
    assert names_in(tmp_path) == ["3"] and DiskSteps(tmp_path).verify("3") == []


def test_leaving_waits_for_the_save_and_tells_its_error(tmp_path, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    commit = DiskSteps.commit

    def late(*args):
        began.set()
        go_on.wait()
        commit(*args)

    monkeypatch.setattr(DiskSteps, "commit", late)
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 3)
        began.wait()
        checkpoints.raise_if_failed()
        assert checkpoints.all_steps() == []  # In flight, it is no step.
        go_on.set()
    assert names_in(tmp_path) == ["3"]
    with (
        failing(monkeypatch, "commit", FULL),
        pytest.raises(FailedSave, match=r"7.*\(/disk/7\.saving\)"),
        Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints,
    ):
        save(checkpoints, 7)


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("first")])
def test_whatever_leaves_waits_and_is_not_hidden(tmp_path, monkeypatch, error):
    lines = []
    with (
        failing(monkeypatch, "commit", FULL, after=1),
        pytest.raises(type(error)) as caught,
        Checkpoints(tmp_path, saving=RETRYING, note=lines.append) as checkpoints,
    ):
        for step in (3, 7):
            save(checkpoints, step)
        raise error
    assert caught.value is error and names_in(tmp_path) == ["3"]
    [line] = lines
    assert "step 7 could not be saved: No space left" in line and "is of step 3" in line


def test_a_failed_save_is_tried_again_with_the_newest_state(tmp_path, monkeypatch):
    lines = []
    with Checkpoints(tmp_path, saving=RETRYING, note=lines.append) as checkpoints:
        with failing(monkeypatch, "publish", FULL):
            for step in (3, 5):
                assert checkpoints.retry_is_due() == (step == 5)
                save(checkpoints, step)
                assert not checkpoints.retry_is_due()  # It is in flight.
                until_over(checkpoints)
                checkpoints.raise_if_failed()
            assert len(lines) == 2 and names_in(tmp_path) == []
            save(checkpoints, 6)
            until_over(checkpoints)
            with pytest.raises(FailedSave, match=r"6.*\(/disk/"):
                checkpoints.raise_if_failed()
        save(checkpoints, 7)
        checkpoints.wait()
        with failing(monkeypatch, "publish", FULL):  # One that succeeds begins the count anew.
            save(checkpoints, 8)
            until_over(checkpoints)
            checkpoints.raise_if_failed()
        save(checkpoints, 9)
    assert names_in(tmp_path) == ["7", "9"]
    assert lines[0] == (
        "The checkpoint of step 3 could not be saved: No space left on device (/disk/7.saving). "
        "Retrying, 1 of 2 times"
    )
    assert "step 5" in lines[1] and "2 of 2" in lines[1] and "1 of 2" in lines[2]


def test_the_last_save_waits_and_is_tried_again_as_it_is(tmp_path, monkeypatch):
    lines, publish, calls = [], DiskSteps.publish, []

    def at_the_third(*args):
        calls.append(names_in(tmp_path))
        if len(calls) < 3:
            raise FULL
        publish(*args)

    monkeypatch.setattr(DiskSteps, "publish", at_the_third)
    with Checkpoints(tmp_path, saving=RETRYING, note=lines.append) as checkpoints:
        save(checkpoints, 3, is_last=True)
        assert names_in(tmp_path) == ["3"] and len(lines) == 2
        calls.clear()
        monkeypatch.setattr(DiskSteps, "publish", lambda *args: calls.append(0) or _raise(FULL))
        with pytest.raises(FailedSave, match="step 7"):
            save(checkpoints, 7, is_last=True)
        assert len(calls) == 3 and names_in(tmp_path) == ["3"]


def _raise(error):
    raise error


def test_a_step_that_is_there_is_replaced_when_the_new_one_is_whole(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        for step in (3, 7):
            save(checkpoints, step)
        checkpoints.wait()
        assert checkpoints.restore(SMALL, mesh()).step == 7
        seen, rename = [], os.rename
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "rename", lambda *args: seen.append(names_in(tmp_path)) or rename(*args)
            )
            checkpoints.save(7, small_state(mesh(), 17), SMALL, {})
            checkpoints.wait()
        # At each moment there is a whole 7: the old one, or the new one that lacks its number.
        assert ["3", "7", "7.saving"] in seen and ["3", "7.deleting", "7.saving"] in seen
        assert names_in(tmp_path) == ["3", "7"]
        assert int(checkpoints.restore(SMALL, mesh()).state.opt_states["count"]) == 17


def renames_but_of_7(error):
    """Returns os.rename, that raises where the save of step 7 gets its number."""
    rename = os.rename

    def renamed(source, target):
        if str(source).endswith("7.saving"):
            raise error
        rename(source, target)

    return renamed


def test_a_kill_while_a_step_is_replaced_keeps_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 7)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", renames_but_of_7(Killed))
            checkpoints.save(7, small_state(mesh(), 17), SMALL, {})
            checkpoints.wait()
    assert names_in(tmp_path) == ["7.deleting", "7.saving"]
    with Checkpoints(tmp_path, saving=SaveSettings(), note=[].append) as checkpoints:
        assert int(checkpoints.restore(SMALL, mesh()).state.opt_states["count"]) == 17
    assert names_in(tmp_path) == ["7"]


def test_a_replacement_that_fails_leaves_the_old_step(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 7)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", renames_but_of_7(FULL))
            checkpoints.save(7, small_state(mesh(), 17), SMALL, {})
            with pytest.raises(FailedSave):
                checkpoints.wait()
        assert names_in(tmp_path) == ["7"]
        assert int(checkpoints.restore(SMALL, mesh()).state.opt_states["count"]) == 7


def test_what_was_rolled_back_does_not_win_and_goes_after_the_next_save(tmp_path):
    lines = []
    with Checkpoints(tmp_path, saving=SaveSettings(), note=lines.append) as checkpoints:
        for step in (3, 5, 7):
            save(checkpoints, step)
        checkpoints.abandon_after(3)
        assert checkpoints.latest_step() == 3 and checkpoints.all_steps() == [3]
    assert names_in(tmp_path) == ["3", "5.abandoned", "7.abandoned"]
    assert lines[0] == "the checkpoint of step 5 is rolled back: renamed to 5.abandoned"
    with Checkpoints(tmp_path, saving=SaveSettings(), note=lines.append) as checkpoints:
        assert checkpoints.latest_step() == 3  # After a kill, too.
        checkpoints.save(5, small_state(mesh(), 55), SMALL, {})
        checkpoints.wait()
        assert int(checkpoints.restore(SMALL, mesh()).state.opt_states["count"]) == 55
    assert names_in(tmp_path) == ["3", "5"]


def test_the_newest_every_nth_and_the_best_are_kept(tmp_path):
    best = BestCheckpoints(metric="heldout/loss", max_to_keep=1)
    saving = SaveSettings(max_to_keep=2, keep_every_steps=4, best=best)
    losses = {1: 5.0, 2: 1.0, 4: 3.0, 5: math.nan, 6: 2.0, 7: 9.0}
    with Checkpoints(tmp_path, saving=saving) as checkpoints:
        for step, loss in losses.items():
            save(checkpoints, step, metrics={"heldout/loss": loss})
    assert names_in(tmp_path) == ["2", "4", "6", "7"]


def test_the_bad_numbers_are_named_and_nothing_is_saved(tmp_path):
    def spoiled(value, where):
        state = small_state(mesh(), 7)
        w = state.mdl_vars["params"]["w"]
        w = jax.device_put(w.at[3, 4].set(value), w.sharding)
        if where == "mdl_vars":
            return dataclasses.replace(state, mdl_vars={"params": {"w": w}})
        return dataclasses.replace(state, opt_states={**state.opt_states, "ema": {"w": w}})

    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 3)
        checkpoints.wait()
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(
                ConfigError,
                match="7.*mdl_vars/params/w.*3",
            ):
                checkpoints.save(7, spoiled(value, "mdl_vars"), SMALL, {})
        with pytest.raises(ConfigError, match="opt_states/ema/w"):
            checkpoints.save(7, spoiled(math.inf, "opt_states"), SMALL, {})
        assert names_in(tmp_path) == ["3"]
    with Checkpoints(tmp_path, saving=SaveSettings(save_non_finite=True)) as checkpoints:
        checkpoints.save(7, spoiled(math.nan, "mdl_vars"), SMALL, {})
        checkpoints.wait()
        actual = np.asarray(checkpoints.restore(SMALL, mesh()).state.mdl_vars["params"]["w"])
    assert np.isnan(actual[3, 4]) and np.isnan(actual).sum() == 1


def test_slots_may_be_infinite_and_whole_numbers_are_left_out(tmp_path):
    from praxis_lite.checkpoints.save_checks import non_finite_leaves

    def state(slot):
        weights = {"params": {"b": jnp.ones(3, jnp.bfloat16), "q": jnp.ones(3, jnp.int8)}}
        return TrainState(np.int32(1), weights, {"slots": {"best": slot}, "count": jnp.int32(1)})

    for slot, bad in ((math.inf, []), (1.0, []), (math.nan, ["opt_states/slots/best"])):
        assert non_finite_leaves(state(jnp.bfloat16(slot))) == bad
    assert non_finite_leaves(TrainState(np.int32(1), {}, {})) == []


def layout_of(params):
    shapes = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), np.float32), params)
    step = jax.ShapeDtypeStruct((), np.int32)
    return StateLayout(
        TrainState(step, {"params": shapes}, {}),
        TrainState(P(), {"params": jax.tree.map(lambda _: P(), params)}, {}),
        {"replica": 1, "data": 4, "mdl": 2},
    )


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"a.b": 0, "a": {"b": 0}}, r"\['a'\]\['b'\].*\['a\.b'\]"),
        ({"a/b": 0, "a": {"b": 0}}, r"\['a'\]\['b'\].*\['a/b'\]"),
        ({"a/b": 0, "a.b": 0}, r"\['a.b'\].*\['a/b'\]"),
        ({"a": {"b": {"c": 0}}, "a.b": 0}, r"\['a.b'\].*\['a'\]\['b'\]\['c'\]"),
        ({"": 0}, r"params'\]\[''\]"),
        ({"..": {"x": 0}}, r"\['\.\.'\]\['x'\]"),
        ({"/etc": 0}, r"\['/etc'\]"),
        ({"a": {"b.": 0}}, r"\['b\.'\]"),
    ],
)
def test_names_that_collide_are_refused_before_anything_is_written(tmp_path, params, words):
    layout = layout_of(params)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.shapes)
    with (
        Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints,
        pytest.raises(ConfigError, match=words),
    ):
        checkpoints.save(3, state, layout, {})
    assert names_in(tmp_path) == []


def test_names_with_a_dot_that_collide_with_nothing_are_saved():
    check_names(layout_of({"decay.stack_4": 0, "decay": {"stack_40": 0}, "a~b": [0, 0]}))


SAVES_ON_A_FULL_DISK = """
    import resource, sys
    from pathlib import Path
    import numpy as np
    from praxis_lite.core import simulate_devices
    simulate_devices(8)
    from tests.checkpoints.test_saving import *

    directory, lines = Path(sys.argv[1]), []
    try:
        with Checkpoints(directory, saving=SaveSettings(retries=1, retry_seconds=0.0)) as saved:
            saved.save(3, large_state(3), LARGE, {})
            saved.wait()
            # As on a disk that is full: nothing larger than this is written any more.
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            saved.save(7, large_state(7), LARGE, {})
            saved.save(11, large_state(11), LARGE, {}, is_last=True)
    except FailedSave as error:
        print("FailedSave:", error)
"""

LARGE = StateLayout(
    shapes=TrainState(
        jax.ShapeDtypeStruct((), np.int32),
        {"params": {"w": jax.ShapeDtypeStruct((997, 101), np.float32)}},
        {"slots": {"w": jax.ShapeDtypeStruct((997, 101), np.float32)}},
    ),
    specs=TrainState(P(), {"params": {"w": P("data", "mdl")}}, {"slots": {"w": P("mdl", "data")}}),
    axis_sizes={"replica": 1, "data": 4, "mdl": 2},
)


def large_state(number):
    rng = np.random.default_rng(number)
    draw = lambda x: rng.standard_normal(x.shape).astype(x.dtype)  # noqa: E731
    return jax.device_put(jax.tree.map(draw, LARGE.padded_shapes), LARGE.shardings(mesh()))


@pytest.mark.slow
def test_a_full_disk_leaves_the_step_before_and_no_rubbish(tmp_path):
    """In a process of its own, where the system refuses to write; every line it prints is ours."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SAVES_ON_A_FULL_DISK), tmp_path],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0
    (first,), (last,) = done.stderr.splitlines(), done.stdout.splitlines()
    words = f"The checkpoint of step 7 could not be saved: File too large ({tmp_path}/7.saving)."
    assert f"{words} Retrying" in first
    assert last.startswith(
        f"FailedSave: The checkpoint of step 11 could not be saved: File too large "
        f"({tmp_path}/11.saving). The newest checkpoint is of step 3, in {tmp_path}. Free disk"
    )
    assert names_in(tmp_path) == ["3"] and DiskSteps(tmp_path).verify("3") == []


@pytest.mark.slow
def test_a_job_tries_again_with_its_newest_state_or_ends_at_the_next_step(tmp_path, monkeypatch):
    job, commit, num_failures = JobDir(tmp_path / "job"), DiskSteps.commit, [1]

    def fails(*args):
        num_failures[0] -= 1
        if num_failures[0] >= 0:
            raise FULL
        commit(*args)

    monkeypatch.setattr(DiskSteps, "commit", fails)
    # A save is over when the next step begins, however fast the steps are.
    raise_if_failed = Checkpoints.raise_if_failed
    monkeypatch.setattr(
        Checkpoints, "raise_if_failed", lambda self: until_over(self) or raise_if_failed(self)
    )
    argv = (LINE, f"--job_log_dir={job.path}", "--set", "run.checkpoints.every_steps=2")
    retries = ("run.checkpoints.retries=2", "run.checkpoints.retry_seconds=0.0")
    done = succeed(*argv, "run.num_train_steps=5", *retries)
    assert "The checkpoint of step 2 could not be saved: No space left on device" in done.out
    assert names_in(job.checkpoints) == ["3", "4", "5"]
    num_failures[0] = 1
    failed = launch(*argv, "run.num_train_steps=11")
    assert failed.code == 2 and names_in(job.checkpoints) == ["3", "4", "5"]
    words = " ".join(failed.err.split())
    assert words.startswith("error: The checkpoint of step 6 could not be saved: No space left")
    assert f"The newest checkpoint is of step 5, in {job.checkpoints}." in words
    assert [line["step"] for line in lines_of(job.metrics_jsonl)] == [1, 2, 3, 4, 5, 6]


def test_when_one_write_fails_the_others_have_ended_too(tmp_path, monkeypatch):
    """Else they would make the folder anew behind our back, and print tracebacks."""
    began, ended = [], []

    async def ends_late():
        began.append(0)
        await asyncio.sleep(0.1)
        ended.append(0)

    async def fails():
        await asyncio.sleep(0)
        raise FULL

    async def both():
        await asyncio.gather(fails(), ends_late())

    with pytest.raises(OSError, match="Errno 28"):
        asyncio_utils.run_sync(both())
    assert len(began) == len(ended) == 1

    async def write(*args, tensorstore_spec=None, **kwargs):
        await (fails() if "mdl_vars" in str((args, tensorstore_spec)) else ends_late())

    monkeypatch.setattr(serialization, "async_serialize_from_host", write)
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 3)
        with pytest.raises(FailedSave, match=r"3.*\(/disk/"):
            checkpoints.wait()
        assert len(began) == len(ended) == 2
    assert names_in(tmp_path) == []


def test_a_commit_of_tensorstore_has_ended_when_a_cancelled_save_returns():
    """Else it would make the folder again after its files were removed."""
    ended, (promise, commit) = [], tensorstore.Promise.new()

    def commits():
        ended.append(0)
        promise.set_result(None)

    async def save():
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        threading.Timer(0.1, commits).start()
        await asyncio_utils.cancellable(commit)

    with pytest.raises(asyncio.CancelledError):
        asyncio_utils.run_sync(save())
    assert ended == [0]


def is_waiting(frame):
    """Returns True if a thread whose innermost frame this is waits for a save."""
    if frame.f_code.co_name not in ("wait", "join", "_wait_for_tstate_lock"):
        return False
    return SaveQueue.settle.__code__ in (caller.f_code for caller, _ in traceback.walk_stack(frame))


@contextlib.contextmanager
def handling(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Of a write that is cancelled Orbax awaits nothing more, and closes its loop: what that leaves is
# collected here, not in a later test.
@pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
@pytest.mark.parametrize(
    "when", slow_but(["in a step"], ["in a step", "while it waits", "at the end", "as it begins"])
)
def test_an_interrupt_cancels_the_save_in_flight(tmp_path, monkeypatch, caplog, when):
    began, started, cancelled = threading.Event(), [], []

    async def endless(*args, **kwargs):
        started.append(0)
        if len(started) == 2:  # Weights, and all else.
            began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(0)
            raise

    def interrupts():
        """Sends the signal once the main thread waits for the save."""
        assert began.wait(30)
        main = threading.main_thread().ident
        while not is_waiting(sys._current_frames()[main]):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    def begins(*args, **kwargs):
        assert began.wait(30)
        raise KeyboardInterrupt

    thread = threading.Thread(target=interrupts)
    with (
        handling(signal.default_int_handler),
        pytest.raises(KeyboardInterrupt),
        Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints,
    ):
        save(checkpoints, 3)
        checkpoints.wait()
        monkeypatch.setattr(serialization, "async_serialize_from_host", endless)
        if when == "as it begins":
            # The writes have begun by then, and Orbax does not hold them yet.
            monkeypatch.setattr(async_checkpointer._AsyncManager, "start_async_commit", begins)
        save(checkpoints, 7)
        assert began.wait(30)
        if when in ("while it waits", "at the end"):
            thread.start()
        if when == "while it waits":
            checkpoints.wait()
        if when == "in a step":
            raise KeyboardInterrupt
    assert len(cancelled) == 2 and names_in(tmp_path) == ["3"]
    [line] = caplog.messages
    assert line.startswith("The save of step 7 was cancelled. The newest checkpoint is of step 3")
    monkeypatch.undo()
    with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
        save(checkpoints, 7)
    assert names_in(tmp_path) == ["3", "7"]
    gc.collect()


def test_of_several_writes_that_fail_one_is_told_and_none_is_printed(caplog):
    """Whichever round of the loop the second fails in: also the last one, which nobody sees."""
    caplog.set_level(logging.DEBUG, "asyncio")

    async def fails(rounds):
        for _ in range(rounds):
            await asyncio.sleep(0)
        raise OSError(28, "No space left on device")

    async def both(rounds):
        await asyncio.gather(fails(0), fails(rounds))

    for rounds in range(8):
        with pytest.raises(OSError, match="Errno 28"):
            asyncio_utils.run_sync(both(rounds))
    gc.collect()
    assert [line for line in caplog.messages if "never retrieved" in line] == []


def test_what_only_reads_says_how_to_save(tmp_path):
    with (
        Checkpoints(str(tmp_path)) as checkpoints,
        pytest.raises(ConfigError, match="saving=SaveSettings"),
    ):
        save(checkpoints, 3)
