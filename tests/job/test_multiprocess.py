"""Jobs of several real processes, over loopback: what one process gives, and one end for all.

A process that hangs is named within a minute, with its stack, its step and the collective that the
others wait in. A job of which one process hangs mostly waits. A fixture starts it before the first
test, so that it waits while the other tests run.
"""

import functools
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from praxis_lite.job.job_dir import JobDir
from tests.support import process_pairs as pairs
from tests.support.job_runs import (
    CHECKOUT,
    copy_of_trained,
    home,
    lines_of,
    trained,
)
from tests.support.stuck_jobs import Case, started, watched

pytestmark = pytest.mark.slow
TINY = "--exp=jobzoo.experiments.Tiny"

SLEEPS = Case(2, "sleeps", is_slow_before=True)
KEEPS_THE_LOCK = Case(0, "keeps the lock")


@functools.cache
def hanging(case: Case) -> tuple[Path, list[subprocess.Popen]]:
    """Starts a job of which one process hangs. Returns its folder and its processes."""
    folder = Path(tempfile.mkdtemp(dir=home()))
    return folder, started(case, folder)


@pytest.fixture(scope="module", autouse=True)
def job_that_hangs():
    """Starts a job that waits while the other tests run."""
    _, processes = hanging(SLEEPS)
    yield
    for process in processes:
        process.kill()
        process.communicate()


@functools.cache
def pair_job() -> tuple[JobDir, list[pairs.Ended], set[str], list[pairs.Ended]]:
    """Returns the job of `trained`, made by two processes of four devices, but longer.

    The second process gets a SIGTERM in step 3. What is left is gone on with, and the first one
    killed while a step is saved.

    Returns:
      job, how both ended at first, what then lay in the folder, and how both ended at last.
    """
    job, temporary = JobDir(home() / "pair"), {"TMPDIR": str(pair_folder())}
    argv = (TINY, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=400")
    signaled = temporary | {"JOBZOO_KILL_AT": "2", "JOBZOO_SIGNAL": "SIGTERM"}
    stopped, names = pairs.run(*argv, cwd=home(), env=(temporary, signaled)), names_in(job)
    processes = pairs.start_processes(*argv, cwd=home(), env=(temporary, temporary))
    pairs.wait_until(
        lambda: num_lines(job) >= 7 and any(job.checkpoints.glob("*.saving*")), processes
    )
    pairs.kill(processes[0])
    return job, stopped, names, pairs.ended(processes)


def pair_folder() -> Path:
    """Returns where the processes of `pair_job` make temporary files."""
    folder = home() / "pair_tmp"
    folder.mkdir(exist_ok=True)
    return folder


def names_in(job: JobDir) -> set[str]:
    return {path.name for path in job.path.iterdir() if path.name != ".training"}


def num_lines(job: JobDir) -> int:
    return len(job.metrics_jsonl.read_text().splitlines()) if job.metrics_jsonl.exists() else 0


def numbers_of(path: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in line.items() if isinstance(v, float) and "per_second" not in k}
        for line in lines_of(path)
    ]


def test_two_processes_that_are_stopped_and_go_on_give_the_losses_of_one():
    # 13 rows on eight devices: the first process has 8 of them, the second 5 and filler. Gloo adds
    # in another order than XLA does within a process: the last bit differs.
    job, *_ = pair_job()
    # The last evaluation of `trained` is that of its end.
    for name, num in (("metrics.jsonl", 7), ("eval_metrics.jsonl", 2)):
        ours, alone = (numbers_of(item.path / name)[:num] for item in (job, trained()[0]))
        assert len(ours) == len(alone) == num
        for our, other in zip(ours, alone, strict=True):
            assert our.keys() == other.keys()
            for key, value in our.items():
                np.testing.assert_allclose(value, other[key], rtol=1e-6, atol=1e-6, err_msg=key)
    assert [line["step"] for line in lines_of(job.metrics_jsonl)][:7] == [*range(1, 8)]


def test_sigterm_to_one_ends_all_at_the_same_step_and_the_first_alone_speaks_and_writes():
    _, (first, second), names, _ = pair_job()
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "2 processes on 1 hosts, found by --coordinator=127.0.0.1:" in first.out
    assert re.search(r"stopped by a signal to process 1 \(.*: step [34] is saved", first.out)
    assert second.out == first.err == ""
    assert second.err.startswith("WARNING: SIGTERM: ending after") and second.err.count("\n") == 1
    assert names == names_in(trained()[0]) | {"log.1.txt"}


def test_a_process_that_is_killed_in_a_save_is_named_and_ends_the_other():
    second = pair_job()[3][1]
    assert second.code == 1
    assert "error: process 0 (" in second.err and "is gone: it was killed" in second.err


def test_a_pair_of_processes_does_its_parts_right_and_ends_when_one_is_killed():
    port = pairs.free_port()
    done = pairs.ended(
        [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.process_work", f"127.0.0.1:{port}", str(k)],
                cwd=CHECKOUT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for k in range(2)
        ]
    )
    # The second one killed itself, and the first one waited for it on the devices.
    assert [item.code for item in done] == [1, -signal.SIGKILL], done
    # A busy machine may notice it later than after the 4 s that the script sets.
    assert re.search(r"process 1 \(.* \d s: it was killed, or its host", done[0].err), done[0].err
    lines = done[0].out.splitlines()
    seen = json.loads(next(line for line in lines if line.startswith("{")))
    for order in ("in turn", "interleaved", "nested"):
        assert seen[order] == [True] * 2, order
    assert seen["examples"] is True
    assert seen["agreed"] == [False, False, False, True, False, False]
    assert seen["asked by"].startswith("a signal to process 1 (")
    assert seen["profiled steps"] == ["5", "5"]
    assert seen["exchanged"] == [[f"0.{k}", f"1.{k}"] for k in range(3)]
    assert seen["missing"].startswith("process 1 (")
    slow = [line for line in lines if "slow: " in line]
    assert len(slow) == 1 and slow[0].startswith("WARNING: slow: process 1 (")


