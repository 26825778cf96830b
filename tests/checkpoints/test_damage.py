"""Damage to a checkpoint: found whatever it is, told in one line, and the one before it is used."""

import functools
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.checkpoints.steps.step_store import DiskSteps
from praxis_lite.checkpoints.tools import manifest_of
from praxis_lite.core import MeshConfig, make_mesh
from tests.checkpoints.test_checkpoints import SMALL, small_state

WEIGHTS = "mdl_vars/manifest.ocdbt"


@functools.cache
def mesh():
    return make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """The steps 3 and 7 of one job."""
    folder = tmp_path_factory.mktemp("two")
    with Checkpoints(folder, saving=SaveSettings()) as checkpoints:
        for step in (3, 7):
            checkpoints.save(step, small_state(mesh(), step), SMALL, {"next_batch": step})
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    """A copy of them, to damage."""
    return Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


def flip(path, bit):
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files_of(step_dir):
    return sorted(str(p.relative_to(step_dir)) for p in step_dir.rglob("*") if p.is_file())


def assert_is_step(checkpoints, step):
    """Asserts that what is restored is the state of that step, to the bit."""
    restored = checkpoints.restore(SMALL, mesh())
    expected = np.zeros((8, 6), np.float32)
    expected[:7, :5] = step
    np.testing.assert_array_equal(np.asarray(restored.state.mdl_vars["params"]["w"]), expected)
    assert restored.step == step == int(restored.state.opt_states["count"])
    assert restored.data == {"next_batch": step} == checkpoints.latest_data()


def empty_the_folder(seven):
    shutil.rmtree(seven)
    seven.mkdir()


def delete_half(seven):
    for name in files_of(seven)[::2]:
        (seven / name).unlink()


def swap_with_the_other_step(seven):
    other = next(p for p in (seven.parent / "3/mdl_vars/d").iterdir())
    mine = next(p for p in (seven / "mdl_vars/d").iterdir())
    shutil.copyfile(other, mine)


def replace_with_the_other_step(seven):
    shutil.rmtree(seven)
    shutil.copytree(seven.parent / "3", seven)


def other_step_number(seven):
    manifest = manifest_of(seven)
    manifest["step"] = 17
    DiskSteps(seven.parent).commit("7", manifest)


