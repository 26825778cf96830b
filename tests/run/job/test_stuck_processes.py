"""Real processes of which one hangs: named within a minute, with stack, step and collective."""

import functools
import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support import process_pairs as pairs
from tests.support.job_runs import CHECKOUT, home

pytestmark = pytest.mark.slow

EXPERIMENT = '''
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import fiddle as fdl
from jobzoo.experiments import Tiny, Windows
from praxis_lite import Hook, MeshConfig, register
from praxis_lite.layers import rotary_lm, set_sharding_params


def hang(where):
    how, _, mark = os.environ.get(f"HANG_{where}", "").partition(":")
    if not how or Path(mark).exists():
        return
    Path(mark).touch()
    if how == "sleeps":
        threading.Event().wait()
    if how == "keeps the lock":
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    if how == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


class HangingWindows(Windows):
    """Waits at a batch, and takes its time for each."""

    def rows(self, index, rows):
        if index == 12:
            hang("INPUT")
        time.sleep(0.1)
        return super().rows(index, rows)


class SlowWindows(Windows):
    """Takes its time for the batches of an evaluation, and much in the second process."""

    def rows(self, index, rows):
        time.sleep(float(os.environ.get("SLOW_EVALUATION", "0")))
        return super().rows(index, rows)


class HangingHook(Hook):
    """Waits after a step."""

    def after_step(self, made):
        if made.step == 12:
            hang("HOOK")


@register
class Hanging(Tiny):
    """Three processes of one device."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 3, 1))

    def task(self):
        task = super().task()
        lm = rotary_lm(
            vocab_size=257, model_dims=7, hidden_dims=5, num_heads=1, dim_per_head=4, num_layers=1
        )
        task.model = set_sharding_params(lm)
        return task

    def datasets(self):
        datasets = super().datasets()
        fdl.update_callable(datasets["train"], HangingWindows)
        fdl.update_callable(datasets["heldout"], SlowWindows)
        return datasets

    def hooks(self):
        return [fdl.Config(HangingHook)]

    def run(self):
        run = super().run()
        run.num_train_steps = 100_000
        run.evaluation.every_steps = 1000
        run.checkpoints.every_steps = 5
        return run
'''
_SECONDS = 60.0


@functools.cache
def package() -> Path:
    """Returns a folder with the package of the experiment."""
    folder = home() / "stuckzoo"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "experiments.py").write_text(EXPERIMENT)
    return home()


def start(job: Path, *settings: str, env=({}, {}, {}), flags=()) -> list:
    """Starts three processes of one job."""
    package()
    return pairs.start_processes(
        "--exp=stuckzoo.experiments.Hanging", "--packages=jobzoo,stuckzoo", "--start_seconds=300",
        *flags, f"--job_log_dir={job}", "--set", *settings, "run.evaluation.max_batches=7",
        cwd=CHECKOUT, count=3, env=env,
    )


