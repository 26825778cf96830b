"""The record of a job's changes of hands: `elastic.jsonl`, a line per generation."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.files.json_text import opened_to_append
from praxis_lite.run.job.elastic.members import Generation, Member

# Parts of the seconds from an event to the next step whose names are not the phase's.
_PARTS = {"import": "start", "step": "first_step"}


def record_line(generation: Generation, members: Mapping[int, Member]) -> dict[str, Any]:
    """Returns the line of a generation, once its first step was made, or it ended before.

    Its seconds add up to "total": from the event to the first step, or to now.
    """
    worker = next(
        (members[k] for k in generation.members
         if k in members and members[k].generation == generation.number), None,
    )
    reports = worker.worker if worker else {}
    end = worker.first_step_time if worker and worker.first_step_time else None
    from_step = reports.get("from_step")
    lost = None if from_step is None else max(0, generation.last_step - from_step)
    return {
        "generation": generation.number, "time": generation.event, "kind": generation.kind,
        "who": list(generation.who), "why": generation.why, "members": list(generation.members),
        "hosts": [members[k].host if k in members else "" for k in generation.members],
        "num_devices": reports.get("num_devices"), "mesh": reports.get("mesh"),
        "from_step": from_step, "source": reports.get("source"), "lost_steps": lost,
        "reached": end is not None, "programs": reports.get("programs"),
        "compiled": reports.get("compiled"),
        "seconds": _seconds(generation, worker.phases if worker else (), end or time.time()),
    }


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


def _seconds(
    generation: Generation, phases: Iterable[tuple[str, float]], end: float
) -> dict[str, float]:
    parts = {
        "notice": max(0.0, generation.noticed - generation.event),
        "agree": max(0.0, generation.agreed - generation.noticed),
    }
    name, since = "agree", generation.agreed
    for phase, at in [*phases, ("", end)]:
        at = min(max(at, since), end)
        parts[name] = parts.get(name, 0.0) + at - since
        name, since = _PARTS.get(phase, phase), at
    seconds = {part: round(value, 3) for part, value in parts.items()}
    return {**seconds, "total": round(sum(seconds.values()), 3)}


def record(path: Path, line: Mapping[str, Any]) -> None:
    """Appends a line, in a single write."""
    with opened_to_append(path) as file:
        file.write(json.dumps(line) + "\n")
