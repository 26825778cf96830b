"""Tests that jobs in an object store are bitwise equal to jobs on disk."""

import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import praxis_lite
from praxis_lite.checkpoints.digest import digest_of
from praxis_lite.checkpoints.steps.step_store import steps_in
from praxis_lite.host.object_stores import StorePath
from tests.support import process_pairs
from tests.support.fake_gcs import gcs_bucket
from tests.support.fake_s3 import s3_bucket
from tests.support.job_runs import (
    CHECKOUT,
    home,
    launch,
    lines_of,
    start_process,
    succeed,
)

pytestmark = pytest.mark.slow
TRAIN = ("--exp=jobzoo.experiments.Tiny", "--set", "run.checkpoints.every_steps=2")


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as url:
        yield url


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The directory of the job on disk."""
    folder = tmp_path_factory.mktemp("local") / "job"
    succeed(*TRAIN, "run.num_train_steps=5", f"--job_log_dir={folder}")
    return folder


def test_a_job_in_a_store_trains_resumes_evaluates_decodes_and_loads(bucket, local, tmp_path):
    check_job(bucket, local, tmp_path, ("eval", "decode", "summary", "report", "certify"))


def test_a_job_in_google_cloud_storage_is_the_same(local, tmp_path):
    with gcs_bucket() as bucket:
        check_job(bucket, local, tmp_path, ("eval",))


def check_job(bucket, local, tmp_path, modes):
    """Trains the same job in a store in two launches, compares them, and runs modes."""
    stored = f"{bucket}/jobs/job"
    for steps in (3, 5):
        done = succeed(*TRAIN, f"run.num_train_steps={steps}", f"--job_log_dir={stored}")
    assert "restored the checkpoint of step 3" in done.out
    for mode in modes:
        done = launch(f"--mode={mode}", f"--job_log_dir={stored}")
        assert done.code == 0, done.err
    job = StorePath.opened(stored)
    assert digest_of(job / "checkpoints" / "5") == digest_of(local / "checkpoints" / "5")
    (job / "metrics.jsonl").download(tmp_path / "metrics.jsonl")
    assert lines_of(tmp_path / "metrics.jsonl") == lines_of(local / "metrics.jsonl")
    model = praxis_lite.load(stored, packages=["jobzoo"])
    assert model.step == 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(model.weights))


def test_a_report_is_written_to_the_store_and_a_wrong_bucket_fails_before_anything_compiles(bucket):
    page = f"{bucket}/report.html"
    succeed(*TRAIN, "run.num_train_steps=2", f"--job_log_dir={bucket}/jobs/reported")
    succeed("--mode=report", f"--job_log_dir={bucket}/jobs/reported", f"--html={page}")
    assert b"<html" in StorePath.opened(page).read_bytes()
    for more in ((), ("--elastic", "--num_processes=1", "--process_id=0")):
        done = launch(*TRAIN, "--job_log_dir=s3://absent/job", *more)
        assert done.code == 2 and done.num_compiled == 0
        assert "s3://absent does not exist" in done.err


# A script in place of the Makefile's Python. It trains one layer for two steps.
PYTHON = """#!/bin/sh
case "$*" in
  "-m pip "*) exit 0;;
  *--exp=*) exec {python} "$@" --set run.num_train_steps=2 run.checkpoints.every_steps=1 \\
    task.model.num_layers=1 run.evaluation.max_batches=1;;
  *) exec {python} "$@";;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_runs_in_a_store_and_does_not_overwrite_a_job(bucket, tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    command = ["make", "-o", f"{tmp_path}/.installed", "demo", f"VENV={tmp_path}"]
    command += [f"JOB_LOG_DIR={bucket}/jobs/demo"]
    for code, message in ((0, "trained to step 2: s3://bucket/jobs/demo"), (2, "already contains")):
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
        assert done.returncode == code and message in done.stdout, done
    job = StorePath.opened(f"{bucket}/jobs/demo")
    assert steps_in(job / "checkpoints").committed() == [1, 2]
    assert (job / "decode" / "heldout" / "2.jsonl").is_file()


def test_two_processes_without_a_shared_directory_save_and_resume(bucket, local, tmp_path):
    """As on two hosts: they share only the store, which contains the job and its data."""
    for file in (home() / "texts").glob("*.txt"):
        StorePath.opened(f"{bucket}/texts/{file.name}").upload(file)
    hosts = [tmp_path / name for name in ("a", "b")]
    for folder in (folder / name for folder in hosts for name in ("home", "cache", "tmp")):
        folder.mkdir(parents=True)
    env = [
        {"HOME": f"{a}/home", "XDG_CACHE_HOME": f"{a}/cache", "TMPDIR": f"{a}/tmp"} for a in hosts
    ]
    job = StorePath.opened(f"{bucket}/jobs/two")
    (job / ".connecting.key").write_bytes(b"17")  # Of a launch that was killed.
    for steps in (3, 5):
        settings = (f"run.num_train_steps={steps}", f"corpus.files={bucket}/texts/*.txt")
        argv = (*TRAIN, *settings, f"--job_log_dir={job}")
        ended = process_pairs.run(*argv, cwd=tmp_path, host="0.0.0.0", env=env)
        assert [process.code for process in ended] == [0, 0], ended
        assert not (job / ".connecting.key").exists()
    assert "restored the checkpoint of step 3" in ended[0].out
    names = job.files()
    for part in ("mdl_vars/ocdbt.process_1/d/", "mdl_vars/ocdbt.process_0/d/"):
        assert any(name.startswith(f"checkpoints/5/{part}") for name in names)
    assert {"log.txt", "log.1.txt", "examples/1.jsonl"} <= names.keys()
    (job / "metrics.jsonl").download(tmp_path / "metrics.jsonl")
    actual, expected = (
        [line["loss"] for line in lines_of(file)]
        for file in (tmp_path / "metrics.jsonl", local / "metrics.jsonl")
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_killed_job_resumes_at_once_on_the_same_host(bucket, tmp_path):
    location = f"{bucket}/jobs/killed"
    argv = (*TRAIN, "run.num_train_steps=100000", f"--job_log_dir={location}")
    process = start_process(*argv, cwd=tmp_path, out=subprocess.DEVNULL)
    steps = steps_in(StorePath.opened(f"{location}/checkpoints"))
    process_pairs.wait_until(steps.committed, [process])
    process_pairs.kill(process)
    process.communicate()
    newest = steps.committed()[-1]
    done = succeed(*TRAIN, f"run.num_train_steps={newest + 1}", f"--job_log_dir={location}")
    assert f"restored the checkpoint of step {newest}" in done.out
    StorePath.opened(f"{location}/metrics.jsonl").download(tmp_path / "metrics.jsonl")
    steps = [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, newest + 2))
