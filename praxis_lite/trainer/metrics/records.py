"""Reads and writes records, a JSON line per row: decoded text, or per-example eval outputs."""

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
from praxis_lite.trainer.metrics.json_lines import locked_folder, strict_json

__all__ = ("decoded_files",)


def write_records(
    path: Path, records: Sequence[Mapping[str, Any]], note: Callable[[str], None]
) -> None:
    """Writes a file of records atomically.

    An existing file with other records is renamed to NAME.1, or to the next free number, and noted.
    NaN and the infinities are written as the strings "NaN", "Infinity" and "-Infinity".

    Args:
      path: The file; its folder is created if needed.
      records: JSON-serializable records.
      note: Prints a line.

    Raises:
      ConfigError: The file cannot be written.
    """
    content = b"".join(_lines(path, records))
    with _exclusive(path):
        if path.exists() and content_of(path) != content:
            number = 1
            while (renamed := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            os.replace(path, renamed)
            note(f"{path} had other records; they were moved to {renamed.name}")
        write_whole(path, content)


def add_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Adds the records that a file does not contain yet, and replaces the file atomically.

    Raises ConfigError if the file cannot be written.
    """
    with _exclusive(path):
        content = content_of(path) if path.exists() else b""
        if content and not content.endswith(b"\n"):
            content += b"\n"
        known = set(content.splitlines(keepends=True))
        new = [line for line in _lines(path, records) if line not in known]
        write_whole(path, content + b"".join(new))


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Creates and locks the folder of a file; turns OSError into ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked_folder(path):
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
    """Records that were read from a file of decoded prompts.

    Attributes:
      pairs: (prompt, continuation) of each record, in file order. For a record without a
        continuation it is the JSON text of its other fields.
      num_lines: Number of complete lines in the file.
      num_unreadable: Number of requested lines that are not JSON objects.
    """

    pairs: list[tuple[str, str]]
    num_lines: int
    num_unreadable: int


@dataclasses.dataclass(frozen=True)
class DecodedFile:
    """The file of the prompts of a dataset, or of the command line, decoded at a step."""

    dataset: str
    step: int
    path: Path

    def read(self, max_lines: int) -> Decoded:
        """Reads the first lines; for prompts of the command line, which are appended, the last.

        Args:
          max_lines: Number of lines to read.

        Raises:
          OSError: The file cannot be read.
        """
        reads_newest = self.dataset == COMMAND_LINE
        lines, num_lines = collections.deque[bytes](maxlen=max_lines), 0
        with opened(self.path) as file:
            for line in file:
                if line.endswith(b"\n"):
                    num_lines += 1
                    if reads_newest or num_lines <= max_lines:
                        lines.append(line)
        pairs = list(map(_pair, lines))
        readable = [pair for pair in pairs if pair is not None]
        return Decoded(readable, num_lines, len(pairs) - len(readable))


def decoded_files(job: JobDir) -> list[DecodedFile]:
    """Returns a job's files of decoded prompts, sorted by dataset and step."""
    files = [
        DecodedFile(path.parent.name, int(path.stem), path)
        for path in (job.path / "decode").glob("*/*.jsonl") if path.stem.isdecimal()
    ]
    return sorted(files, key=lambda file: (file.dataset, file.step))


def _pair(line: bytes) -> tuple[str, str] | None:
    """Returns (prompt, continuation) of a line; None if it is not a JSON object."""
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
