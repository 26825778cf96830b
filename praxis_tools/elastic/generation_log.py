"""The record of a job's changes of hands: `elastic.jsonl`, a line per generation."""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.host.file_reading import lines_of, opened_to_append
from praxis_tools.elastic.members import Generation, Member

START = "start"  # The kind of the generation that a job begins with.
# Parts of the seconds from an event to the next step whose names are not the phase's.
_PARTS = {"import": "start", "step": "first_step"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeOfHands:
    """A generation of an elastic job begins.

    An attribute is None if the generation ended before its value was known.

    Attributes:
      generation: its number.
      time: of the event that ended the generation before, in Unix seconds.
      kind: of that event: "died", "stuck", "left", "came", "failed", or "start".
      who: the numbers of the processes that it happened to.
      why: as text.
      members: the numbers of the processes that continue.
      hosts: their names.
      num_devices: of all of them.
      mesh: devices along each axis.
      from_step: the step of the state that they continue from.
      source: of that state: "new", "disk" or "peers".
      lost_steps: how many steps were made before and are repeated.
      reached: True if it made a step.
      programs, compiled: how many programs its first process needed until then, and how many of
        them were not in the cache.
      seconds: from `time` to its first step, or to its end, by part.
    """

    generation: int
    time: float
    kind: str
    who: tuple[int, ...]
    why: str
    members: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    num_devices: int | None = None
    mesh: Mapping[str, int] | None = None
    from_step: int | None = None
    source: str | None = None
    lost_steps: int | None = None
    reached: bool
    programs: int | None = None
    compiled: int | None = None
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """The seconds from `time` to the first step, or to the generation's end."""
        return sum(self.seconds.values())

    def line(self) -> str:
        """Returns the change as a line of the file."""
        seconds = {**self.seconds, "total": round(self.total, 3)}
        return json.dumps({**dataclasses.asdict(self), "seconds": seconds}) + "\n"


def change_of_hands(generation: Generation, members: Mapping[int, Member]) -> ChangeOfHands:
    """Returns the change to a generation, once its first step was made, or it ended before.

    Each of its seconds is a difference of two times of one host.
    """
    worker = next(
        (members[k] for k in generation.members
         if k in members and members[k].generation == generation.number), None,
    )
    reports = worker.worker if worker else {}
    from_step = reports.get("from_step")
    return ChangeOfHands(
        generation=generation.number, time=generation.event, kind=generation.kind,
        who=generation.who, why=generation.why, members=generation.members,
        hosts=tuple(members[k].host if k in members else "" for k in generation.members),
        num_devices=reports.get("num_devices"), mesh=reports.get("mesh"), from_step=from_step,
        source=reports.get("source"),
        lost_steps=None if from_step is None else max(0, generation.last_step - from_step),
        reached=worker is not None and worker.first_step_time is not None,
        programs=reports.get("programs"), compiled=reports.get("compiled"),
        seconds=_seconds(generation, worker),
    )


def _seconds(generation: Generation, worker: Member | None) -> dict[str, float]:
    parts = {
        "notice": max(0.0, generation.noticed - generation.event),
        "agree": max(0.0, generation.agreed - generation.noticed),
    }
    phases = list(worker.phases) if worker else []
    if phases:
        last = worker.first_step_time or (worker.end.time if worker.end else phases[-1][1])
        for (phase, since), (_, until) in itertools.pairwise([*phases, ("", last)]):
            name = _PARTS.get(phase, phase)
            parts[name] = parts.get(name, 0.0) + max(0.0, until - since)
    return {part: round(value, 3) for part, value in parts.items()}


def last_step_made(generation: Generation | None, members: Mapping[int, Member]) -> int:
    """Returns the last step that a generation made, as far as is known; 0: none is known.

    If it made none, it is the last step before it. Steps that it lost, and did not make again, are
    not lost once more.
    """
    if generation is None:
        return max((member.worker.get("made", 0) for member in members.values()), default=0)
    made = [
        members[k].worker.get("made", 0) for k in generation.members
        if k in members and members[k].generation == generation.number
    ]
    return max(made, default=0) or generation.last_step


def record(path: Path, change: ChangeOfHands) -> None:
    """Appends a line, in a single write."""
    with opened_to_append(path) as file:
        file.write(change.line())


def changes_of_hands(path: Path) -> list[ChangeOfHands]:
    """Returns the changes of a file in the order of generations, without damaged lines.

    There are none if there is no file. Raises ConfigError if it cannot be read.
    """
    read = filter(None, map(_change, lines_of(path)))
    changes = {change.generation: change for change in read}
    return [changes[number] for number in sorted(changes)]


def _change(text: str) -> ChangeOfHands | None:
    try:
        line = json.loads(text)
        line["seconds"].pop("total", None)
        lists = {name: tuple(line.get(name, ())) for name in ("who", "members", "hosts")}
        return ChangeOfHands(**line | lists)
    except (ValueError, KeyError, TypeError, AttributeError):  # Cut short by a kill.
        return None
