"""The ways in which a job is asked to end, heard by a loop in place of a training, and by jobs."""

import importlib
import os
import signal
import subprocess
import sys
import time

import pytest

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.digest import digest_of
from praxis_lite.checkpoints.steps.step_store import DiskSteps
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.signals import SIGNALS
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import CHECKOUT, home, launch, lines_of, start_process, succeed, trained
from tests.support.line_jobs import LINE
from tests.support.log_lines import terminal_text

TINY = "--exp=jobzoo.experiments.Tiny"
AT_ONCE = "the second signal: ended at once; the newest checkpoint is of step 40"

# `where` is what the main thread does when it says that it is there. `stuck`: in C code that lets
# other threads run and never comes back to Python, as a compiler does not for long.
LOOP = """
import hashlib, os, signal, sys, threading, time
from praxis_lite.job.processes import stop_request
from praxis_lite.job.processes.stop_request import StopRequest

where, limit, num_processes = sys.argv[1], float(sys.argv[2]) or None, int(sys.argv[3])

def stuck():
    threading.Timer(0.2, print, ("there",), {"flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)

stop_request.PEERS_SECONDS = 3.0
with StopRequest(limit, num_processes=num_processes) as stop:
    if where == "a restore":
        stuck()
    stop.training_begins(40)
    try:
        for step in range(41, 2000):
            if step == 41 and where == "the first step":
                stuck()
            if step == 43 and where == "a stuck step":
                stuck()
            time.sleep(0.02)
            stop.step_ended()
            if step == 43:
                print("there", flush=True)
            if stop.reason and where != "a loop that does not ask":
                break
    finally:
        print("cleaned up", flush=True)
print("saved:", stop.reason)
"""


def start(where, limit=0, num_processes=1, before=(), waits=True):
    """Returns a process of LOOP, by default once it has said that it is there."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", LOOP, where, str(limit), str(num_processes)],
        cwd=CHECKOUT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert not waits or process.stdout.readline() == "there\n"
    return process


def ended(process):
    """Returns the status, the lines of standard output and those of standard error."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out.splitlines(), terminal_text(err).splitlines()


@pytest.fixture(autouse=True, scope="module")
def signals_are_heard():
    # A shell ignores SIGINT in the background, nohup ignores SIGHUP, and children inherit that. A
    # handler that does nothing ignores a signal here, and is not inherited.
    ignored = [element for element in SIGNALS if signal.getsignal(element) is signal.SIG_IGN]
    for item in ignored:
        signal.signal(item, lambda *_: None)
    yield
    for item in ignored:
        signal.signal(item, signal.SIG_IGN)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_is_answered_and_the_running_step_ends(name):
    process = start("a loop")
    process.send_signal(getattr(signal, name))
    line = (
        f"{name}: ending after the current step is saved; a second signal ends the job immediately"
    )
    assert ended(process) == (0, ["cleaned up", f"saved: {name}"], [line])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "lost"),
    [
        ("a restore", "training had not begun"),
        ("the first step", "the newest checkpoint is of step 40"),
    ],
)
def test_before_a_step_has_ended_a_signal_ends_even_a_compiler(where, lost):
    process = start(where)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, err) == (0, [f"SIGTERM: ended; nothing is lost: {lost}"])


def test_a_second_signal_ends_a_process_that_is_stuck():
    process = start("a stuck step")
    process.send_signal(signal.SIGTERM)
    assert "ending after the current step is saved" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, [], [f"SIGINT, {AT_ONCE}"])


def test_one_request_that_comes_twice_is_one():
    # A session that is closed sends SIGHUP, too.
    process = start("a loop that does not ask")
    for item in (signal.SIGTERM, signal.SIGHUP):
        process.send_signal(item)
        time.sleep(0.1)  # Of two that wait, the system hands over the lower number first.
    assert process.stderr.readline().startswith("SIGTERM: ending after the current step is saved")
    assert process.stderr.readline() == "SIGHUP: already ending, because of SIGTERM\n"
    process.send_signal(signal.SIGINT)
    assert ended(process)[::2] == (130, [f"SIGINT, {AT_ONCE}"])


def test_the_same_signal_again_is_a_second_one():
    process = start("a loop that does not ask")
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[::2] == (143, [f"SIGTERM, {AT_ONCE}"])


