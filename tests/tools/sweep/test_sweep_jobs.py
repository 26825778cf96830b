"""Sweeps of real jobs: their losses are those of jobs by hand, whatever kills the sweep."""

import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from praxis_lite.checkpoints.steps.step_store import DiskSteps
from praxis_lite.job.job_dir import JobDir
from tests.support.job_runs import lines_of, start_process, succeed
from tests.support.process_pairs import ended, wait_until
from tests.support.swept_jobs import SWEPT

pytest.importorskip("optuna")
# `make test-all` kills a worker of a sweep (test_workers.py).
pytestmark = pytest.mark.nightly
RATES = ("1e-2", "1e-1")


def is_alive(pid):
    """Returns True if a process runs, and is not dead and waiting for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A sweep that was killed in its second trial and launched again, and what both printed."""
    folder = tmp_path_factory.mktemp("killed")
    argv = [
        "--mode=sweep",
        SWEPT,
        f"--job_log_dir={folder}/s",
        "--set",
        f"task.learner.learning_rate={','.join(RATES)}",
    ]
    slow = {"SWEPT_SECONDS": "0.2"}
    first = start_process(*argv, cwd=folder, env=slow)
    second_job = JobDir(folder / "s/trials/0001")
    wait_until(lambda: 5 in DiskSteps(second_job.checkpoints).committed(), [first])
    trainer = int(re.search(r"process (\d+)", (second_job.path / ".training").read_text())[1])
    first.send_signal(signal.SIGKILL)
    before = ended([first])
    # The kernel asks the trial to end; it saves its step.
    deadline = time.monotonic() + 60
    while is_alive(trainer):
        assert time.monotonic() < deadline, "a trial outlives its sweep"
        time.sleep(0.1)
    saved = DiskSteps(second_job.checkpoints).committed()[-1]
    return folder, before[0], saved, ended([start_process(*argv, cwd=folder)])[0]


def test_a_sweep_that_was_killed_makes_no_step_twice(killed):
    folder, _, saved, again = killed
    assert again.code == 0, again.err
    texts = [(folder / f"s/trials/000{k}.txt").read_text() for k in range(2)]
    assert [text.count("\n$ ") + 1 for text in texts] == [1, 2]
    assert f"restored the checkpoint of step {saved}\n" in texts[1] and 5 <= saved < 20
    assert "stopped by SIGHUP" in texts[1], texts[1]
    begun = re.findall(r"^trial (\d (?:starts|resumes)): ", again.out, re.M)
    assert begun == ["1 resumes"]
    assert not [*folder.glob("s/trials/*/*.lost.jsonl")]


def test_its_losses_are_those_of_jobs_by_hand_bit_for_bit(killed):
    folder, _, _, again = killed
    results = {}
    for number, rate in enumerate(RATES):
        hand = JobDir(folder / f"hand{number}")
        argv = f"--job_log_dir={hand.path}", "--set", f"task.learner.learning_rate={rate}"
        succeed(SWEPT, *argv)
        trial = JobDir(folder / f"s/trials/000{number}")
        assert lines_of(trial.metrics_jsonl) == lines_of(hand.metrics_jsonl)
        assert lines_of(trial.eval_metrics_jsonl) == lines_of(hand.eval_metrics_jsonl)
        results[rate] = lines_of(hand.eval_metrics_jsonl)[-1]["loss"]
    best = min(results, key=results.get)
    assert f"heldout/loss {results[best]:.6g}: " in again.out
    assert f"praxis train jobzoo.swept.Swept --set task.learner.learning_rate={best}\n" in again.out


@pytest.mark.nightly
def test_a_state_that_does_not_fit_is_refused_and_lines_for_a_scheduler_run(tmp_path):
    argv = [
        "--mode=sweep",
        "--exp=jobzoo.experiments.Tiny",
        f"--job_log_dir={tmp_path}/s",
        "--set",
        "run.num_train_steps=2",
        "run.evaluation.max_batches=1",
        "mesh.ici_mesh_shape=1,2,1",
        "task.model.max_seq_length=400_000_000_000,50",
    ]
    (done,) = ended([start_process(*argv, cwd=tmp_path)])
    assert done.code == 0, done
    assert re.search(r"trial 0 refused: The training state takes [\d.]+ [TP]iB", done.out)
    assert not (tmp_path / "s/trials/0000/config.json").exists()
    assert "best trial: 1" in done.out
    lines = succeed(*argv[:2], f"--job_log_dir={tmp_path}/p", *argv[3:], "--print").out
    words = shlex.split(lines.splitlines()[1])
    # What follows the program's name, in this process.
    succeed(*words[3:])
    assert DiskSteps(tmp_path / "p/trials/0001/checkpoints").committed() == [2]
    collected = succeed(*argv[:2], f"--job_log_dir={tmp_path}/p", *argv[3:], "--print").out
    assert [shlex.split(line)[:3] for line in collected.splitlines()] == [words[:3]]
