"""The lines of timeline.jsonl: spans of launches."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.host.json_text import lines_of, parse_json
from praxis_lite.job.events import KINDS

# The end of a launch that made all its steps, or those until an early stop.
THE_END = "the end"


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
        seconds = {kind: float(span.seconds.get(kind, 0)) for kind in KINDS}
        if span.first_step is not None and not 0 <= span.first_step <= span.last_step:
            return None
    except (ValueError, TypeError, AttributeError):
        return None
    return dataclasses.replace(span, seconds=seconds)
