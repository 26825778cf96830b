"""Jobs of several real processes, over loopback: what one process gives, and one end for all."""

import functools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from praxis_lite.job_dir import JobDir
from tests import process_pairs as pairs
from tests.job_runs import CHECKOUT, copy_of_trained, home, lines_of, trained

TINY = "--exp=jobzoo.experiments.Tiny"


@functools.cache
def pair_job() -> tuple[JobDir, list[pairs.Ended]]:
    """Returns the job of `trained`, made by two processes of four devices; not to be changed."""
    folder = home() / "pair"
    return JobDir(folder), pairs.run(TINY, f"--job_log_dir={folder}", cwd=home())


def numbers_of(path: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in line.items() if isinstance(v, float) and "per_second" not in k}
        for line in lines_of(path)
    ]


def test_two_processes_give_the_losses_of_one():
    # 13 rows on eight devices: the first process has 8 of them, the second 5 and filler. Gloo adds
    # in another order than XLA does within a process: the last bit differs.
    job, done = pair_job()
    assert [one.code for one in done] == [0, 0], done
    for name in ("metrics.jsonl", "eval_metrics.jsonl"):
        ours, alone = numbers_of(job.path / name), numbers_of(trained()[0].path / name)
        assert len(ours) == len(alone)
        for one, other in zip(ours, alone, strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                np.testing.assert_allclose(value, other[key], rtol=1e-6, atol=1e-6, err_msg=key)


def test_the_first_process_alone_speaks_and_writes():
    job, (first, second) = pair_job()
    assert "2 processes on 1 hosts, found by --coordinator=127.0.0.1:" in first.out
    assert "trained to step 7" in first.out
    assert second.out == first.err == second.err == ""
    names = [
        {path.name for path in one.path.iterdir() if path.name != ".training"}
        for one in (job, trained()[0])
    ]
    assert names[0] == names[1]


def test_a_pair_of_processes_does_its_parts_right():
    port = pairs.free_port()
    done = pairs.ended(
        [
            subprocess.Popen(
                [sys.executable, "-m", "tests.process_work", f"127.0.0.1:{port}", str(k)],
                cwd=CHECKOUT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for k in range(2)
        ]
    )
    assert [one.code for one in done] == [0, 0], done
    lines = done[0].out.splitlines()
    seen = json.loads(next(line for line in lines if line.startswith("{")))
    for order in ("in turn", "interleaved", "nested"):
        assert seen[order] == [True] * 5, order
    assert seen["agreed"] == [False, False, False, True, False, False]
    assert seen["asked by"].startswith("a signal to process 1 (")
    assert seen["exchanged"] == [[f"0.{k}", f"1.{k}"] for k in range(3)]
    assert seen["missing"].startswith("process 1 (")
    slow = [line for line in lines if line.startswith("slow: ")]
    assert len(slow) == 1 and slow[0].startswith("slow: process 1 (")


@pytest.mark.slow
def test_sigterm_to_one_saves_the_same_step_of_all_and_a_resume_goes_on(tmp_path):
    job = JobDir(tmp_path / "job")
    more = ["--set", "run.num_train_steps=400", "run.eval_every_steps=None"]
    processes = pairs.start_processes(TINY, f"--job_log_dir={job.path}", *more, cwd=tmp_path)
    pairs.wait_until(lambda: num_lines(job) >= 2, processes)
    pairs.kill(processes[1], signal.SIGTERM)
    first, second = pairs.ended(processes)
    assert (first.code, second.code) == (0, 0), (first, second)
    last = lines_of(job.metrics_jsonl)[-1]["step"]
    assert "stopped by a signal to process 1 (" in first.out
    assert f"step {last} is saved" in first.out
    assert str(last) in [path.name for path in job.checkpoints.iterdir()]

    # What is left is gone on with, and the first process killed while a step is saved.
    more[-1] = "run.checkpoint_every_steps=5"
    processes = pairs.start_processes(TINY, f"--job_log_dir={job.path}", *more, cwd=tmp_path)
    pairs.wait_until(lambda: any(job.checkpoints.glob("*.saving*")), processes)
    pairs.kill(processes[0])
    _, second = pairs.ended(processes)
    assert second.code == 1
    assert "error: process 0 (" in second.err and "is gone: it was killed" in second.err


def num_lines(job: JobDir) -> int:
    return len(job.metrics_jsonl.read_text().splitlines()) if job.metrics_jsonl.exists() else 0


@pytest.mark.slow
def test_what_differs_between_processes_is_refused_by_both(tmp_path):
    done = pairs.run(
        TINY, f"--job_log_dir={tmp_path}/job", cwd=tmp_path,
        more=((), ("--set", "run.seed=3")),
    )
    for one in done:
        assert one.code == 2
        words = " ".join(one.err.replace("[process 1] ", "").split())
        assert "run.seed is" in words and "on process 0 (" in words and "on process 1 (" in words


@pytest.mark.slow
def test_a_mistake_of_one_process_ends_the_other_with_its_words(tmp_path):
    first, second = pairs.run(
        TINY, f"--job_log_dir={tmp_path}/job", cwd=tmp_path,
        more=((), ("--set", "run.sed=3")),
    )
    assert (first.code, second.code) == (2, 2)
    assert "error: process 1 (" in first.err and "run.sed" in first.err
    assert "[process 1] error: " in second.err


@pytest.mark.slow
# The other four of this table: `make faults`.
@pytest.mark.parametrize(("victim", "when"), [(0, "step"), (1, "save")])
def test_a_killed_process_is_named_and_ends_the_other_within_a_minute(victim, when, tmp_path):
    job = JobDir(tmp_path / "job")
    is_time = {
        "step": lambda: num_lines(job) >= 2,
        "save": lambda: any(job.checkpoints.glob("*.saving*")),
    }[when]
    more = ["--set", "run.num_train_steps=400", "run.checkpoint_every_steps=5"]
    processes = pairs.start_processes(TINY, f"--job_log_dir={job.path}", *more, cwd=tmp_path)
    pairs.wait_until(is_time, processes)
    began = pairs.kill(processes[victim])
    left = pairs.ended(processes)[1 - victim]
    assert left.code == 1
    assert f"process {victim} (" in left.err and "it was killed, or its host" in left.err
    assert left.at - began < 60


@pytest.mark.slow
def test_slices_are_processes_and_both_evaluate_and_decode(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    shutil.rmtree(job.path / "decode", ignore_errors=True)
    argv = ("--packages=jobzoo", f"--job_log_dir={job.path}")
    mesh = ("--set", "mesh.ici_mesh_shape=(1,2,2)", "mesh.dcn_mesh_shape=(1,2,1)")
    for mode in ("eval", "decode"):
        done = pairs.run(f"--mode={mode}", *argv, *mesh, cwd=tmp_path)
        assert [one.code for one in done] == [0, 0], done
    own, other = numbers_of(job.eval_metrics_jsonl)[-2:]
    assert own.keys() == other.keys()
    for key, value in own.items():
        np.testing.assert_allclose(value, other[key], rtol=1e-6, err_msg=key)
    assert len(job.decode_jsonl("prompts", 7).read_text().splitlines()) == 3