DAMAGE = {
    "flipped bit": (lambda s: flip(s / WEIGHTS, 77), f"{WEIGHTS} has changed: its digest differs"),
    "truncated": (lambda s: os.truncate(s / WEIGHTS, 100), rf"{WEIGHTS} has 100 bytes, not \d+"),
    "extra file": (lambda s: (s / "mdl_vars/x").touch(), "mdl_vars/x is not one of its files"),
    "swapped": (swap_with_the_other_step, r"mdl_vars/d/\S+ (has changed|has \d+ bytes, not)"),
    "swapped step": (replace_with_the_other_step, "commit.json and manifest.json belong to step 3"),
    "other number": (other_step_number, "commit.json and manifest.json belong to step 17"),
    "no commit": (lambda s: (s / "commit.json").unlink(), r"commit.json is missing"),
    "no manifest": (lambda s: (s / "manifest.json").unlink(), "manifest.json is missing"),
    "empty commit": (
        lambda s: os.truncate(s / "commit.json", 0),
        "the digest of manifest.json differs",
    ),
    "cut manifest": (
        lambda s: os.truncate(s / "manifest.json", 77),
        "manifest.json differs from com",
    ),
    "empty folder": (empty_the_folder, "commit.json is missing"),
    "half deleted": (delete_half, "is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_in_a_line_and_the_step_before_is_used(folder, name):
    damage, words = DAMAGE[name]
    damage(folder / "7")
    lines = []
    with Checkpoints(folder, note=lines.append) as reading:
        assert_is_step(reading, 3)
    [line] = lines
    assert re.search(rf"^the checkpoint of step 7 is damaged \(.*{words}.*\): skipped$", line)
    assert (folder / "7").exists()  # A reader renames nothing.
    by_number = f"(no checkpoint of step 7|step 7 .* is damaged: .*{words})"
    with Checkpoints(folder) as reading, pytest.raises(ConfigError, match=by_number):
        reading.restore(SMALL, mesh(), step=7)

    lines.clear()
    with Checkpoints(folder, saving=SaveSettings(), note=lines.append) as checkpoints:
        assert checkpoints.latest_step() == 3
    [line] = lines
    assert re.search(rf"step 7 is damaged \(.*{words}.*\): renamed to 7.damaged$", line)
    assert DiskSteps(folder).folders_of_kind("damaged") == ["7.damaged"]


def test_saving_goes_on_after_a_fallback(folder):
    for number in (1, 2):
        flip(folder / "7" / WEIGHTS, 7)
        with Checkpoints(folder, saving=SaveSettings(), note=[].append) as checkpoints:
            assert_is_step(checkpoints, 3)
            checkpoints.save(7, small_state(mesh(), 7), SMALL, {"next_batch": 7})
            checkpoints.wait()
            assert_is_step(checkpoints, 7)
        assert DiskSteps(folder).verify("7") == []
        actual = DiskSteps(folder).folders_of_kind("damaged")
        assert actual == ["7.damaged", "7.damaged-2"][:number]


def test_a_bit_flipped_anywhere_is_found(folder):
    """One bit of every 101 bytes of every file, of every byte of the commit."""
    seven, num_flips = folder / "7", 0
    names = files_of(seven)
    assert len(names) > 20
    for name in names:
        whole = (seven / name).read_bytes()
        every = 1 if name == "commit.json" else 101
        for byte in range(0, len(whole), every):
            flip(seven / name, 8 * byte + byte % 8)
            wrong = DiskSteps(folder).verify("7")
            (seven / name).write_bytes(whole)
            assert len(wrong) == 1 and name in wrong[0]
            num_flips += 1
    assert num_flips > 130 and DiskSteps(folder).verify("7") == []


def test_every_file_emptied_or_deleted_is_found(folder):
    seven = folder / "7"
    for name in files_of(seven):
        whole = (seven / name).read_bytes()
        (seven / name).unlink()
        [deleted] = DiskSteps(folder).verify("7")
        (seven / name).touch()
        [emptied] = DiskSteps(folder).verify("7")
        (seven / name).write_bytes(whole)
        assert name in deleted and name in emptied
    assert DiskSteps(folder).verify("7") == []


def test_stray_folders_are_no_steps(folder):
    (folder / "999").mkdir()
    for name in ("0007", "tmp", "12.5", "-3", "1e3", "٧"):
        (folder / name).mkdir()
    (folder / "1000").touch()  # A file.
    with Checkpoints(folder, note=[].append) as reading:
        assert reading.all_steps() == [3, 7] and reading.latest_step() == 7
    lines = []
    with Checkpoints(folder, saving=SaveSettings(), note=lines.append) as checkpoints:
        assert checkpoints.latest_step() == 7
    assert lines == [
        "the checkpoint of step 999 is damaged (commit.json is missing): renamed to 999.damaged"
    ]


def test_a_damaged_older_step_does_not_disturb(folder):
    flip(folder / "3" / WEIGHTS, 7)
    lines = []
    with Checkpoints(folder, saving=SaveSettings(), note=lines.append) as checkpoints:
        assert_is_step(checkpoints, 7)
        assert lines == []
        with pytest.raises(ConfigError, match=r"3.*mdl_vars/.* 7\."):
            checkpoints.restore(SMALL, mesh(), step=3)
        assert checkpoints.all_steps() == [7]


def test_without_a_good_step_nothing_starts(folder):
    for step in (3, 7):
        flip(folder / str(step) / WEIGHTS, 7)
    with Checkpoints(folder, note=[].append) as reading:
        for _ in range(2):
            with pytest.raises(ConfigError, match="3, 7 "):
                reading.restore(SMALL, mesh())
    for _ in range(2):  # The first launch sets them aside, the second finds no other.
        wrong = pytest.raises(ConfigError, match="3.damaged.*7.damaged")
        with Checkpoints(folder, saving=SaveSettings(), note=[].append) as checkpoints, wrong:
            checkpoints.latest_step()
    for path in folder.glob("*.damaged"):
        shutil.rmtree(path)
    with Checkpoints(folder, saving=SaveSettings(), note=[].append) as checkpoints:
        assert checkpoints.latest_step() is None


def test_a_damaged_step_is_not_the_best(tmp_path):
    from praxis_lite import BestCheckpoints

    saving = SaveSettings(best=BestCheckpoints(metric="heldout/loss"))
    with Checkpoints(tmp_path, saving=saving) as checkpoints:
        for step, loss in ((1, 5.0), (2, 3.0), (3, 4.0)):
            checkpoints.save(step, small_state(mesh(), step), SMALL, {}, {"heldout/loss": loss})
    flip(tmp_path / "2" / WEIGHTS, 7)
    lines = []
    with Checkpoints(tmp_path, note=lines.append) as reading:
        assert reading.best_step() == 3
        assert reading.restore(SMALL, mesh(), step="best").step == 3
    assert len(lines) == 1 and "step 2 is damaged" in lines[0]


def test_a_manifest_of_another_format_is_refused_not_set_aside(folder):
    manifest = manifest_of(folder / "7")
    manifest["format"] = 3
    DiskSteps(folder).commit("7", manifest)
    wrong = pytest.raises(ConfigError, match="7/manifest.json.*3.*2")
    with Checkpoints(folder, saving=SaveSettings()) as checkpoints, wrong:
        checkpoints.latest_step()
    assert (folder / "7").exists()


def test_a_step_is_verified_once_per_process(folder, monkeypatch):
    verified, verify = [], DiskSteps.verified_manifest
    monkeypatch.setattr(
        DiskSteps,
        "verified_manifest",
        lambda self, name: verified.append(name) or verify(self, name),
    )
    with Checkpoints(folder, saving=SaveSettings()) as checkpoints:
        assert checkpoints.all_steps() == [3, 7] and verified == []
        assert_is_step(checkpoints, 7)
        assert verified == ["7"]
        checkpoints.restore(SMALL, mesh(), step=3)
        assert verified == ["7", "3"]


def test_a_step_that_is_deleted_while_it_is_read_is_no_damage(folder, monkeypatch):
    """As by the job that trains there: its newer step is found instead."""
    verify = DiskSteps.verified_manifest

    def verify_late(self, name):
        if name == "7":
            self.remove(7)
        return verify(self, name)

    monkeypatch.setattr(DiskSteps, "verified_manifest", verify_late)
    lines = []
    with Checkpoints(folder, note=lines.append) as reading:
        assert_is_step(reading, 3)
    assert lines == []
