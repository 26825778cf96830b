"""Signals and a time limit end a training in Python, and never the process that it is in."""

import subprocess
import sys

import pytest

from tests.support.job_runs import CHECKOUT

# Each case raises signals in a process of its own, whose main thread is in the place that it names.
HEAD = '''
import ctypes, os, signal, threading, time
from praxis_lite.core.errors import ConfigError
from praxis_lite.job.processes.interrupts import Interrupt

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
before = [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)]

class Answered(Interrupt):
    """Sends a second signal as soon as the first is reported, as a script may."""

    def _on_signal(self, signum):
        super()._on_signal(signum)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # The main thread's handler runs now.

def ended(limit, *signums, steps=1, pause=0.3, kind=Interrupt):
    pauses = 0
    try:
        with kind(limit) as stop:
            stop.training_begins(40)
            for _ in range(steps):
                stop.step_ended()
            for signum in signums:
                signal.raise_signal(signum)
                time.sleep(pause)
                pauses += 1
            time.sleep(3 * (limit or 0))
            stop.step_ended()
            print("saved:", stop.reason)
    except (KeyboardInterrupt, ConfigError) as error:
        print(type(error).__name__, pauses, error)
    assert before == [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)]

def ended_in_c(*signums):
    """The main thread waits in C code, where Python calls no handler, until all have come."""
    pthreads, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)

    def send():
        for signum in signums:
            time.sleep(0.3)  # The main thread waits by then.
            os.kill(os.getpid(), signum)
        time.sleep(0.1)
        pthreads.pthread_mutex_unlock(mutex)

    try:
        with Interrupt(None) as stop:
            stop.training_begins(40)
            stop.step_ended()
            pthreads.pthread_mutex_lock(mutex)
            threading.Thread(target=send).start()
            pthreads.pthread_mutex_lock(mutex)
            time.sleep(0.1)
            print("saved:", stop.reason)
    except KeyboardInterrupt as error:
        print("KeyboardInterrupt", error)
'''
CASES = {
    "ended(None, signal.SIGINT)": "saved: SIGINT",
    "ended(None, signal.SIGTERM)": "saved: SIGTERM",
    "ended(None, signal.SIGINT, signal.SIGINT)": "KeyboardInterrupt 1 SIGINT",
    "ended(None, signal.SIGINT, signal.SIGTERM, pause=0)": "KeyboardInterrupt 1 SIGTERM",
    "ended(None, signal.SIGTERM, kind=Answered)": "KeyboardInterrupt 0 SIGINT",
    "ended(None, signal.SIGINT, steps=0)": "KeyboardInterrupt 0 SIGINT",
    "ended(None, signal.SIGTERM, steps=0)": "KeyboardInterrupt 0 SIGTERM",
    "ended(0.1)": "saved: the time limit of 0.1 s",
    "ended(0.1, steps=0)": "ConfigError 0 the time limit of 0.1 s expired before the first step",
    "ended(None)": "saved: None",
    "ended_in_c(signal.SIGTERM)": "saved: SIGTERM",
    "ended_in_c(signal.SIGTERM, signal.SIGINT)": "KeyboardInterrupt SIGINT",
    "ended_in_c(signal.SIGTERM, signal.SIGTERM)": "KeyboardInterrupt SIGTERM",
    "ended_in_c(signal.SIGTERM, signal.SIGHUP)": "saved: SIGTERM",
}


@pytest.fixture(scope="module")
def lines():
    """Returns the lines that CASES print one after the other in one process, and its errors."""
    source = HEAD + "".join(f"{case}\n" for case in CASES)
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=CHECKOUT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_each_way_to_ask_ends_the_training_and_the_process_goes_on(lines):
    out, err = lines
    assert len(out) == len(CASES)
    for actual, (case, expected) in zip(out, CASES.items(), strict=True):
        assert actual.startswith(expected), case
    assert "SIGINT: ending after the current step is saved" in err
    assert "SIGINT: ended; nothing is lost: the newest checkpoint is of step 40" in err
