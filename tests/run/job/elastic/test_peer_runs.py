"""Elastic jobs of real processes with peer saves: a death costs few steps, and changes none."""

import functools
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


def begun(job, *argv, count):
    """Returns the processes of an elastic job, which have made 23 steps."""
    processes = pairs.start_processes(
        *ARGV, f"--job_log_dir={job.path}", "--elastic", *argv, cwd=home(), count=count
    )
    deadline = time.monotonic() + 400
    while not job.metrics_jsonl.exists() or len(lines_of(job.metrics_jsonl)) < 23:
        assert time.monotonic() < deadline and processes[0].poll() is None
        time.sleep(0.2)
    return processes


def last_change(job):
    return [json.loads(line) for line in (job.path / "elastic.jsonl").read_text().splitlines()][-1]


def assert_same_losses(job, alone):
    losses = [
        {line["step"]: line["loss"] for line in lines_of(folder.metrics_jsonl)}
        for folder in (job, alone)
    ]
    assert losses[0].keys() == losses[1].keys() == set(range(1, 61))
    assert max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < 1e-5


@functools.cache
def undisturbed():
    alone = JobDir(home() / "alone")
    launched = succeed(*ARGV, f"--job_log_dir={alone.path}")
    assert "run.peer_save_every_steps has no effect without --elastic" in launched.out
    return alone


@pytest.mark.slow
def test_a_killed_worker_costs_the_steps_since_the_peer_save_and_the_run_is_the_same():
    job = JobDir(home() / "peer_saves")
    processes = begun(job, count=2)
    os.kill(children(processes[1])[0], signal.SIGKILL)  # The worker is older than the spare.
    ended = pairs.ended(processes, timeout=400)
    assert [item.code for item in ended] == [0, 0], ended
    assert "restored the peer save of step" in ended[0].out
    change = last_change(job)
    assert (change["kind"], change["who"], change["source"]) == ("died", [1], "peers")
    assert change["from_step"] >= 20 and change["lost_steps"] < 2 * 5
    # Nothing but the end is on disk.
    assert [path.name for path in job.checkpoints.iterdir()] == ["60"]
    assert_same_losses(job, undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize(("dead", "source"), [((2,), "peers"), ((1, 2), "disk")])
def test_a_dead_host_is_made_good_from_its_neighbour_and_two_neighbours_from_the_disk(
    dead, source
):
    job = JobDir(home() / f"peer_saves_{source}")
    processes = begun(job, "--set", "run.checkpoints.every_steps=10", count=4)
    for member in dead:
        pairs.kill(processes[member])
    ended = pairs.ended(processes, timeout=400)
    assert {k: item.code for k, item in enumerate(ended) if k not in dead} == dict.fromkeys(
        sorted({0, 1, 2, 3} - set(dead)), 0
    ), ended
    change = last_change(job)
    assert (change["who"], change["source"]) == (list(dead), source)
    assert change["num_devices"] == 8 - 2 * len(dead)
    lost = "nobody holds the part of process 1 of step" in ended[0].out
    assert lost == (source == "disk")
    assert_same_losses(job, undisturbed())
