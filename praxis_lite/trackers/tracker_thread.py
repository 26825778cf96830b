"""Calls a tracker in a separate thread, so that training never waits for it."""

import collections
import copy
import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.trackers.tracker import Ending, Histogram, TrackedRun, Tracker

# Maximum number of queued calls. With fifty numbers per call, a full queue takes tens of megabytes.
MAX_QUEUED_CALLS = 10_000
# Minimum number of seconds between two calls to a tracker with `latest_only`.
LATEST_ONLY_SECONDS = 1.0


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in a line of metrics.jsonl, keyed by name, without the step."""
    numbers = {}
    for name, value in line.items():
        if name != "step" and not isinstance(value, str):
            try:
                numbers[name] = float(value)
            except TypeError:  # None, a list or a mapping.
                continue
    return numbers


class TrackerThread(threading.Thread):
    """Calls the methods of a tracker, in the order in which they were queued.

    An exception in `start` disables the tracker for this launch. After an exception in another
    method, the tracker is still called. Only the first exception is reported.

    Args:
      name: Name of the tracker in `RunConfig.trackers`.
      tracker: The tracker.
      run: The description of the run.
      is_due: Function that returns whether to send the metrics of a step to the tracker.

    Attributes:
      notes: Messages for the user, which the training loop prints.
      is_due: The argument `is_due`.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, is_due: Callable[[int], bool]):
        super().__init__(name=f"tracker {name}", daemon=True)
        self.notes: collections.deque[str] = collections.deque()
        # Copy the tracker, because another job may share it in its settings.
        self._tracker, self._label = copy.copy(tracker), name
        self._run = dataclasses.replace(run, note=self.notes.append)
        self.is_due, self._sent_at = is_due, -math.inf
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_failed = self._is_off = self._is_behind = False
        self._recorded_step = self._recorded_evaluation = 0

    def resume_from(self, step: int, recorded_step: int, recorded_evaluation: int) -> None:
        """Queues a call to the tracker's `resume_from`.

        Args:
          step: Step after which training continues.
          recorded_step: Last step that has already been recorded. Steps up to this step are not
            sent again to a tracker that cannot hide recorded steps.
          recorded_evaluation: Last step whose evaluation has already been recorded.
        """
        if type(self._tracker).resume_from is Tracker.resume_from:
            self._recorded_step, self._recorded_evaluation = recorded_step, recorded_evaluation
        self._call(self._tracker.resume_from, step)

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queues the metrics of a step, if the step is due."""
        if step <= self._recorded_step or not self.is_due(step):
            return
        if self._tracker.latest_only:
            now = time.monotonic()
            if now < self._sent_at + LATEST_ONLY_SECONDS:
                return
            self._sent_at = now
        self._call(self._tracker.scalars, step, numbers)

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Queues the metrics of an evaluation, keyed by dataset."""
        if step > self._recorded_evaluation:
            numbers = {
                f"{dataset}/{name}": float(value)
                for dataset, metrics in results.items()
                for name, value in metrics.items()
            }
            self._call(self._tracker.scalars, step, numbers)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Queues the histograms of a step."""
        if step > self._recorded_step:
            self._call(self._tracker.histograms, step, histograms)

    def text(self, step: int, name: str, text: str) -> None:
        """Queues a text."""
        self._call(self._tracker.text, step, name, text)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Queues a text that belongs to a step."""
        if step > self._recorded_step:
            self.text(step, name, text)

    def image(self, step: int, name: str, png: bytes) -> None:
        """Queues an image."""
        self._call(self._tracker.image, step, name, png)

    def end(self, ending: Ending) -> None:
        """Queues a call to the tracker's `end`, after which the thread stops."""
        self._calls.put(functools.partial(self._tracker.end, ending))
        self._calls.put(None)

    def run(self) -> None:
        """Starts the tracker, and executes queued calls until the tracker has ended."""
        try:
            self._tracker.start(self._run)
        except BaseException as error:  # Even SystemExit, because a tracker must not end a run.
            self._is_off = True
            self.notes.append(
                f"note: {error}"
                if isinstance(error, ConfigError)
                else self._failure(error, "training continues without it")
            )
            return
        for call in iter(self._calls.get, None):
            try:
                call()
            except BaseException as error:
                if not self._has_failed:
                    self._has_failed = True
                    rest = "training continues; values it fails to record are in the job's files"
                    self.notes.append(self._failure(error, rest))

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        if self._is_off:
            return
        if self._calls.qsize() < MAX_QUEUED_CALLS:
            self._calls.put(functools.partial(method, *args))
        elif not self._is_behind:
            self._is_behind = True
            self.notes.append(
                f"note: the tracker {self._label} is {MAX_QUEUED_CALLS:,} calls behind; further "
                "calls are dropped until it has caught up"
            )

    def _failure(self, error: BaseException, rest: str) -> str:
        reason = shortened(" ".join(str(error).split()), 300)
        return f"note: the tracker {self._label} failed: {type(error).__name__}: {reason}; {rest}"
