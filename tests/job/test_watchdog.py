"""What is reported when nothing goes on, and that nothing is while something does."""

import faulthandler
import subprocess
import sys
import threading
import time

import pytest

from praxis_lite.job.processes import watchdog
from praxis_lite.job.processes.watchdog import SAVING, Watchdog
from tests.support.job_runs import CHECKOUT


class Reports:
    """Takes reports, and lets a test wait for as many."""

    def __init__(self):
        self.texts, self._changed = [], threading.Condition()

    def write(self, text):
        with self._changed:
            self.texts.append(text)
            self._changed.notify_all()

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.texts) >= count, timeout=60)


@pytest.fixture
def reports(monkeypatch):
    result = Reports()
    monkeypatch.setattr(watchdog, "write_now", result.write)
    # On a busy machine it would write here too, or end the process that runs the tests.
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **settings: None)
    return result


def hang_here(reports, count):
    reports.wait_for(count)


def test_a_report_says_what_was_done_and_where_every_thread_is(tmp_path, reports):
    idle = threading.Event()
    threads = [threading.Thread(target=idle.wait, name=f"idle {i}") for i in range(3)]
    for thread in threads:
        thread.start()
    with Watchdog(0.1, exits=False, stacks_txt=tmp_path / "s.txt") as dog:
        hang_here(reports, 1)
        dog.step_ended(7)
        hang_here(reports, 2)
        with dog.during("evaluating step 7"):
            hang_here(reports, 3)
    idle.set()
    first, second, third = (text.splitlines()[0] for text in reports.texts[:3])
    assert "(none so far)" in first and "s is: compiling the first step; if compiling" in first
    assert "(the last was step 7)" in second and "s is: training; check the input pipe" in second
    assert "s is: evaluating step 7" in third
    text = reports.texts[0]
    # The main thread first; threads at one place together; the watchdog itself is of no interest.
    assert text.splitlines()[1] == "MainThread:"
    assert "in hang_here\n    reports.wait_for(count)" in text
    assert "idle 0, idle 1, idle 2:\n" in text and text.count("idle 1") == 1
    assert "watchdog:\n" not in text
    written = (tmp_path / "s.txt").read_text()
    assert all(text in written for text in reports.texts[:3])


def test_the_second_report_of_a_hang_comes_after_twice_the_time(reports):
    seconds = []
    with Watchdog(0.1, exits=False) as dog:
        dog.step_ended(1)
        started = time.monotonic()
        for count in (1, 2, 3):
            reports.wait_for(count)
            seconds.append(time.monotonic() - started)
    # No upper bounds: those are the machine's.
    assert seconds[0] >= 0.1 and seconds[1] >= 0.2 and seconds[2] >= 0.4


def test_what_goes_on_is_not_reported(reports):
    with Watchdog(5.0, exits=True) as dog:
        for step in range(20):
            time.sleep(0.01)
            dog.step_ended(step)
            dog.alive()
    with Watchdog(None, exits=True) as dog:
        dog.step_ended(1)
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())
    assert reports.texts == []


class SimulatedClock:
    """A clock on which time passes only while the watchdog waits."""

    def __init__(self, during_waits):
        self.seconds, self._during_waits = 0.0, list(during_waits)

    def monotonic(self):
        return self.seconds

    def wait(self, timeout):
        """Implements `Event.wait`: does half of the wait, calls a function, and does the rest."""
        self.seconds += timeout / 2
        if self._during_waits:
            self._during_waits.pop(0)()
        self.seconds += timeout / 2
        return not self._during_waits


def test_a_sign_of_life_during_a_wait_postpones_the_report(monkeypatch, reports):
    def silent():
        pass

    clock = SimulatedClock([lambda: dog.alive(), lambda: dog.step_ended(1), silent, silent])
    monkeypatch.setattr(watchdog, "time", clock)
    dog, reported_at = Watchdog(8.0, exits=False), []
    monkeypatch.setattr(dog, "_stopped", clock)
    monkeypatch.setattr(watchdog, "write_now", lambda text: reported_at.append(clock.seconds))
    dog._watch(8.0)
    # Signs of life came at 4 and at 10; the watchdog looked again at 8, at 12 and at 18.
    assert reported_at == [18.0]


def test_each_sign_of_life_starts_the_clock_anew():
    # The clock itself is compared, for a busy machine may sleep through any time.
    dog = Watchdog(60.0, exits=False)
    signs = [lambda: dog.step_ended(1), dog.alive, lambda: dog.during(SAVING).__enter__()]
    for sign in signs:
        before = dog.last_sign
        time.sleep(0.001)
        sign()
        assert dog.last_sign > before


# `sleep` of libc by PyDLL keeps Python's lock: no thread of Python runs.
HANG = """
import ctypes, sys, time
from pathlib import Path
from praxis_lite.job.processes.watchdog import SAVING, Watchdog

where, path = sys.argv[1:]
is_saving = lambda: where == "saves in the background"
with Watchdog(0.3, exits=True, is_saving=is_saving, stacks_txt=Path(path)) as dog:
    dog.step_ended(12)
    if where == "keeps the lock while it saves":
        with dog.during(SAVING):
            ctypes.PyDLL(None).sleep(2)
        sys.exit(0)
    if where == "saves in the background":
        time.sleep(1.5)
        sys.exit(0)
    if where == "keeps the lock":
        ctypes.PyDLL(None).sleep(60)
    if where == "saves":
        with dog.during(SAVING):
            time.sleep(1.5)
        sys.exit(0)
    time.sleep(60)
"""


SAVES = ["saves", "keeps the lock while it saves", "saves in the background"]


@pytest.mark.parametrize(
    "where",
    ["sleeps", "keeps the lock", *(pytest.param(where, marks=pytest.mark.slow) for where in SAVES)],
)
def test_a_process_that_hangs_ends_if_asked_to_but_not_while_it_saves(where, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANG, where, tmp_path / "stacks.txt"],
        cwd=CHECKOUT,
        text=True,
        capture_output=True,
        timeout=50,
    )
    assert done.returncode == (0 if where in SAVES else 1)
    if where.startswith("keeps the lock"):
        # faulthandler's own words: no Python could run.
        assert "Timeout" in done.stderr and "(most recent call first)" in done.stderr
    else:
        assert "the last was step 12" in done.stderr and "MainThread:" in done.stderr
        assert ("The process ends with status 1" in done.stderr) == (where == "sleeps")
        assert done.stderr in (tmp_path / "stacks.txt").read_text() or where in SAVES


def test_no_save_begins_between_a_report_and_the_end_that_it_says(monkeypatch):
    order, is_over = [], threading.Event()

    def save():
        with dog.during(SAVING):
            order.append("saving")
        is_over.set()

    def write(text):
        assert "The process ends with status 1" in text
        threading.Thread(target=save).start()
        time.sleep(0.05)
        order.append("reported")

    def end(status):
        order.append("ended")

    monkeypatch.setattr(watchdog, "write_now", write)
    monkeypatch.setattr(watchdog, "end_now", end)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **settings: None)
    with Watchdog(0.1, exits=True) as dog:
        assert is_over.wait(60)
    assert order == ["reported", "ended", "saving"]
