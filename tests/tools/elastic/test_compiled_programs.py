"""The compiled programs of an elastic job: kept whole, and taken by every process that comes."""

import contextlib
import os
import time

import pytest

from praxis_lite.job.job_dir import JobDir
from praxis_tools.elastic import compiled_programs
from praxis_tools.elastic.worker_assignment import Assignment
from praxis_tools.elastic.worker_process import WorkerProcess
from tests.support.job_runs import CHECKOUT, home, launch, lines_of
from tests.support.process_pairs import free_port


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    # The workers compile into the job, not into the cache of the tests.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}:{home()}")
    (tmp_path / "job/elastic").mkdir(parents=True)
    return JobDir(tmp_path / "job")


def generation(job, members, *settings):
    """Lets workers of a tiny job of two processes train to the end; returns their reports."""
    argv = [
        "--exp=jobzoo.experiments.Tiny",
        "--packages=jobzoo",
        f"--job_log_dir={job.path}",
        "--elastic",
        "--set",
        *settings,
    ]
    coordinator = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as held:
        workers = [WorkerProcess(argv) for _ in members]
        for worker, member in zip(workers, members, strict=True):
            held.callback(worker.kill)
            worker.assign(
                Assignment(
                    generation=1,
                    member=member,
                    members=members,
                    stores=("",) * len(members),
                    key=b"key",
                    coordinator=coordinator,
                    num_slots=2,
                    folder=str(job.elastic),
                )
            )
        until = time.monotonic() + 300
        while any(worker.status() is None for worker in workers):
            assert time.monotonic() < until, "a worker does not end"
            for worker in workers:
                worker.read_reports()
            time.sleep(0.2)
        assert [worker.status() for worker in workers] == [0] * len(workers)
        return [worker.reports for worker in workers]


def test_a_program_is_there_whole_or_not_at_all_and_the_first_one_stays(tmp_path):
    files = compiled_programs._AtomicFileCache(tmp_path / "job/elastic/compiled")
    assert files.get("jit_step-7") is None
    files.put("jit_step-7", b"program")
    files.put("jit_step-7", b"the same of another process")
    assert files.get("jit_step-7") == b"program"
    assert os.listdir(tmp_path / "job/elastic/compiled") == ["jit_step-7"]


@pytest.mark.nightly
def test_what_a_generation_of_seven_devices_left_is_evaluated_elsewhere(job):
    # Two processes of seven devices each were there, and one of them is left.
    (reports,) = generation(job, (1,), "mesh.ici_mesh_shape=(1,7,2)", "run.num_train_steps=3")
    assert reports["mesh"] == {"replica": 1, "data": 7, "mdl": 1}
    assert "mesh.ici_mesh_shape=1,7,1" in job.config_txt.read_text().splitlines()
    expected = lines_of(job.eval_metrics_jsonl)[-1]
    ended = launch("--mode=eval", f"--job_log_dir={job.path}")
    assert ended.code == 0 and "data 7" in ended.out, ended
    actual = lines_of(job.eval_metrics_jsonl)[-1]
    assert actual["step"] == expected["step"] == 3
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)
