"""The lines of timeline.jsonl: spans of launches."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.core.errors import is_number, shown
from praxis_lite.host.file_reading import lines_of, parse_json
from praxis_lite.job.events import KINDS

# The end of a launch that made all its steps, or those until an early stop.
THE_END = "the end"
_MOST_SECONDS = 1e11  # More than three thousand years.
_MOST_STEPS = 2**31


@dataclasses.dataclass(frozen=True)
class Span:
    """The part of a launch from its start, a save or a roll-back to the next one.

    Attributes:
      launch: when the launch began, in Unix seconds; all its spans have the same.
      first_step: the step whose state the span starts from: saved, restored, or 0. None: not known
        yet.
      last_step: the newest step of the span whose metrics were read; if none, `first_step`.
      seconds: of this span alone, by kind.
      ended_by: the end of the launch, if it ended in this span and recorded that: THE_END, a
        signal, or the name of an exception.
      lost_to: the newest step whose line in metrics.jsonl was moved away when this span started
        from an earlier step; None: there was none. A launch that was killed made steps up to there,
        also after the last line that it wrote here.
    """

    launch: float
    first_step: int | None
    last_step: int | None
    seconds: Mapping[str, float]
    ended_by: str | None = None
    lost_to: int | None = None

    def line(self) -> str:
        """Returns the span as a line of the file."""
        seconds = {kind: round(value, 4) for kind, value in self.seconds.items() if value > 0}
        fields = dataclasses.asdict(self) | {"launch": round(self.launch, 4), "seconds": seconds}
        return json.dumps(fields) + "\n"


def read_spans(path: Path) -> list[Span]:
    """Returns the spans of a file in their order; damaged lines are left out.

    Raises ConfigError if the file cannot be read.
    """
    return [span for span in map(_span, lines_of(path)) if span is not None]


def _span(line: str) -> Span | None:
    """Returns the span of a line, or None if the line is truncated or not a span."""
    try:
        span = Span(**parse_json(line))
        first = span.first_step
        is_valid = (
            all(is_number(x) and 0 <= x < _MOST_SECONDS
                for x in (span.launch, *span.seconds.values()))
            and span.seconds.keys() <= set(KINDS)
            and (first is None) == (span.last_step is None)
            and all(type(step) is int and 0 <= first <= step < _MOST_STEPS
                    for step in (first, span.last_step, span.lost_to) if step is not None)
            and (span.ended_by is None or isinstance(span.ended_by, str))
        )
    except (ValueError, TypeError, AttributeError):
        return None
    if not is_valid:
        return None
    return dataclasses.replace(
        span, launch=float(span.launch),
        seconds={kind: float(span.seconds.get(kind, 0)) for kind in KINDS},
        ended_by=None if span.ended_by is None else shown(span.ended_by),
    )