def test_the_time_limit_is_as_a_first_signal_and_one_after_it_no_second():
    # A busy machine must make the first steps within the limit.
    process = start("a loop", limit=1.5)
    code, out, err = ended(process)
    assert (code, out[-1]) == (0, "saved: the time limit of 1.5 s")
    assert len(err) == 1 and err[0].startswith("the time limit of 1.5 s: ending after the current")
    process = start("a loop that does not ask", limit=1.5)
    assert "time limit" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    line = process.stderr.readline()
    assert line == "SIGTERM: already ending, because of the time limit of 1.5 s\n"
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_time_limit_that_leaves_no_time_for_a_step_ends_a_compiler_with_an_error(num_processes):
    # With status 0 whoever starts unfinished jobs again would do so for ever.
    process = start("the first step", 0.3, num_processes, waits=False)
    code, _, err = ended(process)
    assert code == 2
    assert err[-1].startswith("error: the time limit of 0.3 s expired before the first step")
    assert "run.stopping.time_limit_seconds" in err[-1]
    assert "the newest checkpoint is of step 40" in err[-1]


def test_one_of_several_processes_makes_the_first_step_with_the_others():
    process = start("a loop", num_processes=2)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    process = start("the first step", num_processes=2)
    process.send_signal(signal.SIGTERM)
    assert "ending after the current step is saved" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


ENDS = """
import hashlib, sys, threading, time
from praxis_lite.job.processes.signals import EndsBySignal

where = sys.argv[1]

with EndsBySignal():
    try:
        threading.Timer(0.2, print, ("there",), {"flush": True}).start()
        if where == "a compiler":
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)
        try:
            time.sleep(100)
        except BaseException:
            if where == "code that makes another error of it":
                raise RuntimeError
            raise
    finally:
        print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(
    "where",
    [
        "Python",
        pytest.param("a compiler", marks=pytest.mark.slow),
        "code that makes another error of it",
    ],
)
def test_what_saves_nothing_ends_with_one_line_and_the_signals_status(where):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, where],
        cwd=CHECKOUT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGINT)
    cleaned = [] if where == "a compiler" else ["cleaned up"]
    assert ended(process) == (130, cleaned, ["ended by SIGINT"])


def test_what_is_ignored_stays_ignored():
    process = start("a loop that does not ask", before=("nohup",))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)  # Of two that wait, the system hands over the newer one first.
    process.send_signal(signal.SIGTERM)
    line = process.stderr.readline()
    if line.startswith("nohup"):
        line = process.stderr.readline()
    assert line.startswith("SIGTERM: ending after")
    process.kill()
    process.communicate()


FORKED = """
import os, signal, time
from praxis_lite.job.processes.stop_request import StopRequest

with StopRequest() as stop:
    stop.step_ended()
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(7)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    time.sleep(0.2)
    print(os.waitstatus_to_exitcode(status), stop.reason)
