"""The leader of an elastic job: sees all members, decides, and records the changes of hands."""

import dataclasses
import time
from collections.abc import Mapping

from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.addresses import joined
from praxis_tools.elastic.decisions import (
    Begin,
    Decision,
    End,
    Stop,
    View,
    Wait,
    decide,
    has_stepped,
)
from praxis_tools.elastic.generation_log import (
    ChangeOfHands,
    change_of_hands,
    changes_of_hands,
    last_step_made,
    record,
)
from praxis_tools.elastic.liveness import Sight
from praxis_tools.elastic.members import Generation, Meeting, Member
from praxis_tools.elastic.stuck_workers import StuckWorkers

_SAY_AGAIN_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an elastic job, from the command line.

    Attributes:
      argv: the command line that each worker gets.
      job: the job's directory.
      member, num_members: `--process_id` and `--num_processes`, or what a launcher says.
      min_members: `--min_processes`.
      start_seconds: how long the first generation waits for all members.
      address: by which other hosts reach this host.
    """

    argv: tuple[str, ...]
    job: JobDir
    member: int
    num_members: int
    min_members: int
    start_seconds: float
    address: str


class Says:
    """Prints lines, the same at most once a minute."""

    def __init__(self) -> None:
        self._last: tuple[str, float] = ("", 0.0)

    def __call__(self, words: str) -> None:
        before, at = self._last
        if words != before or time.monotonic() - at > _SAY_AGAIN_SECONDS:
            self._last = words, time.monotonic()
            print(f"elastic: {words}", flush=True)


class Leader:
    """The work of a member while no living member has a lower number.

    Args:
      sight: of this host.
    """

    def __init__(self, settings: Settings, meeting: Meeting, sight: Sight, say: Says):
        self._settings, self._meeting, self._sight, self._say = settings, meeting, sight, say
        self._elastic_jsonl = settings.job.elastic_jsonl
        self._recorded = self._on_record()
        self._idle_since = time.monotonic()
        self._stuck: StuckWorkers | None = None

    def lead(
        self, members: Mapping[int, Member], generation: Generation | None,
        taking_part: frozenset[int],
    ) -> None:
        """Decides what comes next, and does it.

        Args:
          members: that have a file, by number.
          generation: the newest, or None.
          taking_part: its members that are still those that it began with.
        """
        alive = self._sight.alive(taking_part)
        if taking_part & alive:
            self._idle_since = time.monotonic()
        if generation is not None and generation.number not in self._recorded:
            change = change_of_hands(generation, members)
            if change.reached:
                self._record(change)
        decision = decide(view := self._view(members, generation, alive))
        if isinstance(decision, Begin):
            # Others may have died with those that are known to be dead.
            self._sight.ask({k: members[k] for k in decision.members})
            alive = self._sight.alive(taking_part)
            decision = decide(view := self._view(members, generation, alive))
        self._do(decision, view)

    def _view(
        self, members: Mapping[int, Member], generation: Generation | None, alive: set[int]
    ) -> View:
        stuck, stuck_seconds = dict[int, str](), 0.0
        if generation is not None:
            if self._stuck is None or self._stuck.generation is not generation:
                self._stuck = StuckWorkers(generation)
            stuck, stuck_seconds = self._stuck.look(members, alive), self._stuck.seconds
        return View(
            members=members, alive=alive, generation=generation,
            is_asked_to_stop=(
                generation is not None and self._meeting.stop_of(generation.number) is not None
            ),
            num_members=self._settings.num_members, min_members=self._settings.min_members,
            waited=time.monotonic() - self._idle_since,
            start_seconds=self._settings.start_seconds, stuck=stuck,
            stuck_seconds=stuck_seconds, seen=self._sight.times(), now=time.monotonic(),
            ended=self._sight.end_times(),
        )

    def _do(self, decision: Decision, view: View) -> None:
        last = view.generation
        match decision:
            case Wait(why):
                if why:
                    self._say(why)
            case Stop(why):
                if self._meeting.ask_to_stop(last.number, why):
                    self._say(f"{why}: the running step is made and saved")
            case End(status, why):
                if last is not None and last.number not in self._recorded:
                    self._record(change_of_hands(last, view.members))
                self._meeting.end(last.number if last else 0, status, why)
            case Begin():
                self._begin(decision, view)

    def _begin(self, begin: Begin, view: View) -> None:
        noticed, last = time.time(), view.generation
        event = noticed - max(0.0, time.monotonic() - begin.event)
        if last is not None and last.number not in self._recorded:
            self._record(change_of_hands(last, view.members))
        first = view.members[begin.members[0]]
        generation = Generation(
            number=(last.number if last else 0) + 1, kind=begin.kind, who=begin.who, why=begin.why,
            members=begin.members,
            incarnations=tuple(view.members[k].incarnation for k in begin.members),
            coordinator=joined(first.address, first.port), event=event, noticed=noticed,
            agreed=time.time(), last_step=last_step_made(last, view.members),
            num_fruitless=(
                0 if last is None or has_stepped(view, last) else last.num_fruitless + 1
            ),
        )
        if self._meeting.begin(generation):
            names = ", ".join(map(str, begin.members))
            self._say(
                f"{begin.why}: generation {generation.number} begins with {len(begin.members)} of "
                f"{self._settings.num_members} processes ({names})"
            )

    def _on_record(self) -> set[int]:
        """Returns the numbers of the generations that have a line."""
        return {change.generation for change in changes_of_hands(self._elastic_jsonl)}

    def _record(self, change: ChangeOfHands) -> None:
        on_record = self._on_record()
        self._recorded = on_record | {change.generation}
        if change.generation in on_record:
            return  # Another leader was faster.
        try:
            record(self._elastic_jsonl, change)
        except OSError as error:
            self._say(f"{self._elastic_jsonl} cannot be written: {error.strerror or error}")
