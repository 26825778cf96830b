"""The lines of elastic.jsonl: each change of hands of a job."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.host.json_text import lines_of

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
        line = json.loads(text)
        return ChangeOfHands(
            generation=line["generation"], time=line["time"], kind=line["kind"],
            who=tuple(line["who"]), why=line["why"], members=tuple(line["members"]),
            num_devices=line.get("num_devices"), mesh=line.get("mesh") or {},
            from_step=line.get("from_step"), source=line.get("source"),
            lost_steps=line.get("lost_steps") or 0, reached=line["reached"],
            seconds={name: value for name, value in line["seconds"].items() if name != "total"},
        )
    except (ValueError, KeyError, TypeError, AttributeError):  # Cut short, or not ours.
        return None
