"""Reads and writes records, which are JSON lines with decoded text or per-example outputs."""

import collections
import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.host.atomic_files import not_written, write_atomically
from praxis_lite.host.file_reading import content_of, opened
from praxis_lite.job.job_dir import COMMAND_LINE, JobDir
from praxis_lite.trainer.metrics.json_lines import locked_folder, strict_json

__all__ = ("decoded_files",)


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes a file of records atomically.

    If the file exists with different records, it is renamed to NAME.1 or to the next free number,
    and a line is logged. NaN and the infinities are written as the strings "NaN", "Infinity" and
    "-Infinity".

    Args:
      path: The file; its folder is created if needed.
      records: JSON-serializable records.

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
            _log.info("%s contained different records, which were moved to %s", path, renamed.name)
        write_atomically(path, content)


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
        write_atomically(path, content + b"".join(new))


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Creates and locks a file's folder, and converts OSError to ConfigError."""
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
      pairs: (prompt, continuation) for each record, in file order. If a record has no continuation,
        the second item is the record's other fields as JSON.
      num_lines: Number of complete lines in the file.
      num_unreadable: Number of requested lines that are not JSON objects.
    """

    pairs: list[tuple[str, str]]
    num_lines: int
    num_unreadable: int


@dataclasses.dataclass(frozen=True)
class DecodedFile:
    """A file of prompts from a dataset or the command line, decoded with a checkpoint's weights."""

    dataset: str
    step: int
    path: Path

    def read(self, max_lines: int) -> Decoded:
        """Reads the first lines, or the last lines if the records belong to command-line prompts.

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
        for path in (job.path / "decode").glob("*/*.jsonl")
        if path.stem.isdecimal()
    ]
    return sorted(files, key=lambda file: (file.dataset, file.step))


def _pair(line: bytes) -> tuple[str, str] | None:
    """Returns (prompt, continuation) of a line, or None if it is not a JSON object."""
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


_log = logging.getLogger(__name__)
