"""The format of timeline.jsonl, with one span of a launch per line."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.core.errors import is_number, shortened
from praxis_lite.host.file_reading import lines_of, parse_json
from praxis_lite.job.events import KINDS

# `Span.ended_by` of a launch that completed all its steps or stopped early.
THE_END = "the end"
_MAX_SECONDS = 1e11  # More than three thousand years.
_MAX_STEPS = 2**31


@dataclasses.dataclass(frozen=True)
class Span:
    """A section of a launch between two events: a start, a save or a rollback.

    Attributes:
      launch: Start of the launch in Unix seconds. All spans of a launch share this value, which
        identifies the launch.
      first_step: The saved or restored step that the span starts from (0 for a new job), or None
        if it is not yet known.
      last_step: Last step of the span with metrics, or `first_step` if no step has metrics.
      seconds: Seconds of this span in each category.
      ended_by: `THE_END`, or the name of the signal or exception that ended the launch. None if
        the launch continued after this span or was killed before it could record the reason.
      lost_to: Last step whose line in metrics.jsonl was removed because this span starts from an
        earlier step. None if no line was removed. A killed launch had completed all steps up to
        `lost_to`, possibly without recording them in timeline.jsonl.
    """

    launch: float
    first_step: int | None
    last_step: int | None
    seconds: Mapping[str, float]
    ended_by: str | None = None
    lost_to: int | None = None

    def line(self) -> str:
        """Returns the span as a line of timeline.jsonl."""
        seconds = {kind: round(value, 4) for kind, value in self.seconds.items() if value > 0}
        fields = dataclasses.asdict(self) | {"launch": round(self.launch, 4), "seconds": seconds}
        return json.dumps(fields) + "\n"


def read_spans(path: Path) -> list[Span]:
    """Reads the spans in a file, skipping damaged lines.

    Raises:
      ConfigError: The file cannot be read.
    """
    return [span for span in map(_parse_span, lines_of(path)) if span is not None]


def _parse_span(line: str) -> Span | None:
    """Parses a line; returns None if the line is truncated or invalid."""
    try:
        span = Span(**parse_json(line))
        first = span.first_step
        is_valid = (
            all(
                is_number(x) and 0 <= x < _MAX_SECONDS
                for x in (span.launch, *span.seconds.values())
            )
            and span.seconds.keys() <= set(KINDS)
            and (first is None) == (span.last_step is None)
            and (first is not None or span.lost_to is None)
            and all(
                type(step) is int and 0 <= (first or 0) <= step < _MAX_STEPS
                for step in (first, span.last_step, span.lost_to)
                if step is not None
            )
            and (span.ended_by is None or isinstance(span.ended_by, str))
        )
    except (ValueError, TypeError, AttributeError):
        return None
    if not is_valid:
        return None
    return dataclasses.replace(
        span,
        launch=float(span.launch),
        seconds={kind: float(span.seconds.get(kind, 0)) for kind in KINDS},
        ended_by=None if span.ended_by is None else shortened(span.ended_by),
    )
