"""Sends heartbeats with the progress of each process, to detect stuck processes."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from praxis_lite.job import processes
from praxis_lite.job.events import events
from praxis_lite.job.processes import watchdog
from praxis_lite.job.processes.beats import Beats, value_of
from praxis_lite.job.processes.stacks import stacks
from praxis_tools.stuck.decision import Decision, Stuck
from praxis_tools.stuck.on_host import describe_state, own_progress
from praxis_tools.stuck.progress import Progress, progress_recorder
from praxis_tools.stuck.stuck_report import details, paragraph

_MAX_BEATS_FOR_STACKS = 4  # Number of heartbeats to wait for the stacks of a stuck process.
_STACKS_KEY = "praxis_lite/stacks"


class StuckBeats(Beats):
    """Heartbeats that contain the progress of each process.

    The first process requests the stacks of stuck processes by listing these processes in its
    heartbeat, in the field "asks".
    """

    def __init__(self, seconds: float):
        super().__init__(seconds)
        events.add_listener(progress_recorder)
        self._decision = Decision(processes.count())
        # Maps stuck processes to their stacks, or to "" before the stacks have arrived.
        self._asked: dict[int, str] = {}
        self._num_asked = 0
        # (process, synchronization point) of each process in the last report.
        self._reported: tuple[tuple[int, int], ...] = ()

    def extra_fields(self) -> dict[str, Any]:
        progress = own_progress(processes.index())
        return {"progress": dataclasses.asdict(progress), "asks": list(self._asked)}

    def check(self, service: Any) -> int | None:
        process = processes.index()
        # The first process has asked this process for its stacks.
        if 0 in self._last and process in self._last[0]["asks"]:
            key = _stacks_key(progress_recorder.progress_of(process))
            service.key_value_set(key, stacks(), allow_overwrite=True)
        if not processes.is_first():
            return None
        found = self._find_stuck(lambda progress: value_of(service, _stacks_key(progress)))
        if found is None:
            return None
        stuck, report = found
        ends_job = report_stuck(report)
        return stuck.processes[0].process if ends_job and stuck.processes else None

    def why_silent(self, process: int, seconds: float) -> str:
        """Describes why a process may be silent, its last progress, and where others wait."""
        why, last = super().why_silent(process, seconds), self._last.get(process)
        if last is None:
            return why
        if processes.host(process) == processes.host(processes.index()):
            why = describe_state(last["pid"]) or why
        progress = Progress(**last["progress"])
        silent = dataclasses.replace(progress, unheard_seconds=seconds)
        local = progress_recorder.progress_of(processes.index())
        stuck = Stuck((silent,), seconds, (local,), why)
        return f"{why}; {details(stuck, processes.name, progress_recorder.first_collective)}"

    def _find_stuck(
        self, read_stacks: Callable[[Progress], str | None]
    ) -> tuple[Stuck, str] | None:
        """Returns the stuck processes and a report with their stacks.

        The same stuck processes are only returned once. If no process is stuck, or stacks have not
        arrived yet, the result is None.

        Only the first process of the job calls this method.

        Args:
          read_stacks: Function that returns the stacks that a process sent on request, or None if
            the process has not sent them yet.
        """
        remote = [
            Progress(**beat["progress"] | {"unheard_seconds": self.silent_seconds(k)})
            for k, beat in self._last.items()
        ]
        local = own_progress(processes.index())
        stuck = self._decision.add(time.monotonic(), [local, *remote])
        if stuck is None:
            self._asked, self._num_asked = {}, 0
            return None
        reported = stuck.processes or stuck.waiting
        identity = tuple((progress.process, progress.arrived) for progress in reported)
        if identity == self._reported:
            return None
        # The next heartbeat asks the stuck processes for their stacks, which arrive later.
        for progress in stuck.processes:
            if not self._asked.get(progress.process):
                is_own = progress.process == processes.index()
                self._asked[progress.process] = stacks() if is_own else read_stacks(progress) or ""
        self._num_asked += 1
        # Wait a few heartbeats for the stacks.
        if not all(self._asked.values()) and self._num_asked <= _MAX_BEATS_FOR_STACKS:
            return None
        self._reported, received = identity, self._asked
        self._asked, self._num_asked = {}, 0
        report = paragraph(stuck, processes.name, progress_recorder.first_collective)
        report = f"stuck: {report}\n"
        for process, text in received.items():
            report += f"Stacks of {processes.name(process)}:\n{text or 'not available'}\n"
        return stuck, report


def _stacks_key(progress: Progress) -> str:
    """Returns the key for the stacks of a process at its current synchronization point."""
    return f"{_STACKS_KEY}/{progress.process}/{progress.arrived}"


def report_stuck(report: str) -> bool:
    """Reports that a process is stuck; returns whether the job should end."""
    dog = watchdog.entered()
    if dog is None:
        watchdog.write_report(report, None)
        return False
    dog.write(report)
    return dog.may_end()
