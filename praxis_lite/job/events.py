"""Reports this process's phases, progress and measurements to listeners.

Job code uses the global `events`:

    with events.phase(SAVE, step=7):     # The activity of the main thread, whose time is measured.
        ...
    events.step_ended(7)                 # The main thread has completed training step 7.
    events.progress()                    # The main thread has made other progress.
    events.report(made=7)                # Facts, keyed by name, with JSON values.

Without listeners, only the seconds spent in each kind of phase are measured (`JobEvents.seconds`),
for a step's metrics. Goodput, the supervisor of an elastic job and the detection of stuck processes
are implemented as listeners: subclasses of `Listener` that the trainer's recorder
and praxis_tools add.

Reported facts:

    from_step, source   the step of the launch's first state, and "new", "disk" or "peers"
    trains_from         training starts after this step; also reported after a roll-back
    made                the metrics of this step are known
    lost_to             steps from an earlier launch, up to this step, are recomputed
    ended_by            the request that ended training, such as "SIGTERM"; None after the last step
    nothing_to_do       why the launch runs no steps
    mesh, num_devices   the job's mesh
    ended               "trained" or "stopped", after everything was saved
    why                 the reason why this process failed
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = (
    "COMPILE",
    "DISPATCH",
    "EVALUATION",
    "IMPORT",
    "INIT",
    "INPUT_WAIT",
    "JobEvents",
    "KINDS",
    "Listener",
    "MEETING",
    "ON_DEVICES",
    "Phase",
    "RESTORE",
    "SAVE",
    "STEP",
    "events",
)

# The kinds of phases for which seconds are counted. The main thread is always in one of them.
IMPORT = "import"  # From the start of the process: Python, libraries, the experiment's config.
INIT = "init"  # Everything else outside the loop: mesh, tracing, checks, new state, loss curve.
COMPILE = "compile"  # Compiling any function of the job.
RESTORE = "restore"  # Verifying and reading the job's checkpoint, at startup or in a roll-back.
INPUT_WAIT = "input wait"  # The loop waits for a batch.
STEP = "step"  # The rest of the loop: devices compute, metrics are written, hooks run.
EVALUATION = "evaluation"
SAVE = "save"  # Training waits for a save. Saving in the background is not included.
KINDS = (IMPORT, INIT, COMPILE, RESTORE, INPUT_WAIT, STEP, EVALUATION, SAVE)

# Kinds of inner phases. Seconds in these and all other kinds are added to the outer phase.
DISPATCH = "dispatch"  # Dispatching a compiled function with collectives to the devices.
ON_DEVICES = "on devices"  # Waiting for this process's devices.
MEETING = "meeting"  # Waiting for the other processes, on the host.


class Phase(NamedTuple):
    """The activity of the main thread.

    Attributes:
      kind: The argument of `JobEvents.phase`: one of KINDS, or the kind of an inner phase, such as
        MEETING or "hook NAME".
      counts_as: The element of KINDS to which the phase's seconds are added: `kind`, or for an
        inner phase, the kind of the outer phase.
      doing: A description of the activity: `kind`, or for DISPATCH and ON_DEVICES, the outer
        phase's description followed by " on devices".
    """

    kind: str
    counts_as: str
    doing: str


class Listener:
    """Base class for listeners to a job's events. By default, every method does nothing.

    Methods are called synchronously, so a slow method delays training.
    """

    def begins(self, phase: Phase, step: int | None) -> None:
        """Called when a phase begins.

        Args:
          phase: The phase.
          step: The step that is being saved or dispatched, if specified.
        """

    def resumes(self, phase: Phase) -> None:
        """Called when an inner phase has ended and `phase` resumes."""

    def step_ended(self, step: int) -> None:
        """Called after the main thread has completed a training step."""

    def progress(self) -> None:
        """Called after other progress in the main thread."""

    def report(self, facts: Mapping[str, Any]) -> None:
        """Called with facts, keyed by name, from any thread."""


class JobEvents:
    """Reports this process's activity to listeners, and measures the seconds per kind of phase.

    The seconds for all kinds add up to the time since `began`. Only the main thread reports phases
    and progress; any thread may report facts.

    Args:
      now: A monotonic clock in seconds.
      unix: A clock in Unix seconds.

    Attributes:
      began: Start of the launch, in Unix seconds.
    """

    def __init__(
        self, *, now: Callable[[], float] = time.monotonic, unix: Callable[[], float] = time.time
    ):
        self._now, self._unix, self._lock = now, unix, threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self.launched()

    def launched(self, began: float | None = None) -> None:
        """Resets all seconds for a launch that began at `began` (in Unix seconds; None for now)."""
        at = self._unix()
        with self._lock:
            self.began = at if began is None else min(began, at)
            self._seconds = dict.fromkeys(KINDS, 0.0)
            self._phase, self._since = Phase(IMPORT, IMPORT, ""), self._now() - (at - self.began)

    def begins(self, kind: str, step: int | None = None) -> None:
        """Begins a phase that lasts until the next phase begins."""
        outer, doing = self._phase, kind
        if kind in (DISPATCH, ON_DEVICES):
            outer_doing = outer.doing.removesuffix(f" {ON_DEVICES}")
            doing = outer_doing and f"{outer_doing} {ON_DEVICES}"
        counts_as = kind if kind in self._seconds else outer.counts_as
        phase = self._switch_to(Phase(kind, counts_as, doing))
        for listener in self._listeners:
            listener.begins(phase, step)

    @contextlib.contextmanager
    def phase(self, kind: str, step: int | None = None) -> Iterator[None]:
        """Context manager for a phase; on exit, the outer phase resumes."""
        outer = self._phase
        self.begins(kind, step)
        try:
            yield
        finally:
            self._switch_to(outer)
            for listener in self._listeners:
                listener.resumes(outer)

    def step_ended(self, step: int) -> None:
        """Reports that the main thread has completed a training step."""
        for listener in self._listeners:
            listener.step_ended(step)

    def progress(self) -> None:
        """Reports progress in the main thread other than the end of a training step."""
        for listener in self._listeners:
            listener.progress()

    def report(self, **facts: Any) -> None:
        """Reports facts as JSON values (see the module docstring). Callable from any thread."""
        for listener in self._listeners:
            listener.report(facts)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds so far, keyed by kind of phase. Callable from any thread."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._phase.counts_as] += self._now() - self._since
        return seconds

    def add_listener(self, listener: Listener) -> None:
        """Adds a listener until the process exits."""
        if listener not in self._listeners:
            self._listeners += (listener,)

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Context manager that adds a listener, and removes the listener on exit."""
        self._listeners += (listener,)
        try:
            yield
        finally:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

    def _switch_to(self, phase: Phase) -> Phase:
        """Adds the current phase's seconds to the total for its kind, and switches to `phase`."""
        with self._lock:
            at = self._now()
            self._seconds[self._phase.counts_as] += at - self._since
            self._phase, self._since = phase, at
        return phase


# The events of this process.
events = JobEvents()

# A process older than this did other work before the launch, as in a notebook, in a test run or in
# a shell that was replaced by Python (exec).
_MAX_AGE_SECONDS = 60.0


def process_start() -> float:
    """Returns the start time of this launch in Unix seconds.

    Linux reports the start time of the process with a resolution of 10 ms. If this time is unknown
    or more than a minute ago, the current time is returned.
    """
    now = time.time()
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # Skip the program's name in parentheses, which may contain spaces and parentheses.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # Not Linux.
        return now
    return now - age if 0 <= age <= _MAX_AGE_SECONDS else now
