"""Every path that a file system allows holds a job, or is refused before anything is written."""

import functools
import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError, FailedSave
from praxis_lite.checkpoints import tools
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.digest import digest_of
from praxis_lite.checkpoints.orbax_write import OrbaxWrite
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.job.job_dir import JobDir, open_for_training
from praxis_lite.job.local_directory import local_directory
from tests.checkpoints.saved_steps import save_steps, true_state
from tests.checkpoints.test_checkpoints import SMALL, small_state
from tests.checkpoints.test_damage import mesh
from tests.support.job_runs import launch, loaded
from tests.support.marks import slow_but

# Names of folders that some library takes for something else.
NAMES = [
    "run[1]",
    "a*b?",
    "{a,b}",
    "new\nline",
    "50%s",
    "a:b=c",
    "e\u0301日本",
    "~user",
    "$HOME",
    "...",
    "x" * 255,
    "N.saving",
    "7",
    "checkpoints",
]


@functools.cache
def digest_below_a_plain_name():
    with tempfile.TemporaryDirectory() as folder:
        plain = save_steps(Path(folder) / "plain", {3: true_state()}, mesh_shape=(1, 1, 1))
        return digest_of(plain / "3")


@pytest.mark.parametrize("name", slow_but(("run[1]", "new\nline"), NAMES))
def test_a_step_is_saved_and_read_below_every_name(tmp_path, name):
    folder = tmp_path / name / "checkpoints"
    save_steps(folder, {3: true_state()}, mesh_shape=(1, 1, 1))
    assert [step.state for step in tools.list_steps(folder)] == ["good"]
    assert digest_of(folder / "3") == digest_below_a_plain_name()


@pytest.mark.parametrize(
    "given",
    ["a/../job", "./job", "job/.", "job//", "/../{tmp}/job", "link/../job", "a/b/../../job"],
)
def test_dots_and_slashes_name_the_same_directory(tmp_path, monkeypatch, given):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "elsewhere/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/below")
    monkeypatch.chdir(tmp_path)
    path = local_directory(given.replace("{tmp}", str(tmp_path)))
    # As the system goes: ".." of a link is where the link leads.
    where = tmp_path / ("elsewhere/job" if given.startswith("link") else "job")
    assert Path(os.path.normpath(path)) == where.resolve() and ".." not in path.parts


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("hdfs://bucket/x", r"\(hdfs\)"),
        ("s3:/b", r"\(s3\)"),
        ("", "''"),
        ("a\0b", "NUL"),
        ("a\\b", "backslash"),
        (b"run\xff".decode(errors="surrogateescape"), "UTF-8"),
        ("x" * 256, "x.*long"),
        ("loop", "^loop .*links"),
        ("dangling", "/dangling "),
        ("file/job", "/file"),
    ],
)
def test_a_path_that_holds_no_job_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, given, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("x")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match=words):
        open_for_training(given, "lm.Synthetic")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_step_of_which_an_array_was_not_written_is_not_committed(tmp_path, monkeypatch):
    wait = OrbaxWrite.wait

    def wait_and_lose(self):
        wait(self)
        database = next(tmp_path.glob("*.saving*")) / "mdl_vars"
        shutil.rmtree(database / "d", ignore_errors=True)
        (database / "manifest.ocdbt").unlink()

    monkeypatch.setattr(OrbaxWrite, "wait", wait_and_lose)
    with pytest.raises(FailedSave, match="3.*mdl_vars/params/w is missing"):  # noqa: SIM117
        with Checkpoints(tmp_path, saving=SaveSettings()) as checkpoints:
            checkpoints.save(3, small_state(mesh(), 3), SMALL, {"next_batch": 3})
            checkpoints.wait()
    assert not (tmp_path / "3").exists()


@pytest.mark.slow
def test_a_job_trains_resumes_evaluates_decodes_and_loads_there(tmp_path):
    name = "run[1]{x}*?\nb é"
    argv = [f"--job_log_dir={tmp_path / 'a/..' / name}"]
    train = ["--exp=jobzoo.experiments.Tiny", *argv, "--set"]
    for steps in (3, 5):
        done = launch(*train, f"run.num_train_steps={steps}")
        assert done.code == 0, done.err
    assert "restored the checkpoint of step 3" in done.out
    for mode in ("eval", "decode", "summary"):
        done = launch(f"--mode={mode}", *argv)
        assert done.code == 0, done.err
    model = loaded(JobDir(tmp_path / name))
    assert np.isfinite(jax.tree.leaves(model.weights)[0]).all()
