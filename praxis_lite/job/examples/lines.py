"""The lines of JOB/examples/PROCESS.jsonl: which rows a process fed, written and read."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.host.file_reading import lines_of, parse_json

_NEWEST_BYTES = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A process begins to train, or continues after a roll-back.

    Attributes:
      start: its number, from 1, the same on all processes.
      step: the number of steps that were made before.
      is_new: True if the job had no checkpoint then.
      time: now, in Unix seconds.
      launch: when the first process was launched, in Unix seconds, as in timeline.jsonl.
      generation: of an elastic job; None: it is not elastic.
      process: the index of this process.
      num_processes: how many there are.
      host: the name of this process's host.
      mesh: the devices along each axis.
      batch_size: the rows of a global batch.
      rows: the ranges of them that this process feeds.
      skipped: the indices of the batches that are left out.
      data: a digest of the pipeline's fingerprint.
      versions: of Python and of packages, by name.
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
class Stretch:
    """The rows that a process fed between two saves; written before the latter begins.

    Attributes:
      start: the number of the start that it belongs to.
      process: as of the start.
      steps: the first and the last.
      batches: the indices of the first and the last batch.
      skipped: the indices between them that were left out.
      digest: the sum of the digests of its rows, in hex (`row_digests`).
    """

    start: int
    process: int
    steps: tuple[int, int]
    batches: tuple[int, int]
    skipped: tuple[int, ...]
    digest: str


@dataclasses.dataclass(frozen=True)
class Record:
    """All lines of a job.

    Attributes:
      starts: in the order of their numbers, then of their processes.
      stretches: in the order of each file.
      num_unreadable: how many lines are none of these: cut short by a kill, or damaged.
    """

    starts: Sequence[Start]
    stretches: Sequence[Stretch]
    num_unreadable: int

    @property
    def last_start(self) -> int:
        """The number of the last start; 0 if there is none."""
        return max((item.start for item in (*self.starts, *self.stretches)), default=0)


def line_of(item: Start | Stretch) -> str:
    """Returns a line of the file."""
    return json.dumps(dataclasses.asdict(item)) + "\n"


def read_record(folder: Path) -> Record:
    """Returns the record of a job; it is empty if there is no such folder.

    Raises:
      ConfigError: a file cannot be read.
    """
    starts, stretches, num_unreadable = [], [], 0
    for path in sorted(folder.glob("*.jsonl")):
        for text in lines_of(path):
            item = _item(text)
            if isinstance(item, Start):
                starts.append(item)
            elif isinstance(item, Stretch):
                stretches.append(item)
            else:
                num_unreadable += 1
    starts.sort(key=lambda item: (item.start, item.process))
    return Record(starts, stretches, num_unreadable)


def next_start(folder: Path) -> int:
    """Returns the number of a job's next start; only the newest lines are read.

    Raises:
      ConfigError: a file cannot be read.
    """
    items = [
        item for path in folder.glob("*.jsonl") for text in lines_of(path, _NEWEST_BYTES)
        if (item := _item(text)) is not None
    ]
    return 1 + max((item.start for item in items), default=0)


def _item(text: str) -> Start | Stretch | None:
    """Returns the item of a line, or None if the line is truncated or not one of them."""
    try:
        fields = parse_json(text)
        kind = Stretch if "digest" in fields else Start
        return kind(**{name: _frozen(value) for name, value in fields.items()})
    except (ValueError, TypeError, AttributeError):
        return None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
