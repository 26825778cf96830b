"""A thread that gives a tracker a run's numbers, so that the run never waits for it."""

import collections
import contextlib
import copy
import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.trackers.run_id import Position
from praxis_lite.run.trackers.tracker import Ending, TrackedRun, Tracker, replaces
from praxis_lite.run.trainer.metrics.followed_lines import FollowedLines
from praxis_lite.run.trainer.metrics.json_lines import newest_lines

# After an exception a tracker is tried again after so many seconds: twice as many each time.
RETRY_SECONDS, MOST_RETRY_SECONDS = 60.0, 3600.0
# Between two calls of a tracker that wants the newest numbers alone.
_NEWEST_SECONDS = 1.0
_NO_NUMBERS = ("step", "dataset")


class TrackerThread(threading.Thread):
    """Gives a tracker the lines of metrics.jsonl and eval_metrics.jsonl, up to announced steps.

    The files are the queue: nothing is lost while a tracker hangs or fails, and no memory is held.
    A `Position` in the job's directory says what is recorded, so that a run that goes on after a
    kill records each step once.

    Attributes:
      notes: lines for the user, which the loop prints.
      is_due: takes a step; True if the tracker gets its numbers.
    """

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, files: JobDir,
        is_due: Callable[[int], bool],
    ):
        super().__init__(name=f"tracker {name}", daemon=True)
        self.notes: collections.deque[str] = collections.deque()
        self.is_due = is_due
        # A copy, for a tracker among the settings may be in those of another job too.
        self._tracker, self._label = copy.copy(tracker), name
        self._run = dataclasses.replace(run, note=self.notes.append)
        self._files = files
        self._steps = FollowedLines(files.metrics_jsonl)
        self._evaluations = FollowedLines(files.eval_metrics_jsonl)
        self._position: Position | None = None
        self._is_started = self._has_started = self._has_failed = False
        self._made = self._evaluated = -1
        self._beginnings: collections.deque[int] = collections.deque()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._ending: Ending | None = None
        self._wake, self._ends = threading.Event(), threading.Event()

    def go_on_from(self, step: int) -> None:
        """Announces that training goes on after a step: the files have nothing later."""
        self._made = self._evaluated = step
        self._beginnings.append(step)
        self._wake_up()

    def made(self, step: int) -> None:
        """Announces that the line of a step is written."""
        self._made = step
        self._wake_up()

    def evaluated(self, step: int) -> None:
        """Announces that all lines of an evaluation are written."""
        self._evaluated = step
        self._wake_up()

    def text(self, step: int, name: str, text: str) -> None:
        """Gives the tracker a text."""
        self._call(lambda: self._tracker.text(step, name, text))

    def image(self, step: int, name: str, png: bytes) -> None:
        """Gives the tracker a picture."""
        self._call(lambda: self._tracker.image(step, name, png))

    def end(self, ending: Ending) -> None:
        """Asks the tracker to record the rest, and to end."""
        self._ending = ending
        self._ends.set()
        self._wake.set()

    def run(self) -> None:
        """Works until the tracker has ended."""
        try:
            self._serve()
        finally:
            self._restart()
            if self._position is not None:
                self._position.close()

    def _serve(self) -> None:
        seconds, has_ended = RETRY_SECONDS, False
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._ends.is_set()
            if self._made < 0:
                return  # The launch ended before it trained.
            try:
                self._work()
                if is_last:
                    has_ended = True
                    self._tracker.end(self._ending)
                seconds = RETRY_SECONDS
            except BaseException as error:  # SystemExit too: a tracker never ends a run.
                if isinstance(error, ConfigError) and not self._is_started:
                    self.notes.append(f"note: {error}")
                    return
                self._say(error, seconds)
                if self._ends.is_set():
                    if self._has_started and not has_ended:  # It closes its files.
                        with contextlib.suppress(BaseException):
                            self._tracker.end(self._ending)
                    return
                self._is_started = False
                self._restart()
                self._ends.wait(seconds)
                seconds = min(2 * seconds, MOST_RETRY_SECONDS)
                self._wake.set()
            if is_last:
                return
            if self._tracker.newest_alone:
                self._ends.wait(_NEWEST_SECONDS)

    def _work(self) -> None:
        """Gives the tracker what was announced and is not recorded."""
        if self._position is None:
            path = self._files.trackers / f"{self._label}.json"
            self._position = Position(
                None if self._tracker.newest_alone else path, self.notes.append
            )
        position = self._position
        if not self._is_started:
            self._tracker.start(self._run)
            self._is_started = self._has_started = True
        while self._beginnings:
            self._restart()
            if replaces(self._tracker) or self._tracker.newest_alone:
                position.step = min(position.step, self._beginnings[0])
                position.evaluation = min(position.evaluation, position.step)
                self._tracker.go_on_from(position.step)
            self._beginnings.popleft()
        self._give_steps(position)
        self._give_evaluations(position)
        while self._calls:
            self._calls.popleft()()

    def _give_steps(self, position: Position) -> None:
        if self._tracker.newest_alone:
            newest = itertools.takewhile(
                lambda line: line["step"] > position.step, newest_lines(self._files.metrics_jsonl)
            )
            due = (x for x in newest if x["step"] <= self._made and self.is_due(x["step"]))
            lines = itertools.islice(due, 1)
        else:
            lines = self._steps.up_to(
                self._made, lambda step: step > position.step and self.is_due(step), position.step
            )
        for line in lines:
            self._tracker.scalars(line["step"], _numbers(line))
            position.step = line["step"]
            position.save()

    def _give_evaluations(self, position: Position) -> None:
        results: dict[int, dict[str, float]] = {}
        for line in self._evaluations.up_to(
            self._evaluated, lambda step: step > position.evaluation
        ):
            values = results.setdefault(line["step"], {})
            # The first line of a step and a dataset is training's; --mode=eval adds others.
            for name, value in _numbers(line).items():
                values.setdefault(f"{line['dataset']}/{name}", value)
        for step in sorted(results):
            self._tracker.scalars(step, results[step])
            position.evaluation = step
            position.save()

    def _restart(self) -> None:
        self._steps.restart()
        self._evaluations.restart()

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake_up()

    def _wake_up(self) -> None:
        if not self._wake.is_set():  # The loop calls this each step: a lock costs more than a look.
            self._wake.set()

    def _say(self, error: BaseException, seconds: float) -> None:
        if self._has_failed and not self._ends.is_set():
            return
        self._has_failed = True
        again = (
            "the next launch of the job gives it what it lacks" if self._ends.is_set()
            else f"it is tried again after {seconds:.0f} s, and then gets what it lacks"
        )
        words = shown(" ".join(str(error).split()), 300)
        self.notes.append(
            f"note: the tracker {self._label} failed, and training goes on: "
            f"{type(error).__name__}: {words} ({again})"
        )


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in line.items()
        if isinstance(value, int | float) and name not in _NO_NUMBERS
    }
