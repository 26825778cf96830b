"""The devices' time of each step, measured by a thread that waits for it."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax


class OnDevices:
    """A step that was started on the devices.

    Args:
      called: when its call began, in seconds of `now`.
      before: the step before, or None.
      now: the clock.
    """

    def __init__(self, called: float, before: "OnDevices | None", now: Callable[[], float]):
        self._called, self._before, self._now = called, before, now
        self._end: float | None = None

    def end(self) -> float:
        """Returns when it ended: now, if no end was recorded before."""
        if self._end is None:
            self._end = self._now()
        return self._end

    def seconds(self) -> float:
        """Returns the seconds that it took; called once it has ended."""
        end, began = self.end(), self._called
        if self._before is not None:
            began = max(began, self._before.end())
            self._before = None  # It holds the step before it, and so on.
        return max(0.0, end - began)


class DeviceClock(contextlib.AbstractContextManager):
    """Measures the devices' time of steps, while it is entered.

    The time of a step is that from its call, or from the end of the step before if that is later,
    to its end, on the devices of this process. The end is when a thread that blocks until an output
    is there wakes up: up to about 0.1 ms late, and longer only while the loop holds Python's lock
    (at most 5 ms, the interval in which Python gives it away). The loop and the devices wait for
    nothing. A step that begins on idle devices counts from its call, with what the host needs to
    hand it over; a step that is called while another runs does not.

    Args:
      now: the clock.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._last = now, None
        self._waiting = queue.SimpleQueue[tuple[OnDevices, Any] | None]()
        self._thread = threading.Thread(target=self._wait, name="device clock", daemon=True)

    def began(self, called: float, outputs: Any) -> OnDevices:
        """Returns a step that was just called, whose end is waited for from now on.

        Args:
          called: when its call began.
          outputs: arrays of its results that nothing donates.
        """
        self._last = OnDevices(called, self._last, self._now)
        self._waiting.put((self._last, outputs))
        return self._last

    def __enter__(self) -> "DeviceClock":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._waiting.put(None)
        self._thread.join(1.0)  # Devices that hang are the watchdog's to report.

    def _wait(self) -> None:
        while (item := self._waiting.get()) is not None:
            step, outputs = item
            # What went wrong on the devices is raised where the loop reads the outputs.
            with contextlib.suppress(Exception):
                jax.block_until_ready(outputs)
            step.end()
