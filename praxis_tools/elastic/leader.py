"""The leader of an elastic job: observes the members, and starts and records generations."""

import dataclasses
import logging
import time
from collections.abc import Mapping

from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.addresses import format_address
from praxis_tools.elastic.decisions import (
    Decision,
    EndJob,
    StartGeneration,
    StopWorkers,
    View,
    Wait,
    decide,
    has_stepped,
)
from praxis_tools.elastic.generation_log import (
    GenerationRecord,
    append_record,
    generation_record,
    last_completed_step,
    read_generation_records,
)
from praxis_tools.elastic.liveness import Liveness
from praxis_tools.elastic.members import Generation, Member, Rendezvous
from praxis_tools.elastic.stuck_workers import StuckWorkers

_REPEAT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an elastic job, from the command line.

    Attributes:
      argv: Command line of each worker.
      job: Job directory.
      member: Number of this host, from `--process_id` or a launcher.
      num_members: Number of hosts, from `--num_processes` or a launcher.
      min_members: Minimum number of hosts to train with, from `--min_processes`.
      start_seconds: Seconds for which the first generation waits for all members.
      address: Address at which other hosts reach this host.
    """

    argv: tuple[str, ...]
    job: JobDir
    member: int
    num_members: int
    min_members: int
    start_seconds: float
    address: str


class StatusPrinter:
    """Logs status lines, repeating the same line at most once a minute."""

    def __init__(self) -> None:
        self._last: tuple[str, float] = ("", 0.0)

    def __call__(self, line: str) -> None:
        last_line, printed_at = self._last
        if line != last_line or time.monotonic() - printed_at > _REPEAT_SECONDS:
            self._last = line, time.monotonic()
            _log.info("elastic: %s", line)


class Leader:
    """Leads an elastic job while this host is the live member with the lowest number.

    Args:
      settings: Settings of the job.
      rendezvous: Files through which the supervisors coordinate.
      liveness: Liveness of all members, as observed by this host.
      print_status: Function that prints a line.
    """

    def __init__(
        self,
        settings: Settings,
        rendezvous: Rendezvous,
        liveness: Liveness,
        print_status: StatusPrinter,
    ):
        self._settings, self._rendezvous = settings, rendezvous
        self._liveness, self._print_status = liveness, print_status
        # In an object store, use the object itself instead of its local copy, because the leader
        # changes. Requests fail after a short time, as for `elastic`.
        self._elastic_jsonl = settings.job.elastic.parent / settings.job.elastic_jsonl.name
        self._recorded = self._recorded_generations()
        self._idle_since = time.monotonic()
        self._stuck: StuckWorkers | None = None

    def lead(
        self,
        members: Mapping[int, Member],
        generation: Generation | None,
        participants: frozenset[int],
    ) -> None:
        """Decides on the next action and executes it.

        Args:
          members: Maps the number of each member that has a file to the member.
          generation: The newest generation, or None if there is none yet.
          participants: Members of the generation whose supervisors have not restarted since the
            generation began.
        """
        alive = self._liveness.alive(participants)
        if participants & alive:
            self._idle_since = time.monotonic()
        if generation is not None and generation.number not in self._recorded:
            record = generation_record(generation, members)
            if record.reached:
                self._record(record)
        decision = decide(view := self._view(members, generation, alive))
        if isinstance(decision, StartGeneration):
            # Several members often die at the same time, so check the remaining members first.
            self._liveness.probe({k: members[k] for k in decision.members})
            alive = self._liveness.alive(participants)
            decision = decide(view := self._view(members, generation, alive))
        self._execute(decision, view)

    def _view(
        self, members: Mapping[int, Member], generation: Generation | None, alive: set[int]
    ) -> View:
        stuck, stuck_seconds = dict[int, str](), 0.0
        if generation is not None:
            if self._stuck is None or self._stuck.generation is not generation:
                self._stuck = StuckWorkers(generation)
            stuck, stuck_seconds = self._stuck.update(members, alive), self._stuck.seconds
        return View(
            members=members,
            alive=alive,
            generation=generation,
            is_asked_to_stop=(
                generation is not None
                and self._rendezvous.stop_reason(generation.number) is not None
            ),
            num_members=self._settings.num_members,
            min_members=self._settings.min_members,
            waited=time.monotonic() - self._idle_since,
            start_seconds=self._settings.start_seconds,
            stuck=stuck,
            stuck_seconds=stuck_seconds,
            seen=self._liveness.times(),
            now=time.monotonic(),
            ended=self._liveness.end_times(),
        )

    def _execute(self, decision: Decision, view: View) -> None:
        last = view.generation
        match decision:
            case Wait(why):
                if why:
                    self._print_status(why)
            case StopWorkers(why):
                assert last is not None  # StopWorkers requires a running generation.
                if self._rendezvous.request_stop(last.number, why):
                    self._print_status(f"{why}: the current step will be completed and saved")
            case EndJob(status, why):
                if last is not None and last.number not in self._recorded:
                    self._record(generation_record(last, view.members))
                self._rendezvous.end_job(last.number if last else 0, status, why)
            case StartGeneration():
                self._start_generation(decision, view)

    def _start_generation(self, start: StartGeneration, view: View) -> None:
        noticed, last = time.time(), view.generation
        # Convert the time of the event to Unix time.
        event = noticed - max(0.0, time.monotonic() - start.event)
        if last is not None and last.number not in self._recorded:
            self._record(generation_record(last, view.members))
        first = view.members[start.members[0]]
        generation = Generation(
            number=(last.number if last else 0) + 1,
            kind=start.kind,
            who=start.who,
            why=start.why,
            members=start.members,
            incarnations=tuple(view.members[k].incarnation for k in start.members),
            coordinator=format_address(first.address, first.port),
            event=event,
            noticed=noticed,
            agreed=time.time(),
            last_step=last_completed_step(last, view.members),
            num_fruitless=(
                0 if last is None or has_stepped(view, last) else last.num_fruitless + 1
            ),
        )
        # If another member also leads, it may have created this generation already.
        if self._rendezvous.create_generation(generation):
            names = ", ".join(map(str, start.members))
            self._print_status(
                f"{start.why}: generation {generation.number} begins with {len(start.members)} of "
                f"{self._settings.num_members} processes ({names})"
            )

    def _recorded_generations(self) -> set[int]:
        """Returns the numbers of the generations in elastic.jsonl."""
        return {record.generation for record in read_generation_records(self._elastic_jsonl)}

    def _record(self, record: GenerationRecord) -> None:
        recorded = self._recorded_generations()
        if record.generation not in recorded:  # Another leader may have recorded it.
            try:
                append_record(self._elastic_jsonl, record)
            except OSError as error:
                self._print_status(
                    f"{self._elastic_jsonl} cannot be written: {error.strerror or error}"
                )
        self._recorded = recorded | {record.generation}


_log = logging.getLogger(__name__)
