"""Several workers run one sweep: each trial once, and a killed worker's trial again."""

import concurrent.futures
import itertools
import re
import signal
import subprocess
import sys
import threading

import pytest

from praxis_lite.checkpoints.steps.step_store import steps_in
from praxis_lite.host import object_stores
from praxis_lite.host.object_stores import ObjectChanged, StorePath
from praxis_lite.job.job_dir import job_dir_at
from praxis_lite.job.local_directory import directory
from praxis_tools.sweep.claims import Claims
from praxis_tools.sweep.stored_sweep import StoredClaims, StoredJournal
from praxis_tools.sweep.study import Study
from tests.support.fake_s3 import s3_bucket
from tests.support.job_runs import lines_of, start_process
from tests.support.process_pairs import ended, wait_until
from tests.support.swept_jobs import SWEPT


@pytest.fixture
def store():
    pytest.importorskip("obstore")
    object_stores._bucket.cache_clear()
    return StorePath.opened("memory://bucket/sweep")


HOLDER = """
import sys
from pathlib import Path
from praxis_tools.sweep.claims import Claims

claims = Claims(Path(sys.argv[1]), is_shared=True)
with claims.exclusive():
    print([claims.claim(number) for number in (3, 3, 5)], flush=True)
claims.release(5)
print("released", flush=True)
sys.stdin.read()
"""


def test_a_trial_is_claimed_by_one_process_until_it_is_killed(tmp_path):
    argv = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "[True, False, True]\n"
        assert process.stdout.readline() == "released\n"
        claims = Claims(tmp_path, is_shared=True)
        with claims.exclusive():
            assert [claims.claim(number) for number in (3, 5, 7)] == [False, True, True]
        process.kill()
        process.wait()
        assert claims.claim(3)


def test_a_trial_in_a_store_is_claimed_by_one_process(store):
    with StoredClaims(store) as first, StoredClaims(store) as second:
        with first.exclusive():
            assert [first.claim(number) for number in (3, 3, 5)] == [True, False, True]
            thread = threading.Thread(target=lambda: second.exclusive().__enter__(), daemon=True)
            thread.start()
            thread.join(0.5)
            assert thread.is_alive()
        thread.join(5)
        assert not thread.is_alive()
        first.release(5)
        assert [second.claim(number) for number in (3, 5, 7)] == [False, True, True]
    with StoredClaims(store) as third:
        assert [third.claim(number) for number in (3, 5, 7)] == [True] * 3


def test_no_entry_of_a_journal_in_a_store_is_lost_or_duplicated(store, monkeypatch):
    """Also if the answer to a write is lost."""
    num_writes, write = itertools.count(), StorePath.write_bytes

    def write_bytes(self, content, mode=None):
        version = write(self, content, mode)
        if next(num_writes) % 3 == 1:
            raise ObjectChanged(str(self))  # The request was repeated.
        return version

    def append(process):
        journal = StoredJournal(store / "sweep.journal")
        for number in range(7):
            journal.append_logs([{"process": process, "number": number, "k": k} for k in (0, 1)])

    monkeypatch.setattr(StorePath, "write_bytes", write_bytes)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(append, range(3)))
    entries = StoredJournal(store / "sweep.journal").read_logs(0)
    assert [entry["k"] for entry in entries] == [0, 1] * 21
    for process in range(3):
        numbers = [x["number"] for x in entries if x["process"] == process and x["k"]]
        assert numbers == list(range(7))
    assert StoredJournal(store / "sweep.journal").read_logs(40) == entries[40:]


@pytest.fixture(params=["disk", "s3"])
def sweep_dir(request, tmp_path):
    """The directory or URL of a sweep."""
    if request.param == "disk":
        yield f"{tmp_path}/s"
        return
    with s3_bucket() as bucket:
        yield f"{bucket}/s"


@pytest.mark.slow
def test_two_workers_run_each_trial_once_and_one_resumes_the_others(tmp_path, sweep_dir):
    pytest.importorskip("optuna")
    argv = [
        "--mode=sweep",
        "--worker",
        SWEPT,
        f"--job_log_dir={sweep_dir}",
        "--search=random",
        "--trials=3",
        "--prune=none",
        "--set",
        "task.learner.learning_rate=1e-3..1e-1",
    ]
    # The first worker is slow, so that trials are left if the second starts late.
    seconds = ("1", "0.2")
    workers = [start_process(*argv, cwd=tmp_path, env={"SWEPT_SECONDS": s}) for s in seconds]
    jobs = [job_dir_at(f"{sweep_dir}/trials/000{number}") for number in range(3)]
    wait_until(lambda: all(steps_in(job.checkpoints).committed() for job in jobs[:2]), workers)
    workers[0].send_signal(signal.SIGKILL)
    outputs = [worker.out for worker in ended(workers)]
    starts = sorted(re.findall(r"^trial (\d) starts: ", "\n".join(outputs), re.M))
    assert starts == ["0", "1", "2"]
    (resumed,) = re.findall(r"^trial (\d) resumes: ", outputs[1], re.M)
    assert f"trial {resumed} starts" in outputs[0]
    records = Study(directory(f"{sweep_dir}/sweep.journal")).records()
    assert [record.status for record in records] == ["complete"] * 3
    assert len({tuple(record.values.values()) for record in records}) == 3
    for job in jobs:
        job.refresh()
        assert [line["step"] for line in lines_of(job.metrics_jsonl)] == [*range(1, 21)]
    assert "best trial: " in outputs[1]  # The last worker reports.
