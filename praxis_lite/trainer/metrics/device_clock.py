"""Measures each step's duration on the devices, in a thread that waits for the step's outputs."""

import contextlib
import queue
import threading
import time
from typing import Any

import jax


class DeviceSpan:
    """The time span during which a step runs on the devices.

    Args:
      dispatch_start: Time of the step's dispatch (`time.perf_counter`).
      previous: The span of the previous step, or None.
    """

    def __init__(self, dispatch_start: float, previous: "DeviceSpan | None"):
        self._dispatch_start, self._previous = dispatch_start, previous
        self._end: float | None = None

    def end(self) -> float:
        """Returns the end of the span, which is the time of the first call to this method."""
        if self._end is None:
            self._end = time.perf_counter()
        return self._end

    def seconds(self) -> float:
        """Returns the duration in seconds. Call this after the step has ended."""
        end, start = self.end(), self._dispatch_start
        if self._previous is not None:
            start = max(start, self._previous.end())
            self._previous = None  # Otherwise the spans of all steps would stay in memory.
        return max(0.0, end - start)


class DeviceClock(contextlib.AbstractContextManager):
    """Measures the duration of each step on this process's devices, without blocking the loop.

    A step starts when it is dispatched, or when the previous step ends if that is later. A step
    ends when a thread that blocks on the step's outputs wakes up, which happens about 0.1 ms late,
    or up to 5 ms late (Python's switch interval) while the loop holds the GIL. The measured time
    therefore includes the dispatch if the devices are idle, but not if they are still running the
    previous step.
    """

    def __init__(self) -> None:
        self._last: DeviceSpan | None = None
        self._running = queue.SimpleQueue[tuple[DeviceSpan, Any] | None]()
        self._thread = threading.Thread(target=self._wait, name="device clock", daemon=True)

    def began(self, dispatch_start: float, outputs: Any) -> DeviceSpan:
        """Starts measuring a step that was just dispatched, and returns its span.

        Args:
          dispatch_start: Time of the step's dispatch (`time.perf_counter`).
          outputs: Arrays that the step computes and that are never donated.
        """
        span = self._last = DeviceSpan(dispatch_start, self._last)
        self._running.put((span, outputs))
        return span

    def __enter__(self) -> "DeviceClock":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.put(None)
        self._thread.join(1.0)  # Do not wait for devices that hang; the watchdog reports them.

    def _wait(self) -> None:
        while (running := self._running.get()) is not None:
            span, outputs = running
            # Device errors are raised in the loop when it reads the outputs.
            with contextlib.suppress(Exception):
                jax.block_until_ready(outputs)
            span.end()
