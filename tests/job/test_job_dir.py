"""Whose directory it is, and what is said when it is someone else's."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from praxis_lite import CheckpointLoadingRules, ConfigError
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.sources import located
from praxis_lite.checkpoints.tools import steps_directory
from praxis_lite.job.job_dir import open_for_reading, open_for_training
from praxis_lite.pax.checkpoints import read_pax_checkpoint

CONFIG = json.dumps({"experiment": "praxis_lite.experiments.lm.PyDocs"})


def job_at(path):
    job = open_for_training(path, "praxis_lite.experiments.lm.PyDocs")
    job.write_config(CONFIG, ["run.seed=7", "run.num_train_steps=13"])
    return job


def test_a_new_directory_is_made_with_its_parents_and_reopened(tmp_path):
    job = job_at(tmp_path / "a" / "b")
    assert job == open_for_training(str(tmp_path / "a" / "b"), "praxis_lite.experiments.lm.PyDocs")
    assert job == open_for_reading(tmp_path / "a" / "b")
    assert job.config_txt.read_text() == "run.seed=7\nrun.num_train_steps=13\n"
    assert sorted(os.listdir(job.path)) == ["config.json", "config.txt"]


def test_an_empty_directory_or_one_with_hidden_files_only_is_taken(tmp_path):
    (tmp_path / ".DS_Store").touch()
    assert open_for_training(tmp_path, "praxis_lite.experiments.lm.PyDocs").path == tmp_path


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex.*config\.json"):
        open_for_training(tmp_path, "praxis_lite.experiments.lm.PyDocs")
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"experiment": 7}', "\xff"])
def test_a_config_json_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="praxis_lite"):
        open_for_training(tmp_path, "praxis_lite.experiments.lm.PyDocs")


def test_a_job_of_another_experiment_is_refused_naming_both(tmp_path):
    job_at(tmp_path)
    with pytest.raises(ConfigError, match=r"experiments\.lm\.PyDocs.*zoo\.MyLm"):
        open_for_training(tmp_path, "zoo.MyLm")


def test_a_file_in_its_place_or_above_it_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for opened in (lambda p: open_for_training(p, "zoo.MyLm"), open_for_reading):
        with pytest.raises(ConfigError, match="job_log_dir=.*/file "):
            opened(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"file/below.*\(Not a directory\)"):
        open_for_training(tmp_path / "file" / "below", "zoo.MyLm")


def test_reading_needs_a_job(tmp_path):
    with pytest.raises(ConfigError, match=f"/typo/deeper .*{tmp_path}"):
        open_for_reading(tmp_path / "typo" / "deeper")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_for_reading(tmp_path)


def test_jobs_in_a_directory_that_is_none_or_beside_it_are_named(tmp_path):
    job_at(tmp_path / "jobs" / "warmup7")
    job_at(tmp_path / "jobs" / "other")
    with pytest.raises(ConfigError, match=r"warmup77 .* mean warmup7, in .*/jobs\."):
        open_for_reading(tmp_path / "jobs" / "warmup77")
    with pytest.raises(ConfigError, match="trained job: .*/jobs/other, .*/jobs/warmup7"):
        open_for_reading(tmp_path / "jobs")


@pytest.mark.skipif(os.name != "posix", reason="users and modes of POSIX")
def test_a_directory_without_the_right_to_write_is_refused(tmp_path):
    code = (
        "import os, sys, pathlib\n"
        "from praxis_lite.job.job_dir import open_for_training, open_for_reading\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    try: open_for_training(path, 'praxis_lite.experiments.lm.PyDocs')\n"
        "    except ValueError as error: print(error)\n"
        "try: open_for_reading(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        "open_for_reading(sys.argv[1], writes=False)\n"
    )
    # Below /tmp: pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        job = job_at(f"{top}/job").path
        os.chmod(job, 0o555)
        os.chmod(top, 0o555)
        command = [sys.executable, "-c", code, job, f"{top}/new"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        os.chmod(top, 0o755)
        os.chmod(job, 0o755)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert "cannot be written (Permission denied)" in first and first == third
    assert "/new cannot be created (Permission denied)" in second


def test_a_users_own_package_of_experiments_is_not_the_librarys(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"experiment": "experiments.mine.MyLm"}))
    assert open_for_training(tmp_path, "experiments.mine.MyLm").path == tmp_path
    with pytest.raises(ConfigError, match=r"experiments\.mine\.MyLm"):
        open_for_training(tmp_path, "praxis_lite.experiments.mine.MyLm")


ADDRESSES = ["hdfs://host/job", "file:///tmp/job", "gs:/b/j"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_in_place_of_a_directory_is_refused_and_nothing_is_made(
    address, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    calls = [
        lambda: open_for_training(address, "zoo.MyLm"),
        lambda: open_for_training(Path(address), "zoo.MyLm"),
        lambda: open_for_reading(address),
        lambda: steps_directory(address),
        lambda: Checkpoints(address),
        lambda: read_pax_checkpoint(address),
        lambda: located(address, CheckpointLoadingRules(load_rules=[("x", "x")])),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=rf"URL \({address.partition(':')[0]}\).*local dir"):
            call()
    assert os.listdir(tmp_path) == []


def test_a_colon_in_a_directorys_name_is_no_address(tmp_path):
    assert open_for_training(tmp_path / "run:7" / "lm", "zoo.MyLm").path == tmp_path / "run:7/lm"
