"""The beats of a job's processes, as a process sees them: who is silent, and who is stuck."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping

from praxis_lite.run.job import processes
from praxis_lite.run.job.processes import watchdog
from praxis_lite.run.job.processes.stuck.decision import Decision, Stuck
from praxis_lite.run.job.processes.stuck.on_host import own_progress, state_in_words
from praxis_lite.run.job.processes.stuck.progress import Progress, own
from praxis_lite.run.job.processes.stuck.stacks import stacks
from praxis_lite.run.job.processes.stuck.words import details, paragraph

_GONE = (
    "it was killed, or its host or network failed, or it is stopped, or C code keeps Python's lock "
    "(then its stacks are on its standard error)"
)
_NUM_ASKED = 4  # Beats in which a process that is asked for its stacks may give them.


@dataclasses.dataclass(frozen=True)
class Beat:
    """A sign that a process lives, sent every few seconds.

    Attributes:
      number: grows with each.
      pid: of the process on its host.
      progress: of the process.
      asks: the processes whose stacks the first process asks for.
    """

    number: int
    pid: int
    progress: Progress
    asks: tuple[int, ...] = ()

    def text(self) -> str:
        """Returns the beat as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "Beat":
        """Returns the beat that `text` gave."""
        fields = json.loads(text)
        return cls(
            fields["number"], fields["pid"], Progress(**fields["progress"]), tuple(fields["asks"])
        )


class Beats:
    """The beats of other processes, as this process sees them.

    Args:
      seconds: between two beats.
    """

    def __init__(self, seconds: float):
        self._seconds, self._number = seconds, 0
        self._last: dict[int, Beat] = {}
        self._num_silent: dict[int, int] = {}
        self._decision = Decision(processes.count())
        self._asked: dict[int, str] = {}  # Stuck processes that are asked, and their stacks.
        self._num_asked, self._reported = 0, ()

    def own(self) -> Beat:
        """Returns the next beat of this process."""
        self._number += 1
        progress = own_progress(processes.index())
        return Beat(self._number, os.getpid(), progress, tuple(self._asked))

    def see(self, beats: Mapping[int, Beat]) -> None:
        """Takes the newest beats of other processes, once between two of this process's own.

        Silence is counted in beats of this process, not in seconds: it may have been stopped.
        """
        for process, beat in beats.items():
            is_new = process not in self._last or beat.number != self._last[process].number
            self._num_silent[process] = 0 if is_new else self._num_silent[process] + 1
            self._last[process] = beat

    def silent(self, process: int) -> float:
        """Returns for how many seconds a process has not been heard of."""
        return self._num_silent.get(process, 0) * self._seconds

    def asks(self, process: int) -> bool:
        """Returns True if the first process asks another for its stacks."""
        return 0 in self._last and process in self._last[0].asks

    def silent_in_words(self, process: int, seconds: float) -> str:
        """Returns why a process may be silent, how far it had come, and where the others wait."""
        last, why = self._last.get(process), _GONE
        words = f"has not been heard of for {seconds:.0f} s"
        if last is None:
            return f"{words}: {why}"
        if processes.host(process) == processes.host(processes.index()):
            why = state_in_words(last.pid) or why
        silent = dataclasses.replace(last.progress, unheard_seconds=seconds)
        stuck = Stuck((silent,), seconds, (own.progress(processes.index()),), why)
        return f"{words}: {why}; {details(stuck, processes.name, own.first_collective)}"

    def stuck(self, given: Callable[[Progress], str | None]) -> tuple[Stuck, str] | None:
        """Returns who is stuck, and a report with stacks, once for each; for the first process.

        Args:
          given: returns the stacks that a process gave which was asked for them, None: not yet.
        """
        progress = [
            dataclasses.replace(beat.progress, unheard_seconds=self.silent(k))
            for k, beat in self._last.items()
        ]
        local = own_progress(processes.index())
        stuck = self._decision.add(time.monotonic(), [local, *progress])
        if stuck is None:
            self._asked, self._num_asked = {}, 0
            return None
        who = tuple((item.process, item.arrived) for item in stuck.processes or stuck.waiting)
        if who == self._reported:
            return None
        for item in stuck.processes:
            if not self._asked.get(item.process):
                is_own = item.process == processes.index()
                self._asked[item.process] = stacks() if is_own else given(item) or ""
        self._num_asked += 1
        if not all(self._asked.values()) and self._num_asked <= _NUM_ASKED:
            return None
        self._reported, answers = who, self._asked
        self._asked, self._num_asked = {}, 0
        report = f"stuck: {paragraph(stuck, processes.name, own.first_collective)}\n"
        for process, text in answers.items():
            report += f"Stacks of {processes.name(process)}:\n{text or 'it gave none'}\n"
        return stuck, report


def say(report: str) -> bool:
    """Reports that a process is stuck; returns True if the job is to end for that."""
    dog = watchdog.entered()
    if dog is None:
        os.write(2, report.encode(errors="replace"))
        return False
    dog.say(report)
    return dog.may_end()
