"""The lines of elastic.jsonl, read without trust: each change of hands of a job."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import shown
from praxis_lite.files.json_text import lines_of, parse_json

_MOST_SECONDS = 1e11
_MOST_STEPS = 2**31
START = "start"  # The kind of the generation that a job begins with.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeOfHands:
    """A generation of an elastic job begins.

    Attributes:
      generation: its number.
      time: of what ended the one before, in Unix seconds.
      kind: what that was: "died", "stuck", "left", "came", "failed", or "start".
      who: the numbers of the processes that it happened to.
      why: in words.
      members: the numbers of the processes that go on.
      num_devices: of them all, or None if the generation ended before that was known.
      mesh: devices along each axis; empty, as above.
      from_step: the step that it goes on from, or None, as above.
      source: "new", "disk" or "peers"; None, as above.
      lost_steps: how many steps were made before and are made again.
      reached: True if it made a step.
      seconds: from `time` to its first step, by part.
    """

    generation: int
    time: float
    kind: str
    who: tuple[int, ...]
    why: str
    members: tuple[int, ...]
    num_devices: int | None
    mesh: Mapping[str, int]
    from_step: int | None
    source: str | None
    lost_steps: int
    reached: bool
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """The seconds from `time` to the first step, or to the generation's end."""
        return sum(self.seconds.values())


def changes_of_hands(path: Path) -> list[ChangeOfHands]:
    """Returns the lines of a file in the order of generations; lines that are none are left out.

    There are none if there is no file. Raises ConfigError if it cannot be read.
    """
    read = filter(None, map(_change, lines_of(path)))
    changes = {change.generation: change for change in read}
    return [changes[number] for number in sorted(changes)]


def _change(text: str) -> ChangeOfHands | None:
    try:
        line = parse_json(text)
        seconds = {
            shown(name): float(value) for name, value in line["seconds"].items()
            if name != "total" and _is_seconds(value)
        }
        return ChangeOfHands(
            generation=_step(line["generation"]), time=_time(line["time"]),
            kind=_word(line["kind"]), who=tuple(map(_step, line["who"])), why=_word(line["why"]),
            members=tuple(map(_step, line["members"])),
            num_devices=_or_none(_step, line.get("num_devices")),
            mesh={shown(axis): _step(size) for axis, size in (line.get("mesh") or {}).items()},
            from_step=_or_none(_step, line.get("from_step")),
            source=_or_none(_word, line.get("source")),
            lost_steps=_or_none(_step, line.get("lost_steps")) or 0,
            reached=bool(line["reached"]), seconds=seconds,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _or_none(read: Any, value: Any) -> Any:
    return None if value is None else read(value)


def _step(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_STEPS:
        raise ValueError(value)
    return value


def _time(value: Any) -> float:
    if not _is_seconds(value):
        raise ValueError(value)
    return float(value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return shown(value, 500)


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < _MOST_SECONDS and math.isfinite(value)