def test_no_temporary_folder_is_left_by_a_good_end_or_by_that_of_another_process():
    pair_job()
    assert [path.name for path in pair_folder().glob("praxis_lite_*")] == []


def test_what_differs_between_processes_is_refused_by_both(tmp_path):
    done = pairs.run(
        TINY,
        f"--job_log_dir={tmp_path}/job",
        cwd=tmp_path,
        more=((), ("--set", "run.seed=3")),
    )
    for item in done:
        assert item.code == 2
        words = " ".join(item.err.replace("[process 1] ", "").split())
        assert "run.seed is" in words and "on process 0 (" in words and "on process 1 (" in words


@functools.cache
def unmatched() -> dict[str, list[pairs.Ended]]:
    """Returns how two processes ended that wait for others in vain; all such jobs at once."""
    wait = "--start_seconds=10"
    flags = {
        "0 twice": (("--process_id=0", wait),) * 2,
        "2 or 3": ((wait,), (wait, "--num_processes=3", "--process_id=2")),
    }
    started = {
        name: pairs.start_processes(TINY, f"--job_log_dir={home()}/{name}", cwd=home(), more=more)
        for name, more in flags.items()
    }
    return {name: pairs.ended(processes) for name, processes in started.items()}


def test_a_second_process_0_is_told_that_its_port_is_in_use():
    refused, waited = sorted(unmatched()["0 twice"], key=lambda item: item.at)
    assert (refused.code, waited.code) == (2, 1)
    words = " ".join(refused.err.split())
    assert "ddress already in use" in words and "only one process has --process_id=0" in words
    assert not (home() / "0 twice").exists()


def test_processes_of_different_numbers_do_not_meet_and_are_told_what_to_compare():
    done = unmatched()["2 or 3"]
    assert [item.code for item in done] == [1, 1]
    assert all("have connected within 10 s" in item.err for item in done)
    assert all("the same --num_processes" in item.err for item in done)


def run_on_slices(mode, job):
    """Runs a mode on a mesh of two slices, which are two processes."""
    done = pairs.run(
        f"--mode={mode}",
        "--packages=jobzoo",
        f"--job_log_dir={job.path}",
        "--set",
        "mesh.ici_mesh_shape=(1,2,2)",
        "mesh.dcn_mesh_shape=(1,2,1)",
        cwd=job.path.parent,
    )
    assert [item.code for item in done] == [0, 0], done


@pytest.mark.nightly
def test_slices_are_processes_and_both_decode(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    shutil.rmtree(job.path / "decode", ignore_errors=True)
    run_on_slices("decode", job)
    assert len(job.decode_jsonl("prompts", 7).read_text().splitlines()) == 3


@pytest.mark.nightly
def test_slices_evaluate_as_one_process_does(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    run_on_slices("eval", job)
    local, other = numbers_of(job.eval_metrics_jsonl)[-2:]
    assert local.keys() == other.keys()
    for key, value in local.items():
        np.testing.assert_allclose(value, other[key], rtol=1e-6, err_msg=key)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SLEEPS, id="sleeps"),
        pytest.param(KEEPS_THE_LOCK, id="keeps the lock", marks=pytest.mark.nightly),
    ],
)
def test_a_process_that_hangs_is_named_with_its_stack_and_what_the_others_wait_in(case):
    # Where an evaluation was slow before, none was: it would have ended then, in step 9.
    seen, culprit = watched(case, *hanging(case)), case.culprit
    texts = seen.texts
    assert [seen.codes[k] for k in range(3) if k != culprit] == [1, 1]
    if case == SLEEPS:
        report = (seen.job / "stacks.txt").read_text()
        assert report.split(" ", 2)[2].strip() in texts[0]
        assert re.search(rf"stuck: process {culprit} \(.+\) is stuck: no sign of life", report)
        assert f"Stacks of process {culprit} (" in report and "hang()" in report
        assert texts[1].count("is stuck, as reported above") == 1
        step, words = "step 1[23]", report.splitlines()[0]
        doing = "it has completed step 1[0-3] and is in: hook HangingHook"
        assert re.search(doing, words), words
    else:
        # Its own standard error has its stack, that of the others its name.
        assert "experiments.py" in texts[culprit] and " in hang" in texts[culprit]
        step, words = "a step", texts[1]
        assert re.search(rf"process {culprit} \(.+\) has sent no heartbeat for 2\d s: it ", words)
        assert re.search(r"last report, it has completed step \d+ and (is in|waits)", words)
        assert re.search(
            r"process [012] \(.+\): it has completed step 1[1-3] and waits for its own "
            r"devices to finish step 1[2-4]",
            words,
        ), words
    collective = r"[a-z-]+ of \d+ \w+ over data, in "
    assert re.search(rf"{step}'s first collective that needs [^:]+: {collective}", words), words
