"""A JSON line per row of a dataset: its decoded text, or the outputs of its evaluation."""

import collections
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.host.file_reading import content_of, opened
from praxis_lite.host.whole_files import not_written, write_whole
from praxis_lite.job.job_dir import COMMAND_LINE, JobDir
from praxis_lite.trainer.metrics.json_lines import no_other_changes, strict_json

__all__ = ("decoded_files",)


def write_records(
    path: Path, records: Sequence[Mapping[str, Any]], note: Callable[[str], None]
) -> None:
    """Writes a file of records, whole; raises ConfigError if it cannot be written.

    Other records that the file had are kept as NAME.1, or with the next number that is free, and
    `note` is told. NaN and the infinities are the strings "NaN", "Infinity" and "-Infinity".
    """
    content = b"".join(_lines(path, records))
    with _alone(path):
        if path.exists() and content_of(path) != content:
            number = 1
            while (renamed := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            os.replace(path, renamed)
            note(f"{path} had other records; they are in {renamed.name} now")
        write_whole(path, content)


def add_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Adds to a file the records that it has not yet; raises ConfigError if it cannot be written.

    The file is written whole, in the form of `write_records`.
    """
    with _alone(path):
        before = content_of(path) if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        known = set(before.splitlines(keepends=True))  # Of bytes: at line breaks alone.
        new = [line for line in _lines(path, records) if line not in known]
        write_whole(path, before + b"".join(new))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Makes the folder of a file, and holds a lock on it; OSError becomes ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with no_other_changes(path):
            yield
    except OSError as error:
        raise not_written(path, error) from error


def _lines(path: Path, records: Sequence[Mapping[str, Any]]) -> list[bytes]:
    return [
        (json.dumps(strict_json(record, path.name), ensure_ascii=False) + "\n").encode()
        for record in records
    ]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Some records of a file.

    Attributes:
      pairs: the prompt and the continuation of each, in their order in the file. The continuation
        of a record without that field is the rest of it, as JSON.
      num_lines: of the file; a last line that is cut short is not counted.
      num_unreadable: how many of the lines that were asked for are no JSON objects.
    """

    pairs: list[tuple[str, str]]
    num_lines: int
    num_unreadable: int


@dataclasses.dataclass(frozen=True)
class DecodedFile:
    """The file of a dataset's prompts, or of a command line's, as decoded at a step."""

    dataset: str
    step: int
    path: Path

    def read(self, most: int) -> Decoded:
        """Returns the records of the first lines, or of the newest lines of a command line's file.

        Args:
          most: how many lines.

        Raises:
          OSError: it cannot be read.
        """
        takes_newest = self.dataset == COMMAND_LINE  # A command line appends its records.
        lines, num_lines = collections.deque[bytes](maxlen=most), 0
        with opened(self.path) as file:
            for line in file:
                if line.endswith(b"\n"):
                    num_lines += 1
                    if takes_newest or num_lines <= most:
                        lines.append(line)
        pairs = list(map(_pair, lines))
        known = [pair for pair in pairs if pair is not None]
        return Decoded(known, num_lines, len(pairs) - len(known))


def decoded_files(job: JobDir) -> list[DecodedFile]:
    """Returns the files that a job has, by dataset and step."""
    files = [
        DecodedFile(path.parent.name, int(path.stem), path)
        for path in (job.path / "decode").glob("*/*.jsonl") if path.stem.isdecimal()
    ]
    return sorted(files, key=lambda file: (file.dataset, file.step))


def _pair(line: bytes) -> tuple[str, str] | None:
    """Returns the prompt and the continuation of a line, or None if it is no JSON object."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            return None
        prompt = record.pop("prompt", "")
        return _text(prompt), _text(record.get("continuation", record))
    except (ValueError, RecursionError):
        return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
