"""Elastic jobs of real processes with peer saves: a death costs few steps, and changes none."""

import json
import os
import signal
import subprocess
import time

import pytest

from praxis_lite.run.job.job_dir import JobDir
from tests.support import process_pairs as pairs
from tests.support.job_runs import home, lines_of, succeed

ARGV = (
    "--exp=jobzoo.experiments.Tiny", "--set", "run.num_train_steps=60",
    "--set", "run.checkpoints.every_steps=1000", "--set", "run.evaluation.every_steps=60",
    "--set", "run.peer_save_every_steps=5",
)  # fmt: skip


def children(process):
    done = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return sorted(map(int, done.stdout.split()))


@pytest.mark.slow
def test_a_killed_worker_costs_the_steps_since_the_peer_save_and_the_run_is_the_same():
    alone, job = JobDir(home() / "alone"), JobDir(home() / "peer_saves")
    launched = succeed(*ARGV, f"--job_log_dir={alone.path}")
    assert "run.peer_save_every_steps has no effect without --elastic" in launched.out
    processes = pairs.start_processes(
        *ARGV, f"--job_log_dir={job.path}", "--elastic", cwd=home()
    )
    deadline = time.monotonic() + 300
    while not job.metrics_jsonl.exists() or len(lines_of(job.metrics_jsonl)) < 23:
        assert time.monotonic() < deadline and processes[0].poll() is None
        time.sleep(0.2)
    os.kill(children(processes[1])[0], signal.SIGKILL)  # The worker is older than the spare.
    ended = pairs.ended(processes, timeout=400)
    assert [item.code for item in ended] == [0, 0], ended
    assert "restored the peer save of step" in ended[0].out
    _, change = map(json.loads, (job.path / "elastic.jsonl").read_text().splitlines())
    assert (change["kind"], change["who"], change["source"]) == ("died", [1], "peers")
    assert change["from_step"] >= 20 and change["lost_steps"] < 2 * 5
    # Nothing but the end is on disk.
    assert [path.name for path in job.checkpoints.iterdir()] == ["60"]
    losses = [
        {line["step"]: line["loss"] for line in lines_of(folder.metrics_jsonl)}
        for folder in (job, alone)
    ]
    assert losses[0].keys() == losses[1].keys() == set(range(1, 61))
    assert max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < 1e-5
