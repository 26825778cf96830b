"""The progress of a process, noted by its main thread; the basis for finding stuck processes."""

import collections
import dataclasses
import time
from collections.abc import Callable

from praxis_lite.job import events
from praxis_lite.job.events import DISPATCH, MEETING, Listener, Phase

ON_DEVICES = f" {events.ON_DEVICES}"  # The end of `Phase.doing`.
_NUM_KNOWN = 3  # Times that something was done: from then on it is known how long it takes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The work of a process, and how far it has come.

    Attributes:
      process: its index in the job (elastic: in the generation).
      doing: what its main thread does: a kind of goodput's, such as "step", "connect", "hook NAME",
        each of them also with ON_DEVICES, or MEETING; "": it does not say.
      usual_seconds: the longest that the process has been silent before while it did the same;
        None: it has done so less than three times.
      step: the last training step that it ended; None: none yet.
      dispatched: the last training step that it handed to the devices; None: none yet.
      arrived: to how many of the places it has come at which all processes meet: steps and batches
        of evaluations that it was about to hand to the devices, barriers on the host. All come to
        the same places in the same order, so the others wait for the one with the fewest.
      silent_seconds: since its last sign of life, as its own host measures it: it came to a place,
        ended a step, or began or ended to do something.
      unheard_seconds: since a thread of it last reported all this; grows while the process is
        stopped, or while C code holds Python's lock.
      cpu_seconds: used so far by the process and its children.
      ready_seconds: that its living threads, and those of its children, ran or waited for a core.
      io_bytes: read and written so far by the process.
      state: of the process, as /proc/PID/stat has it: "R" runs, "S" sleeps, "D" waits for a disk or
        a network file system, "T" is stopped; "": unknown.
    """

    process: int
    doing: str
    usual_seconds: float | None = None
    step: int | None = None
    dispatched: int | None = None
    arrived: int = 0
    silent_seconds: float = 0.0
    unheard_seconds: float = 0.0
    cpu_seconds: float = 0.0
    ready_seconds: float = 0.0
    io_bytes: int = 0
    state: str = ""


class Noted(Listener):
    """What this process does and how far it has come, as the events of its main thread tell it.

    Attributes:
      first_collective: returns the first collective of a training step that needs the devices of a
        process, by its index, as text; "": it is not known.

    Args:
      now: seconds that never go back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.first_collective: Callable[[int], str] = lambda process: ""
        self._now, self._doing, self._last_sign = now, "", now()
        self._step: int | None = None
        self._dispatched: int | None = None
        self._arrived = 0
        self._longest: dict[str, float] = collections.defaultdict(float)
        self._num_times: collections.Counter[str] = collections.Counter()

    def sign(self) -> None:
        """Notes a sign of life."""
        now, doing = self._now(), self._doing
        self._longest[doing] = max(self._longest[doing], now - self._last_sign)
        self._num_times[doing] += 1
        self._last_sign = now

    def begins(self, phase: Phase, step: int | None) -> None:
        if phase.kind in (DISPATCH, MEETING):
            self.arrives(dispatched=step)
        self.does(phase.doing)

    def resumes(self, phase: Phase) -> None:
        self.does(phase.doing)

    def progress(self, step: int | None) -> None:
        self._step = self._step if step is None else step
        self.sign()

    def does(self, doing: str) -> None:
        """Notes its work from now on."""
        if doing != self._doing:
            self.sign()
            self._doing = doing

    def arrives(self, dispatched: int | None = None) -> None:
        """Notes that it has come to a place at which all processes meet.

        Args:
          dispatched: the training step that it is about to hand to the devices; None: it is
            something else.
        """
        self._arrived += 1
        self._dispatched = self._dispatched if dispatched is None else dispatched
        self.sign()

    def progress_of(self, process: int) -> Progress:
        """Returns the progress of this process, whose index is given; from any thread."""
        doing = self._doing
        is_known = self._num_times[doing] >= _NUM_KNOWN
        return Progress(
            process=process, doing=doing, step=self._step, dispatched=self._dispatched,
            usual_seconds=self._longest[doing] if is_known else None,
            arrived=self._arrived, silent_seconds=self._now() - self._last_sign,
        )


own = Noted()
