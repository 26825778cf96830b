"""The certificates that a job made in flight, from certificates.jsonl, read without trust."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import is_number, shown
from praxis_lite.files.json_text import lines_of, parse_json
from praxis_lite.run.trainer.metrics.json_lines import is_step

_MOST_LETTERS = 500


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A step that was made again, and compared.

    Attributes:
      num_comparisons: how many numbers were compared.
      closest: the array that was nearest to its tolerance, and its share of that; None: unknown.
      seconds: that it took.
      state_digest: of the state after the step; "" if there is none.
      difference: in words; "": there was none.
    """

    step: int
    num_comparisons: int
    closest: tuple[str, float] | None
    seconds: float
    state_digest: str
    difference: str


def certificates_of(path: Path) -> list[Certificate]:
    """Returns the certificates of a file in the order of its lines, those of lost steps too.

    Lines that are none are left out. There are none if there is no file. Raises ConfigError if it
    cannot be read.
    """
    read = map(_certificate, lines_of(path))
    return [item for item in read if item is not None]


def failed(certificates: Sequence[Certificate]) -> list[Certificate]:
    """Returns those that found a difference."""
    return [item for item in certificates if item.difference]


def summary(certificates: Sequence[Certificate]) -> str:
    """Returns a sentence on certificates; there is at least 1."""
    wrong = len(failed(certificates))
    number = sum(item.num_comparisons for item in certificates)
    close = max((item.closest for item in certificates if item.closest), key=lambda x: x[1],
                default=None)
    nearest = f"; the nearest to its tolerance: {close[0]}, {close[1]:.1%} of it" if close else ""
    result = f"{wrong} found a difference" if wrong else "none found a difference"
    plural = "s" * (len(certificates) > 1)
    return (
        f"{len(certificates)} certificate{plural} of {number:,} comparisons, {result}{nearest}"
    )


def _certificate(text: str) -> Certificate | None:
    try:
        line = parse_json(text)
        step, closest = line["step"], line.get("closest")
        if not is_step(step) or step < 0:
            return None
        has_difference = line.get("difference") is not None or line.get("certified") is not True
        return Certificate(
            step, _count(line.get("num_comparisons")), _closest(closest),
            float(line["seconds"]) if is_number(line.get("seconds")) else 0.0,
            line["state_digest"] if isinstance(line.get("state_digest"), str) else "",
            _words(line.get("difference")) if has_difference else "",
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**53 else 0


def _closest(value: Any) -> tuple[str, float] | None:
    if not isinstance(value, Mapping) or not is_number(value.get("share")):
        return None
    return shown(str(value.get("leaf")), 200), float(value["share"])


def _words(difference: Any) -> str:
    """Returns the fields of a difference as "cause device, leaf mdl_vars/w, ..."."""
    if not isinstance(difference, Mapping):
        return shown(json.dumps(difference), _MOST_LETTERS) if difference else "not certified"
    fields = [f"{name} {value}" for name, value in difference.items() if value not in ("", None)]
    return shown(", ".join(fields), _MOST_LETTERS) or "not certified"
