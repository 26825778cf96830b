"""The lines of timeline.jsonl: stretches of launches, written here and read without trust."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.files.json_text import opened, parse_json
from praxis_lite.run.events import KINDS

# How a launch ends that made all its steps, or those until an early stop.
THE_END = "the end"
_MOST_BYTES = 64 * 2**20  # A stretch takes 0.3 kB: a save a minute for half a year.
_MOST_SECONDS = 1e11  # More than three thousand years.
_MOST_STEPS = 2**31


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The part of a launch from its start, or from a save or a roll-back, to the next.

    Attributes:
      launch: when the launch began, in Unix seconds; all its stretches have the same.
      first_step: the step whose state it goes on from: saved, restored, or 0. None: not known yet.
      last_step: the newest step whose metrics were read in it; of none, `first_step`.
      seconds: by kind, of this stretch alone.
      ended_by: if the launch ended in it, and could say so: THE_END, a signal, the name of an
        exception.
      lost_to: the newest step whose line in metrics.jsonl was moved away when this stretch began,
        for it goes on from an earlier step; None: there was none. A launch that was killed made
        steps up to there, also after its last sign of life.
    """

    launch: float
    first_step: int | None
    last_step: int | None
    seconds: Mapping[str, float]
    ended_by: str | None = None
    lost_to: int | None = None

    def line(self) -> str:
        """Returns the stretch as a line of the file."""
        seconds = {kind: round(value, 4) for kind, value in self.seconds.items() if value > 0}
        fields = dataclasses.asdict(self) | {"launch": round(self.launch, 4), "seconds": seconds}
        return json.dumps(fields) + "\n"


def read_stretches(path: Path) -> list[Stretch]:
    """Returns the stretches of a file in their order; lines that are none are left out.

    Raises ConfigError if the file cannot be read.
    """
    advice = "A job that trains writes it; take away what lies in its place."
    try:
        with opened(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise ConfigError(f"{path} has more than {_MOST_BYTES} bytes. {advice}")
            lines = file.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}). {advice}") from None
    stretches = (_stretch(line) for line in lines)
    return [stretch for stretch in stretches if stretch is not None]


def _stretch(line: str) -> Stretch | None:
    """Returns the stretch of a line, or None if the line is cut short or makes no sense."""
    try:
        fields = parse_json(line)
        names = [field.name for field in dataclasses.fields(Stretch)]
        launch, first_step, last_step, seconds, ended_by, lost_to = map(fields.get, names)
        is_sound = (
            _is_seconds(launch)
            and (first_step is None) == (last_step is None)
            and (first_step is None or _are_steps(first_step, last_step))
            and (lost_to is None or (first_step is not None and _are_steps(first_step, lost_to)))
            and all(kind in KINDS and _is_seconds(value) for kind, value in seconds.items())
            and (ended_by is None or isinstance(ended_by, str))
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if not is_sound:
        return None
    by_kind = {kind: float(seconds.get(kind, 0)) for kind in KINDS}
    words = None if ended_by is None else shown(ended_by)
    return Stretch(float(launch), first_step, last_step, by_kind, words, lost_to)


def _are_steps(first: Any, last: Any) -> bool:
    return type(first) is int and type(last) is int and 0 <= first <= last < _MOST_STEPS


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < _MOST_SECONDS and math.isfinite(value)
