"""The events of a job: what its process does, reported to listeners that the run does not know.

The run reports through the `events` of this process:

    with events.phase(SAVE, step=7):     # what the main thread does, and so where the time goes
        ...
    events.progress(7)                   # the main thread has got further: a sign of life
    events.report(made=7)                # facts by name, values for JSON

Without listeners these only measure the seconds of each kind (`JobEvents.seconds`), which the
metrics of a step have. Goodput, the supervisor of an elastic job and the search for stuck processes
are listeners: a subclass of `Listener` each, which `main.py` and `praxis_tools/job_tools.py` add.

Facts that the run reports:

    from_step, source   the state that the launch has: its step, and "new", "disk" or "peers"
    trains_from         the loop begins after this step, also after a roll-back
    made                the metrics of this step are known
    lost_to             steps up to this one were made before, and are repeated
    ended_by            what stopped training, such as "SIGTERM"; None: it made its last step
    nothing_to_do       why the launch makes no step
    mesh, num_devices   of the job
    ended               "trained" or "stopped", once all is saved
    why                 how this process failed
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = (
    "COMPILE", "DISPATCH", "EVALUATION", "IMPORT", "INIT", "INPUT_WAIT", "JobEvents", "KINDS",
    "Listener", "MEETING", "ON_DEVICES", "Phase", "RESTORE", "SAVE", "STEP", "events",
)

# The kinds of a process's seconds. At any time the main thread is in a single one.
IMPORT = "import"  # From the start of the process: Python, libraries, the experiment's config.
INIT = "init"  # All else around training: the mesh, tracing, checks, a new state, the loss curve.
COMPILE = "compile"  # All programs of the job.
RESTORE = "restore"  # Verifying and reading the job's checkpoint, at the start or in a roll-back.
INPUT_WAIT = "input wait"  # The loop waits for a batch.
STEP = "step"  # The rest of the loop over steps: the devices compute, metrics are written, hooks.
EVALUATION = "evaluation"
SAVE = "save"  # Training waits for a save; saving in the background does not count.
KINDS = (IMPORT, INIT, COMPILE, RESTORE, INPUT_WAIT, STEP, EVALUATION, SAVE)

# Phases within others, whose seconds count as those of the outer phase, as do any other texts.
DISPATCH = "dispatch"  # Devices of all processes are given a program in which they meet.
ON_DEVICES = "on devices"  # The main thread waits until its devices have done their work.
MEETING = "meeting"  # It waits for the other processes, on the host.


class Phase(NamedTuple):
    """What the main thread does.

    Attributes:
      kind: as `JobEvents.phase` was given it: one of KINDS, or a finer one, such as MEETING or
        "hook NAME".
      counts_as: the kind of KINDS that its seconds are of: its own, or that of the phase around it.
      doing: its kind; of DISPATCH and ON_DEVICES the phase around it, with " on devices".
    """

    kind: str
    counts_as: str
    doing: str


class Listener:
    """Hears the events of a job. Subclass it; each method does nothing by default.

    Called at once, where the event happens: a method that takes its time delays training.
    """

    def begins(self, phase: Phase, step: int | None) -> None:
        """Called when a phase begins.

        Args:
          step: the one that is saved or dispatched to the devices, if the run specifies it.
        """

    def resumes(self, phase: Phase) -> None:
        """Called when a phase within `phase` has ended."""

    def progress(self, step: int | None) -> None:
        """Called when the main thread has ended a training step; None: something smaller."""

    def report(self, facts: Mapping[str, Any]) -> None:
        """Called with facts by name, from any thread."""


class JobEvents:
    """Tells listeners what this process does, and counts its seconds by kind.

    The seconds of all kinds always add up to the time since `began`. Phases and progress are the
    main thread's; other threads report nothing but facts.

    Args:
      now: seconds that never go back, and pass while the machine is awake.
      unix: Unix seconds.

    Attributes:
      began: when the launch began, in Unix seconds.
    """

    def __init__(
        self, *, now: Callable[[], float] = time.monotonic, unix: Callable[[], float] = time.time
    ):
        self._now, self._unix, self._lock = now, unix, threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self.launched()

    def launched(self, began: float | None = None) -> None:
        """Resets all seconds, for a launch that began at `began`, in Unix seconds; None: now."""
        at = self._unix()
        with self._lock:
            self.began = at if began is None else min(began, at)
            self._seconds = dict.fromkeys(KINDS, 0.0)
            self._phase, self._since = Phase(IMPORT, IMPORT, ""), self._now() - (at - self.began)

    def begins(self, kind: str, step: int | None = None) -> None:
        """Begins a phase that lasts until the next one begins."""
        before, doing = self._phase, kind
        if kind in (DISPATCH, ON_DEVICES):
            around = before.doing.removesuffix(f" {ON_DEVICES}")
            doing = around and f"{around} {ON_DEVICES}"
        counts_as = kind if kind in self._seconds else before.counts_as
        phase = self._counted(Phase(kind, counts_as, doing))
        for listener in self._listeners:
            listener.begins(phase, step)

    @contextlib.contextmanager
    def phase(self, kind: str, step: int | None = None) -> Iterator[None]:
        """Begins a phase, and resumes the one around it at the end; see `Listener.begins`."""
        before = self._phase
        self.begins(kind, step)
        try:
            yield
        finally:
            self._counted(before)
            for listener in self._listeners:
                listener.resumes(before)

    def progress(self, step: int | None = None) -> None:
        """Reports a sign of life, and the training step that has ended, if any."""
        for listener in self._listeners:
            listener.progress(step)

    def report(self, **facts: Any) -> None:
        """Reports facts by name (see above), values for JSON; from any thread."""
        for listener in self._listeners:
            listener.report(facts)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by kind up to now; from any thread."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._phase.counts_as] += self._now() - self._since
        return seconds

    def tell(self, listener: Listener) -> None:
        """Adds a listener, until the process ends."""
        if listener not in self._listeners:
            self._listeners += (listener,)

    @contextlib.contextmanager
    def told(self, listener: Listener) -> Iterator[None]:
        """Adds a listener within."""
        self._listeners += (listener,)
        try:
            yield
        finally:
            self._listeners = tuple(item for item in self._listeners if item is not listener)

    def _counted(self, phase: Phase) -> Phase:
        with self._lock:
            at = self._now()
            self._seconds[self._phase.counts_as] += at - self._since
            self._phase, self._since = phase, at
        return phase


# Of this process.
events = JobEvents()

# An older process did something else before: a shell that became this one, a notebook, tests.
_MOST_SECONDS = 60.0


def process_start() -> float:
    """Returns when the launch of this process began, in Unix seconds; called first of all.

    That is the start of the process as Linux tells it, to a hundredth of a second. If it is
    unknown, or more than a minute ago, it is now.
    """
    now = time.time()
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The name of the program, in brackets, may hold blanks and brackets.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # No Linux.
        return now
    return now - age if 0 <= age <= _MOST_SECONDS else now