def num_steps(job: Path) -> int:
    path = job / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def seconds_until(is_so, processes, most: float = _SECONDS) -> float:
    """Returns after how many seconds something is so."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < most, [
            (process.kill(), process.communicate()) for process in processes
        ]
        time.sleep(0.2)
    return time.monotonic() - began


def ended(processes: list) -> list[str]:
    """Kills what is left, and returns what each process wrote to standard error."""
    for process in processes:
        process.kill()
    return [process.communicate()[1] for process in processes]


@pytest.mark.parametrize("stopped", [1, 0])
def test_a_stopped_process_is_named_and_the_others_end(tmp_path, stopped):
    job = tmp_path / "job"
    processes = start(job, "run.stopping.watchdog_seconds=600")
    pairs.wait_until(lambda: num_steps(job) >= 8, processes)
    pairs.kill(processes[stopped], signal.SIGSTOP)
    others = [process for k, process in enumerate(processes) if k != stopped]
    seconds = seconds_until(lambda: all(item.poll() is not None for item in others), processes)
    texts = ended(processes)
    print(f"stopped process {stopped}: named after {seconds:.0f} s")
    for k, text in enumerate(texts):
        if k != stopped:
            assert processes[k].returncode == 1
            assert re.search(rf"process {stopped} \(.+\) has not been heard of for 2\d s: it is "
                             r"stopped by a signal \(state T\)", text), text
            # It says so every two seconds, in which it may have made all of its steps.
            last = r"as it said last, it has ended (no step yet|step \d+) and (is in|waits)"
            assert re.search(last, text), text


@pytest.mark.parametrize(
    "where, how, culprit", [
        ("INPUT", "sleeps", 1), ("INPUT", "sleeps", 0), ("HOOK", "sleeps", 2),
        ("INPUT", "keeps the lock", 1), ("HOOK", "keeps the lock", 0),
    ],
)
def test_a_process_that_hangs_is_named_with_its_stack_and_what_the_others_wait_in(
    tmp_path, where, how, culprit
):
    job, mark = tmp_path / "job", tmp_path / "mark"
    env = [{}, {}, {}]
    env[culprit] = {f"HANG_{where}": f"{how}:{mark}"}
    processes = start(job, "run.stopping.watchdog_exits=true", env=env)
    pairs.wait_until(mark.exists, processes)
    others = [process for k, process in enumerate(processes) if k != culprit]
    seconds = seconds_until(lambda: all(item.poll() is not None for item in others), processes)
    texts = ended(processes)
    print(f"{where} {how} in process {culprit}: named after {seconds:.0f} s")
    assert [processes[k].returncode for k in range(3) if k != culprit] == [1, 1]
    line = {"INPUT": 'hang("INPUT")', "HOOK": 'hang("HOOK")'}[where]
    if how == "sleeps":
        report = (job / "stacks.txt").read_text()
        assert report.split(" ", 2)[2].strip() in texts[0]
        assert re.search(rf"stuck: process {culprit} \(.+\) is stuck: no sign of life", report)
        assert f"Stacks of process {culprit} (" in report and line in report
        assert texts[1 if culprit != 1 else 2].count("is stuck, as reported above") == 1
        words = report.splitlines()[0]
        doing = "input wait" if where == "INPUT" else "hook HangingHook"
        assert re.search(rf"it has ended step 1[0-3] and is in: {doing}", words), words
    else:
        # Its own standard error has its stack, that of the others its name.
        assert "experiments.py" in texts[culprit] and " in hang" in texts[culprit]
        words = texts[1 if culprit != 1 else 2]
        assert re.search(rf"process {culprit} \(.+\) has not been heard of for 2\d s: it ", words)
        assert re.search(r"as it said last, it has ended step \d+ and (is in|waits)", words)
        assert re.search(r"process [012] \(.+\): it has ended step 1[1-3] and waits for its own "
                         r"devices to end step 1[2-4]", words), words
    step = "a step" if how != "sleeps" else "step 1[23]"
    collective = r"[a-z-]+ of \d+ \w+ over data, in "
    assert re.search(rf"{step}'s first collective that needs [^:]+: {collective}", words), words


@pytest.mark.parametrize("how", ["sleeps", "keeps the lock", "is stopped"])
def test_the_stuck_worker_of_an_elastic_job_is_named_ended_and_replaced(tmp_path, how):
    job, mark = tmp_path / "job", tmp_path / "mark"
    env = [{}, {"HANG_INPUT": f"{how}:{mark}"}, {}]
    processes = start(job, "run.stopping.watchdog_seconds=600", env=env, flags=("--elastic",))
    try:
        pairs.wait_until(mark.exists, processes)
        lines = job / "elastic.jsonl"
        seconds = seconds_until(lambda: '"stuck"' in lines.read_text(), processes, most=200.0)
        pairs.wait_until(lambda: num_steps(job) >= 20, processes)
    finally:
        texts = ended(processes)
    line = next(line for line in map(json.loads, lines.read_text().splitlines())
                if line["kind"] == "stuck")
    print(f"elastic, {how}: {seconds:.0f} s to the first step after; {line['seconds']}")
    assert line["who"] == [1] and line["members"] == [0, 1, 2]
    report = (job / "stacks.txt").read_text()
    assert re.search(r"stuck: process 1 \(.+\) is stuck: ", report), report
    assert "It is ended and replaced." in report and report.splitlines()[0][20:] in texts[1]
    if how == "is stopped":
        assert "stopped by a signal (state T)" in report and "It gives no stacks" in report
    else:
        assert re.search(r'experiments.py", line \d+,? in hang', report), report
        pattern = r"first collective that needs (its|the stuck one's) devices: "
        assert re.search(pattern, report), report


def test_slow_compiles_evaluations_and_saves_give_no_alarm(tmp_path):
    job = tmp_path / "job"
    env = [{}, {"SLOW_EVALUATION": "7"}, {}]
    processes = start(job, "run.evaluation.every_steps=9", env=env)
    pairs.wait_until(lambda: num_steps(job) >= 9, processes)
    seconds_until(lambda: num_steps(job) >= 11, processes, most=600.0)
    assert not (job / "stacks.txt").exists()
    texts = ended(processes)
    assert not any("stuck" in text or "heard of" in text for text in texts), texts