"""


def test_the_end_of_a_forked_worker_is_not_that_of_the_training():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED],
        cwd=CHECKOUT,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("-15 None\n", "")


def test_the_handlers_before_are_put_back():
    before = [signal.getsignal(item) for item in SIGNALS]
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    with StopRequest(1000) as stop:
        assert [signal.getsignal(element) for element in SIGNALS] != before
    assert stop.reason is None
    assert [signal.getsignal(one) for one in SIGNALS] == before
    now = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(now)
    assert now == fd


def outcome(folder):
    """Returns all that a finished job of Tiny leaves that does not depend on the clock."""
    job = JobDir(folder)
    return (
        lines_of(job.metrics_jsonl),
        read_json_lines(job.eval_metrics_jsonl),
        digest_of(job.checkpoints / "7"),
    )


@pytest.mark.slow
def test_a_signal_in_a_step_loses_nothing(tmp_path, monkeypatch):
    argv = (TINY, f"--job_log_dir={tmp_path}")
    # The signal comes while the batch of the next step is made. Step 3 is evaluated on, and step 7,
    # the last.
    for step, name in ((3, "SIGINT"), (7, "SIGTERM")):
        monkeypatch.setenv("JOBZOO_KILL_AT", str(step - 1))
        monkeypatch.setenv("JOBZOO_SIGNAL", name)
        assert f"stopped by {name}: step {step} is saved" in succeed(*argv).out
        assert lines_of(JobDir(tmp_path).metrics_jsonl)[-1]["step"] == step
    monkeypatch.delenv("JOBZOO_KILL_AT")
    assert "restored the checkpoint of step 7" in succeed(*argv).out
    assert outcome(tmp_path) == outcome(trained()[0].path)
    assert "has already completed its 7 steps" in succeed(*argv).out


@pytest.mark.parametrize(
    ("kind", "value", "code"),
    [
        ("raise", None, 1),
        pytest.param("exit", 7, 7, marks=pytest.mark.slow),
        pytest.param("signal", signal.SIGTERM, 0, marks=pytest.mark.slow),
    ],
)
def test_every_way_out_waits_for_the_save_in_flight(kind, value, code, tmp_path, monkeypatch):
    publish, left = DiskSteps.publish, []

    def slow(self, step):
        # Longer than a step: the save of step 3 is under way when step 4's batch is made.
        for _ in range(200):
            if left:
                break
            time.sleep(0.05)
        publish(self, step)

    def rows(self, index, which):
        if index == 3:
            # Orbax renames it once: a listing may show both names, or neither.
            in_flight = os.listdir(tmp_path / "checkpoints")
            assert all(item.startswith("3.saving") for item in in_flight)
            left.append(index)
            if kind == "raise":
                raise RuntimeError("the plug was pulled")
            if kind == "exit":
                sys.exit(value)
            os.kill(os.getpid(), value)
        return rows_before(self, index, which)

    lines = importlib.import_module("jobzoo.lines").Lines
    rows_before = lines.rows
    monkeypatch.setattr(lines, "rows", rows)
    monkeypatch.setattr(DiskSteps, "publish", slow)
    argv = (LINE, f"--job_log_dir={tmp_path}", "--set", "run.checkpoints.every_steps=3")
    assert launch(*argv).code == code
    steps = ["3", "4"] if kind == "signal" else ["3"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == steps
    store = DiskSteps(tmp_path / "checkpoints")
    assert [store.verify(step) for step in steps] == [[]] * len(steps)


@pytest.mark.slow
def test_a_process_that_compiles_ends_at_once_and_begins_anew(tmp_path):
    argv = (TINY, f"--job_log_dir={tmp_path}/job")
    # Its programs are in no cache.
    process = start_process(*argv, cwd=home(), env={"XDG_CACHE_HOME": str(tmp_path)})
    while "compiling the first step" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, err) == (
        0,
        ["WARNING: SIGTERM: ended; nothing is lost: no step had been completed"],
    )
    assert os.listdir(tmp_path / "job/checkpoints") == []


@pytest.mark.slow
def test_a_job_that_only_reads_ends_with_one_line(tmp_path):
    folder = trained()[0].path
    process = start_process(
        "--mode=decode",
        f"--job_log_dir={folder}",
        cwd=home(),
        env={"XDG_CACHE_HOME": str(tmp_path)},
    )
    while "restored" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, err) == (128 + signal.SIGTERM, ["WARNING: ended by SIGTERM"])
    assert not list(folder.rglob("*.partial"))


@pytest.mark.slow
def test_an_end_before_the_evaluations_that_decide_leaves_the_best_and_the_early_stop_the_same(
    tmp_path, monkeypatch
):
    settings = ("--set", "run.checkpoints.every_steps=1")
    argv = ("--exp=jobzoo.experiments.Averaged", f"--job_log_dir={tmp_path}/a", *settings)
    whole = succeed(*argv)
    last_step = lines_of(tmp_path / "a/metrics.jsonl")[-1]["step"]
    argv = ("--exp=jobzoo.experiments.Averaged", f"--job_log_dir={tmp_path}/b", *settings)
    monkeypatch.setenv("JOBZOO_SIGNAL", "SIGTERM")
    # The best evaluation, and the second that is no better and ends the training.
    for batch in (last_step - 3, last_step - 1):
        monkeypatch.setenv("JOBZOO_KILL_AT", str(batch))
        assert f"step {batch + 1} is saved" in succeed(*argv).out
    done = succeed(*argv)
    early = [line for line in whole.out.splitlines() if line.startswith("stopped early")]
    assert early and [x for x in done.out.splitlines() if x.startswith("stopped early")] == early
    for job in ("a", "b"):
        steps = sorted(os.listdir(tmp_path / job / "checkpoints"), key=int)
        assert steps[-1] == str(last_step)
    a, b = (
        (
            read_json_lines(tmp_path / job / "eval_metrics.jsonl"),
            {p.name: digest_of(p) for p in (tmp_path / job / "checkpoints").iterdir()},
            Checkpoints(tmp_path / job / "checkpoints").best_step(),
        )
        for job in ("a", "b")
    )
    assert a == b
