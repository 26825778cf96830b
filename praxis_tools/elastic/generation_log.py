"""The log of an elastic job's generations (`elastic.jsonl`), with one line per generation."""

import dataclasses
import itertools
import json
from collections.abc import Mapping

from praxis_lite.host.file_reading import append_text, lines_of
from praxis_lite.host.object_stores import AnyPath
from praxis_tools.elastic.members import Generation, Member

START = "start"  # The kind of a job's first generation.
# Maps the name of a phase to its key in `GenerationRecord.seconds`, where the two differ.
_PARTS = {"import": "start", "step": "first_step"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRecord:
    """A line of elastic.jsonl, which describes the start of a generation.

    An attribute is None if the generation ended before its value was known.

    Attributes:
      generation: Number of the generation.
      time: Time of the event that ended the previous generation, in Unix seconds.
      kind: Kind of this event: "died", "stuck", "left", "came", "failed", or "start".
      who: Numbers of the processes that caused the event.
      why: Description of the event.
      members: Numbers of the processes in the generation.
      hosts: Names of the processes' hosts.
      num_devices: Total number of devices across all processes.
      mesh: Number of devices along each mesh axis.
      from_step: Step of the state that training resumes from.
      source: Source of this state: "new", "disk" or "peers".
      lost_steps: Number of completed steps after `from_step` that have to be repeated.
      reached: Whether the generation completed a step.
      programs: Number of executables that the first process needed up to the first step.
      compiled: Number of these executables that were not in the compilation cache.
      seconds: Seconds in each phase, from `time` to the first step or the end of the generation.
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
        """Seconds from `time` to the first step or to the end of the generation."""
        return sum(self.seconds.values())

    def line(self) -> str:
        """Returns the record as a line of JSON."""
        seconds = {**self.seconds, "total": round(self.total, 3)}
        return json.dumps({**dataclasses.asdict(self), "seconds": seconds}) + "\n"


def generation_record(generation: Generation, members: Mapping[int, Member]) -> GenerationRecord:
    """Creates a generation's record, after the first step or the end of the generation.

    Durations are computed from times by the clock of a single host.
    """
    worker = next(
        (
            members[k]
            for k in generation.members
            if k in members and members[k].generation == generation.number
        ),
        None,
    )
    reports = worker.worker if worker else {}
    from_step = reports.get("from_step")
    return GenerationRecord(
        generation=generation.number,
        time=generation.event,
        kind=generation.kind,
        who=generation.who,
        why=generation.why,
        members=generation.members,
        hosts=tuple(members[k].host if k in members else "" for k in generation.members),
        num_devices=reports.get("num_devices"),
        mesh=reports.get("mesh"),
        from_step=from_step,
        source=reports.get("source"),
        lost_steps=None if from_step is None else max(0, generation.last_step - from_step),
        reached=worker is not None and worker.first_step_time is not None,
        programs=reports.get("programs"),
        compiled=reports.get("compiled"),
        seconds=_seconds(generation, worker),
    )


def _seconds(generation: Generation, worker: Member | None) -> dict[str, float]:
    parts = {
        "notice": max(0.0, generation.noticed - generation.event),
        "agree": max(0.0, generation.agreed - generation.noticed),
    }
    if worker is not None and worker.phases:
        last_began = worker.phases[-1][1]
        end = worker.first_step_time or (worker.end.time if worker.end else last_began)
        # Each phase lasts until the next one begins.
        for (phase, since), (_, until) in itertools.pairwise([*worker.phases, ("", end)]):
            name = _PARTS.get(phase, phase)
            parts[name] = parts.get(name, 0.0) + max(0.0, until - since)
    return {part: round(value, 3) for part, value in parts.items()}


def last_completed_step(generation: Generation | None, members: Mapping[int, Member]) -> int:
    """Returns the last known step of a generation, or 0 if it is unknown.

    If the generation completed no step, the last step before the generation is returned. Otherwise,
    the steps that the generation had to repeat but did not reach would not be counted as lost.
    """
    if generation is None:
        return max((member.worker.get("made", 0) for member in members.values()), default=0)
    steps = [
        members[k].worker.get("made", 0)
        for k in generation.members
        if k in members and members[k].generation == generation.number
    ]
    return max(steps, default=0) or generation.last_step


def append_record(path: AnyPath, record: GenerationRecord) -> None:
    """Appends a record to a file in a single write."""
    append_text(path, record.line())


def read_generation_records(path: AnyPath) -> list[GenerationRecord]:
    """Reads the records in a file, skipping damaged lines, and sorts them by generation.

    Returns an empty list if the file does not exist, and raises ConfigError if it cannot be read.
    """
    records = {record.generation: record for record in filter(None, map(_parse, lines_of(path)))}
    return [records[number] for number in sorted(records)]


def _parse(text: str) -> GenerationRecord | None:
    try:
        line = json.loads(text)
        line["seconds"].pop("total", None)
        lists = {name: tuple(line.get(name, ())) for name in ("who", "members", "hosts")}
        return GenerationRecord(**line | lists)
    except (ValueError, KeyError, TypeError, AttributeError):  # A host was killed while writing.
        return None
