"""Several workers run one sweep: each trial once, and a killed worker's trial again."""

import re
import signal
import subprocess
import sys

import pytest

from praxis_lite.checkpoints.steps.step_dirs import committed_steps
from praxis_lite.job.job_dir import JobDir
from praxis_tools.sweep.claims import Claims
from praxis_tools.sweep.study import Study
from tests.support.job_runs import lines_of, start_process
from tests.support.process_pairs import ended, wait_until
from tests.support.swept_jobs import SWEPT

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


@pytest.mark.slow
def test_two_workers_run_each_trial_once_and_one_resumes_the_others(tmp_path):
    pytest.importorskip("optuna")
    argv = [
        "--mode=sweep",
        "--worker",
        SWEPT,
        f"--job_log_dir={tmp_path}/s",
        "--search=random",
        "--trials=3",
        "--prune=none",
        "--set",
        "task.learner.learning_rate=1e-3..1e-1",
    ]
    workers = [start_process(*argv, cwd=tmp_path, env={"SWEPT_SECONDS": "0.2"}) for _ in range(2)]
    jobs = [JobDir(tmp_path / f"s/trials/000{number}") for number in range(3)]
    wait_until(lambda: all(committed_steps(x.checkpoints) for x in jobs[:2]), workers)
    workers[0].send_signal(signal.SIGKILL)
    outputs = [worker.out for worker in ended(workers)]
    starts = sorted(re.findall(r"^trial (\d) starts: ", "\n".join(outputs), re.M))
    assert starts == ["0", "1", "2"]
    (resumed,) = re.findall(r"^trial (\d) resumes: ", outputs[1], re.M)
    assert f"trial {resumed} starts" in outputs[0]
    records = Study(tmp_path / "s/sweep.journal").records()
    assert [record.status for record in records] == ["complete"] * 3
    assert len({tuple(record.values.values()) for record in records}) == 3
    for job in jobs:
        assert [line["step"] for line in lines_of(job.metrics_jsonl)] == [*range(1, 21)]
    assert "best trial: " in outputs[1]  # The last worker reports.
