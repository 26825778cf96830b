"""A thread that calls a tracker, so that training never waits for it."""

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

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.trackers.tracker import Ending, TrackedRun, Tracker

# Queued calls of a tracker that hangs: some tens of megabytes with fifty numbers each.
MOST_WAITING = 10_000
# Between two steps for a tracker that wants only the newest numbers.
NEWEST_SECONDS = 1.0


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in a line of metrics.jsonl by name, without its step."""
    numbers = {}
    for name, value in line.items():
        if name != "step" and not isinstance(value, str):
            try:
                numbers[name] = float(value)
            except TypeError:  # None, a list or a mapping.
                continue
    return numbers


class TrackerThread(threading.Thread):
    """Calls the methods of a tracker in the order in which a run asks for them.

    An exception in `start` switches the tracker off for this launch. After one in another method
    the later calls are made all the same. Either is noted once.

    Args:
      name: of the tracker in `RunConfig.trackers`.
      is_due: returns True for a step whose numbers the tracker gets.

    Attributes:
      notes: lines for the user, which the loop prints.
      is_due: as above.
    """

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, is_due: Callable[[int], bool]
    ):
        super().__init__(name=f"tracker {name}", daemon=True)
        self.notes: collections.deque[str] = collections.deque()
        # A copy, because another job may have the same tracker in its settings.
        self._tracker, self._label = copy.copy(tracker), name
        self._run = dataclasses.replace(run, note=self.notes.append)
        self.is_due, self._newest_at = is_due, -math.inf
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_failed = self._is_off = self._is_behind = False
        self._recorded_step = self._recorded_evaluation = 0

    def go_on_from(self, step: int, recorded_step: int, recorded_evaluation: int) -> None:
        """Announces that training continues after a step.

        Args:
          recorded_step: The newest step that was made before; a tracker that cannot hide later
            steps does not get the steps up to it again.
          recorded_evaluation: The newest step that was evaluated before.
        """
        if type(self._tracker).go_on_from is Tracker.go_on_from:
            self._recorded_step, self._recorded_evaluation = recorded_step, recorded_evaluation
        self._call(self._tracker.go_on_from, step)

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Gives the tracker the numbers of a step, if it is due."""
        if step <= self._recorded_step or not self.is_due(step):
            return
        if self._tracker.newest_alone:
            now = time.monotonic()
            if now < self._newest_at + NEWEST_SECONDS:
                return
            self._newest_at = now
        self._call(self._tracker.scalars, step, numbers)

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Gives the tracker the metrics of an evaluation, by dataset."""
        if step > self._recorded_evaluation:
            numbers = {
                f"{dataset}/{name}": float(value)
                for dataset, metrics in results.items() for name, value in metrics.items()
            }
            self._call(self._tracker.scalars, step, numbers)

    def text(self, step: int, name: str, text: str) -> None:
        """Gives the tracker a text."""
        self._call(self._tracker.text, step, name, text)

    def image(self, step: int, name: str, png: bytes) -> None:
        """Gives the tracker a picture."""
        self._call(self._tracker.image, step, name, png)

    def end(self, ending: Ending) -> None:
        """Ends the tracker once all earlier calls are done."""
        self._calls.put(functools.partial(self._tracker.end, ending))
        self._calls.put(None)

    def run(self) -> None:
        """Starts the tracker, and makes calls until it has ended."""
        try:
            self._tracker.start(self._run)
        except BaseException as error:  # SystemExit too: a tracker never ends a run.
            self._is_off = True
            self.notes.append(
                f"note: {error}" if isinstance(error, ConfigError)
                else self._failure(error, "training goes on without it")
            )
            return
        for call in iter(self._calls.get, None):
            try:
                call()
            except BaseException as error:
                if not self._has_failed:
                    self._has_failed = True
                    rest = "training goes on; what it fails to record is in the job's files alone"
                    self.notes.append(self._failure(error, rest))

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        if self._is_off:
            return
        if self._calls.qsize() < MOST_WAITING:
            self._calls.put(functools.partial(method, *args))
        elif not self._is_behind:
            self._is_behind = True
            self.notes.append(
                f"note: the tracker {self._label} is {MOST_WAITING:,} calls behind; it lacks what "
                "comes until it has caught up"
            )

    def _failure(self, error: BaseException, rest: str) -> str:
        words = shown(" ".join(str(error).split()), 300)
        return f"note: the tracker {self._label} failed: {type(error).__name__}: {words}; {rest}"
