"""Reads and writes JOB/examples/PROCESS.jsonl, the record of the rows that a process trained on."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.host.file_reading import lines_of, parse_json

_TAIL_BYTES = 2**16  # Number of bytes to read for the last lines of a file.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The line that a process writes when training starts, or restarts after a roll-back.

    Attributes:
      start: Number of the start, counted from 1 and the same in all processes.
      step: Number of training steps completed before the start.
      is_new: Whether the job had no checkpoint.
      time: Time of the start, in Unix seconds.
      launch: Time at which the first process was launched, in Unix seconds, as in timeline.jsonl.
      generation: Generation of an elastic job, or None if the job is not elastic.
      process: Index of the process.
      num_processes: Number of processes.
      host: Name of the process's host.
      mesh: Number of devices along each mesh axis.
      batch_size: The pipeline's batch size. With length buckets, a batch may have a multiple of
        this number of rows.
      rows: Ranges of the rows that the process feeds, within range(batch_size).
      skipped: Indices of skipped batches.
      data: Digest of the pipeline's fingerprint.
      versions: Versions of Python and packages, keyed by name.
    """

    start: int
    step: int
    is_new: bool
    time: float
    launch: float
    generation: int | None
    process: int
    num_processes: int
    host: str
    mesh: Mapping[str, int]
    batch_size: int
    rows: tuple[tuple[int, int], ...]
    skipped: tuple[int, ...]
    data: str
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSpan:
    """A line that describes the rows that a process fed to training between two saves.

    The line is written before the second save.

    Attributes:
      start: Number of the start to which the span belongs.
      process: Index of the process.
      steps: First and last step.
      batches: Indices of the first and last batch.
      skipped: Indices of skipped batches between the first and the last batch.
      digest: Sum of the digests of all rows (`row_digests`), in hex.
    """

    start: int
    process: int
    steps: tuple[int, int]
    batches: tuple[int, int]
    skipped: tuple[int, ...]
    digest: str


@dataclasses.dataclass(frozen=True)
class Record:
    """The parsed lines of a job's record.

    Attributes:
      starts: The job's starts, sorted by number and then by process.
      spans: The spans of rows, in file order.
      num_unreadable: Number of incomplete or damaged lines.
    """

    starts: Sequence[Start]
    spans: Sequence[RowSpan]
    num_unreadable: int

    @property
    def last_start(self) -> int:
        """Number of the last start, or 0 if there is none."""
        numbers = [start.start for start in self.starts] + [span.start for span in self.spans]
        return max(numbers, default=0)


def line_of(line: Start | RowSpan) -> str:
    """Serializes a line of the file."""
    return json.dumps(dataclasses.asdict(line)) + "\n"


def read_record(folder: Path) -> Record:
    """Reads a job's record. If the folder does not exist, the record is empty.

    Raises:
      ConfigError: A file cannot be read.
    """
    starts, spans, num_unreadable = [], [], 0
    for path in sorted(folder.glob("*.jsonl")):
        for text in lines_of(path):
            line = _parse_line(text)
            if isinstance(line, Start):
                starts.append(line)
            elif isinstance(line, RowSpan):
                spans.append(line)
            else:
                num_unreadable += 1
    starts.sort(key=lambda line: (line.start, line.process))
    return Record(starts, spans, num_unreadable)


def next_start(folder: Path) -> int:
    """Returns the number of a job's next start. Only the end of each file is read.

    Raises:
      ConfigError: A file cannot be read.
    """
    lines = [
        line
        for path in folder.glob("*.jsonl")
        for text in lines_of(path, _TAIL_BYTES)
        if (line := _parse_line(text)) is not None
    ]
    return 1 + max((line.start for line in lines), default=0)


def _parse_line(text: str) -> Start | RowSpan | None:
    """Parses a line, and returns None if it is incomplete or invalid."""
    try:
        fields = parse_json(text)
        line_class = RowSpan if "digest" in fields else Start
        return line_class(**{name: _to_tuple(value) for name, value in fields.items()})
    except (ValueError, TypeError, AttributeError):
        return None


def _to_tuple(value: Any) -> Any:
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value
