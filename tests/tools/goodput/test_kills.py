"""A real job that is killed while it compiles, in a step and in a save: its seconds add up."""

import signal
import time

import pytest

from praxis_lite.job.events import COMPILE, IMPORT, RESTORE, SAVE, STEP
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_tools.goodput.goodput import IDLE, LOST_STEP, goodput_of
from tests.support.job_runs import home, launch, start_process
from tests.support.line_jobs import LINE

pytestmark = pytest.mark.slow

EXPERIMENTS = '''
import contextlib
import time

import fiddle as fdl

from jobzoo.lines import Line, Lines
from praxis_lite import Hook, RunConfig, SaveSettings, register


class Sleeper(Hook):
    """Makes compiling, and each step, last as long as it is told."""

    every, waits = 1, False

    def __init__(self, compile_seconds=0.0, step_seconds=0.1):
        self.compile_seconds, self.step_seconds = compile_seconds, step_seconds

    @contextlib.contextmanager
    def compiling(self):
        time.sleep(self.compile_seconds)
        yield

    def after_step(self, made):
        time.sleep(self.step_seconds)


@register
class Slow(Line):
    """A line at ten steps a second, saved every ten steps."""

    def datasets(self):
        return {"train": fdl.Config(Lines, batch_size=13)}

    def hooks(self):
        return [fdl.Config(Sleeper)]

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=33, checkpoints=fdl.Config(SaveSettings, every_steps=10),
        )
'''
SLOW_LINE = LINE.replace("lines.Line", "slow_lines.Slow")
(home() / "jobzoo/slow_lines.py").write_text(EXPERIMENTS)
# Of each launch: a second to the last sign of life, and the start of a process on a busy machine.
TOLERANCE = 1.5


def until(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The job; when each of its processes began and ended; and how many steps each lost."""
    job = JobDir(tmp_path_factory.mktemp("killed") / "job")
    argv = (SLOW_LINE, f"--job_log_dir={job.path}")
    log, times, num_lost = job.path.parent / "log", [], []

    def ended():
        return "trained to step 33" in log.read_text()

    def compiles():
        return "compiling the first step" in log.read_text()

    def steps():
        return any(line["step"] >= 15 for line in read_json_lines(job.metrics_jsonl))

    def saves():
        return any(job.checkpoints.glob("20.saving*"))

    for condition, more, settings in (
        (compiles, 2.5, ["--set", "hooks[0].compile_seconds=60"]),
        (steps, 0.05, []),
        (saves, 0.0, []),
        (ended, 0.0, []),
    ):
        before = read_json_lines(job.path / "metrics.lost.jsonl")
        with log.open("w") as out:
            began = time.time()
            process = start_process(*argv, *settings, cwd=job.path.parent, out=out)
            until(condition, process)
            time.sleep(more)
            if condition is not ended:
                process.send_signal(signal.SIGKILL)
            # What Python takes for its own end, after the last line, is no part of a launch.
            times.append((began, time.time()))
            process.communicate(timeout=120)
        num_lost.append(len(read_json_lines(job.path / "metrics.lost.jsonl")) - len(before))
        if condition is not ended:
            assert process.returncode == -signal.SIGKILL
            time.sleep(1.0)
    assert process.returncode == 0, log.read_text()
    return job, times, num_lost


def test_all_kinds_add_up_to_the_time_from_the_first_start_to_the_last_end(killed):
    job, times, _ = killed
    actual = goodput_of(job)
    assert sum(actual.seconds.values()) == pytest.approx(actual.total_seconds, abs=0.01)
    whole = times[-1][1] - times[0][0]
    assert actual.total_seconds == pytest.approx(whole, abs=TOLERANCE + 0.01 * whole)
    assert actual.launches[-1].ended - actual.launches[0].began == pytest.approx(
        actual.total_seconds, abs=0.01
    )


def test_each_launch_is_there_from_its_start_to_a_second_before_its_end(killed):
    job, times, _ = killed
    launches = goodput_of(job).launches
    assert [item.ended_by for item in launches] == [None, None, None, "the end"]
    for item, (began, ended) in zip(launches, times, strict=True):
        seconds = ended - began
        assert -0.05 <= item.began - began <= 0.5
        assert -0.05 <= ended - item.ended <= TOLERANCE + 0.01 * seconds
        assert sum(item.seconds.values()) == pytest.approx(item.ended - item.began, abs=0.01)
        assert item.seconds[IMPORT] > 0.5
    assert launches[0].seconds[COMPILE] >= 1.0 and launches[0].seconds[STEP] == 0
    between = sum(after[0] - before[1] for before, after in zip(times, times[1:], strict=False))
    idle = goodput_of(job).seconds[IDLE]
    assert between - 0.5 <= idle <= between + 3 * TOLERANCE + 0.5


def test_the_steps_that_were_lost_are_those_whose_lines_were_moved(killed):
    job, _, num_lost = killed
    actual = goodput_of(job)
    # The launch after the kill in a step found them, and so did that after the kill in the save.
    assert num_lost[:2] == [0, 0] and num_lost[2] >= 5 and num_lost[3] >= 0
    assert [item.num_lost_steps for item in actual.launches] == [0, num_lost[2], num_lost[3], 0]
    moved = read_json_lines(job.path / "metrics.lost.jsonl")
    seconds = sum(line["step_time"] - line["input_time"] for line in moved)
    # But for the second before each kill, and with the steps that were not ended.
    assert seconds - 2 * TOLERANCE <= actual.seconds[LOST_STEP] <= seconds + 0.5
    kept = read_json_lines(job.metrics_jsonl)
    assert [line["step"] for line in kept] == list(range(1, 34))
    seconds = sum(line["step_time"] - line["input_time"] for line in kept)
    assert actual.seconds[STEP] == pytest.approx(seconds, abs=TOLERANCE)
    assert actual.seconds[SAVE] > 0 and actual.seconds[RESTORE] > 0


def test_the_columns_of_a_step_are_its_times_and_those_of_the_pauses_before_it(killed):
    first = goodput_of(killed[0]).launches[-1].first_step + 1
    lines = [line for line in read_json_lines(killed[0].metrics_jsonl) if line["step"] > first]
    for line in lines:
        assert line["step_time"] >= 0.1 and 0 < line["dispatch_time"] < line["step_time"]
        assert 0 < line["device_time"] < line["step_time"]
        assert 0 < line["input_time"] < line["step_time"] and line["evaluation_time"] == 0
    # The hook sleeps between two steps, while the devices have nothing to do. On a busy machine, a
    # single step may wait long for a processor.
    shares = sorted(line["device_time"] / line["step_time"] for line in lines)
    assert shares[len(shares) // 2] < 0.5
    saved_before = [line["step"] for line in lines if line["save_time"]]
    assert saved_before == [step for step in (21, 31) if step > first]


def test_the_end_of_training_and_the_summary_say_it(killed):
    job, *_ = killed
    actual = goodput_of(job)
    assert f"{actual.line()}\n" in (job.path.parent / "log").read_text()
    done = launch("--mode=summary", f"--job_log_dir={job.path}")
    assert done.code == 0 and all(line in done.out for line in str(actual).splitlines())


def test_a_launch_that_finds_nothing_to_do_changes_nothing(killed):
    job, *_ = killed
    before = job.timeline_jsonl.read_bytes()
    done = launch(SLOW_LINE, f"--job_log_dir={job.path}")
    assert done.code == 0 and "has already completed its 33 steps" in done.out
    assert job.timeline_jsonl.read_bytes() == before
