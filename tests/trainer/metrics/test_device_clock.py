"""The devices' time of steps, on devices and a clock that do what they are told."""

import threading
import time
import types

import pytest

from praxis_lite.trainer.metrics import device_clock
from praxis_lite.trainer.metrics.device_clock import DeviceClock


class Output:
    """An array that is there once its step is said to be over."""

    def __init__(self):
        self.over = threading.Event()

    def block_until_ready(self):
        assert self.over.wait(10)
        return self


def seen(step):
    """Waits until the clock has seen the end of a step."""
    while step._end is None:
        time.sleep(0.001)


class Devices:
    """Devices that run a step at a time; the time stands where it was put."""

    def __init__(self):
        self.time = 0.0
        self.clock = DeviceClock()

    def calls(self, at):
        output = Output()
        return self.clock.began(at, output), output

    def ends(self, at, step, output):
        """Lets a step end, and waits until the clock has seen it."""
        self.time = at
        output.over.set()
        seen(step)


@pytest.fixture
def devices(monkeypatch):
    made = Devices()
    clock = types.SimpleNamespace(perf_counter=lambda: made.time)
    monkeypatch.setattr(device_clock, "time", clock)
    return made


def test_a_step_counts_from_its_call_or_from_the_end_of_the_step_before(devices):
    with devices.clock:
        first, output = devices.calls(at=1.0)
        second, later = devices.calls(at=1.5)  # While the first runs.
        devices.ends(5.0, first, output)
        devices.ends(7.0, second, later)
        third, output = devices.calls(at=10.0)  # Long after: the devices had nothing to do.
        devices.ends(10.25, third, output)
        devices.time = 99.0  # The loop looks late, for it waited for a batch.
        assert [step.seconds() for step in (first, second, third)] == [4.0, 2.0, 0.25]


def test_a_step_whose_end_nobody_saw_yet_ends_now_and_the_next_counts_from_there(devices):
    with devices.clock:
        first, output = devices.calls(at=1.0)
        devices.time = 3.0
        assert first.seconds() == 2.0
        second, later = devices.calls(at=2.0)
        devices.time = 4.0
        output.over.set()
        devices.ends(6.0, second, later)
        assert second.seconds() == 3.0


def test_an_error_of_the_devices_is_left_to_the_loop_and_ends_the_step(devices):
    class Broken:
        def block_until_ready(self):
            raise RuntimeError("the device is gone")

    with devices.clock:
        step = devices.clock.began(0.0, Broken())
        seen(step)
        later, output = devices.calls(at=1.0)
        devices.ends(2.0, later, output)
        assert later.seconds() == 1.0
    assert not devices.clock._thread.is_alive()


def test_no_step_keeps_those_before_it(devices):
    with devices.clock:
        steps = []
        for number in range(5):
            step, output = devices.calls(at=float(number))
            devices.ends(number + 0.5, step, output)
            step.seconds()
            steps.append(step)
    assert all(step._previous is None for step in steps)
