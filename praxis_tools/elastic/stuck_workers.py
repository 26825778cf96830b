"""The stuck workers of a generation, as the leader finds them over time."""

import time
from collections.abc import Mapping, Set
from pathlib import Path

from praxis_lite.job.processes.stacks import request_stacks
from praxis_lite.job.processes.watchdog import write_report
from praxis_tools.elastic.members import Generation, Member
from praxis_tools.elastic.worker_process import WorkerProcess
from praxis_tools.stuck import Decision, Progress
from praxis_tools.stuck.on_host import state_in_words
from praxis_tools.stuck.stuck_report import details

_EVERY_SECONDS = 1.0


class StuckWorkers:
    """Decides which workers of a generation are stuck, from what all members tell of theirs.

    Attributes:
      generation: see above.
      seconds: for how long they have been stuck.
    """

    def __init__(self, generation: Generation):
        self.generation = generation
        self._decision = Decision(len(generation.members))
        self._looked_at, self._stuck = 0.0, dict[int, str]()
        self.seconds = 0.0

    def look(self, members: Mapping[int, Member], alive: Set[int]) -> dict[int, str]:
        """Returns the stuck members by number, each with the reason as text.

        If no worker is behind the others and yet none makes progress, all of them are stuck.
        """
        now = time.monotonic()
        if now - self._looked_at < _EVERY_SECONDS:
            return self._stuck
        self._looked_at = now
        order = self.generation.members
        there = {
            index: members[k] for index, k in enumerate(order)
            if k in alive and k in members and members[k].end is None and members[k].progress
            and members[k].generation == self.generation.number
        }
        stuck = self._decision.add(
            now, [Progress(**{**x.progress, "process": index}) for index, x in there.items()]
        )
        self.seconds = stuck.seconds if stuck else 0.0
        if stuck is None:
            self._stuck = {}
        elif not stuck.processes:
            self._stuck = dict.fromkeys(order, f"is stuck like all others: {stuck.why}")
        else:
            why = details(
                stuck, lambda index: str(members[order[index]]), lambda k: _collective(there, k)
            )
            names = [order[item.process] for item in stuck.processes]
            self._stuck = dict.fromkeys(names, f"is stuck: {stuck.why}; {why}")
        return self._stuck


def _collective(members: Mapping[int, Member], process: int) -> str:
    """Returns the first collective of a step that needs a process, as reported by a waiting worker.

    "" if none has reported it.
    """
    for member in members.values():
        told = member.worker.get("first_collectives", [])
        if process < len(told) and told[process]:
            return told[process]
    return ""


def report_stuck(worker: WorkerProcess, why: str, stacks_txt: Path) -> None:
    """Reports on standard error, and in a file, where a worker is stuck that is to be ended."""
    path = worker.reports.get("stacks_file", "")
    stacks = request_stacks(worker.pid, path) if path else ""
    # The job's first process may be gone by now, and with it all that were connected to it.
    stacks = stacks or worker.reports.get("stacks", "")
    where = (
        f"All threads:\n{stacks.rstrip()}" if stacks
        else f"It gives no stacks: {state_in_words(worker.pid) or 'it has ended'}."
    )
    write_report(f"stuck: {why}. It is ended and replaced. {where}\n", stacks_txt)
