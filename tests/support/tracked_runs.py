"""A run as trackers see it, and trackers that record, hang or fail."""

import threading
from pathlib import Path

from praxis_lite.trackers.tracker import TrackedRun, Tracker

CONFIG = {"task.rate": 0.5, "run.on": True, "run.num_train_steps": 13, "task.name": "a 'b'"}


def run_in(folder: Path, *, first_step: int = 0, **changes) -> TrackedRun:
    """Returns a run for a job's directory."""
    settings = {
        "id": "0123456789abcdef" * 2,
        "name": "job",
        "experiment": "zoo.Tiny",
        "job_log_dir": folder,
        "config": CONFIG,
        "facts": {"mesh": "data 4"},
        "first_step": first_step,
        "evaluated": ("heldout",),
    }
    return TrackedRun(**(settings | changes))


class Remembers(Tracker):
    """A tracker that appends its calls to lists, which its copies share.

    Attributes:
      fails_at: A step at which `scalars` raises, the first `num_failures` times.
    """

    def __init__(self, every=1, fails_at=None, num_failures=1):
        self.every, self.fails_at = every, fails_at
        self.failures = [None] * num_failures
        self.starts, self.points, self.calls, self.ending = [], [], [], []

    def start(self, run):
        self.starts.append(run)

    def scalars(self, step, scalars):
        if step == self.fails_at and self.failures:
            self.failures.pop()
            raise RuntimeError(f"no step {step}")
        self.points.append((step, dict(scalars)))

    def text(self, step, name, text):
        self.calls.append((step, name, text))

    def image(self, step, name, png):
        self.calls.append((step, name, png))

    def end(self, ending):
        self.ending.append(ending)


class Replaces(Remembers):
    """A tracker that accepts repeated steps."""

    def resume_from(self, step):
        self.points[:] = [point for point in self.points if point[0] <= step]


class Hangs(Tracker):
    """A tracker whose first step does not return until `let_go` is set."""

    every = 1
    let_go = threading.Event()

    def scalars(self, step, scalars):
        self.let_go.wait()


class Raises(Tracker):
    """A tracker that fails at its start, as if its service were unavailable."""

    every = 1

    def start(self, run):
        raise ConnectionError("no service at 127.0.0.1:9")
