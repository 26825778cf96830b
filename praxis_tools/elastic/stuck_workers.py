"""Detects stuck workers in a generation, for the leader of an elastic job."""

import time
from collections.abc import Mapping, Set

from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.processes.stacks import request_stacks
from praxis_lite.job.processes.watchdog import write_report
from praxis_tools.elastic.members import Generation, Member
from praxis_tools.elastic.worker_process import WorkerProcess
from praxis_tools.stuck.decision import Decision
from praxis_tools.stuck.on_host import describe_state
from praxis_tools.stuck.progress import Progress
from praxis_tools.stuck.stuck_report import details

_INTERVAL_SECONDS = 1.0


class StuckWorkers:
    """Decides which workers of a generation are stuck, from the progress of all workers.

    Attributes:
      generation: The generation.
      seconds: Seconds for which the stuck workers have been stuck.
    """

    def __init__(self, generation: Generation):
        self.generation = generation
        self._decision = Decision(len(generation.members))
        self._updated_at, self._stuck = 0.0, dict[int, str]()
        self.seconds = 0.0

    def update(self, members: Mapping[int, Member], alive: Set[int]) -> dict[int, str]:
        """Returns a dict that maps the numbers of stuck members to the reasons.

        If no worker makes progress and none is behind the others, all of them are considered stuck.
        """
        now = time.monotonic()
        if now - self._updated_at < _INTERVAL_SECONDS:
            return self._stuck
        self._updated_at = now
        numbers = self.generation.members
        # Processes are counted by index in the generation, not by the number of the member.
        training = {
            index: members[k]
            for index, k in enumerate(numbers)
            if k in alive
            and k in members
            and members[k].end is None
            and members[k].progress
            and members[k].generation == self.generation.number
        }
        stuck = self._decision.add(
            now, [Progress(**{**x.progress, "process": index}) for index, x in training.items()]
        )
        self.seconds = stuck.seconds if stuck else 0.0
        if stuck is None:
            self._stuck = {}
        elif not stuck.processes:
            self._stuck = dict.fromkeys(numbers, f"is stuck like all others: {stuck.why}")
        else:
            why = details(
                stuck,
                lambda index: str(members[numbers[index]]),
                lambda k: _collective(training, k),
            )
            stuck_numbers = [numbers[progress.process] for progress in stuck.processes]
            self._stuck = dict.fromkeys(stuck_numbers, f"is stuck: {stuck.why}; {why}")
        return self._stuck


def _collective(members: Mapping[int, Member], process: int) -> str:
    """Returns the first collective of a step in which `process` takes part, or "" if it is unknown.

    Workers that wait for other processes report these collectives.
    """
    for member in members.values():
        collectives = member.worker.get("first_collectives", [])
        if process < len(collectives) and collectives[process]:
            return collectives[process]
    return ""


def report_stuck(worker: WorkerProcess, why: str, stacks_txt: AnyPath) -> None:
    """Writes the stacks of a stuck worker to standard error and to a file."""
    path = worker.reports.get("stacks_file", "")
    stacks = request_stacks(worker.pid, path) if path else ""
    # If the job's first process has died, this worker has exited as well, and only the stacks that
    # it reported earlier are available.
    stacks = stacks or worker.reports.get("stacks", "")
    location = (
        f"All threads:\n{stacks.rstrip()}"
        if stacks
        else f"Its stacks are not available: {describe_state(worker.pid) or 'it has ended'}."
    )
    write_report(f"stuck: {why}. The worker is killed and replaced. {location}\n", stacks_txt)
