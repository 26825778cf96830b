"""The record of a job's changes of hands: `elastic.jsonl`, a line per generation."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.host.json_text import opened_to_append
from praxis_tools.elastic.members import Generation, Member

# Parts of the seconds from an event to the next step whose names are not the phase's.
_PARTS = {"import": "start", "step": "first_step"}


def record_line(generation: Generation, members: Mapping[int, Member]) -> dict[str, Any]:
    """Returns the line of a generation, once its first step was made, or it ended before.

    Its seconds add up to "total": from the event to the first step, or to the worker's end. Each
    is a difference of two times of one host.
    """
    worker = next(
        (members[k] for k in generation.members
         if k in members and members[k].generation == generation.number), None,
    )
    reports = worker.worker if worker else {}
    end = worker.first_step_time if worker else None
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
        "seconds": _seconds(generation, worker),
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
    seconds = {part: round(value, 3) for part, value in parts.items()}
    return {**seconds, "total": round(sum(seconds.values()), 3)}


def record(path: Path, line: Mapping[str, Any]) -> None:
    """Appends a line, in a single write."""
    with opened_to_append(path) as file:
        file.write(json.dumps(line) + "\n")
