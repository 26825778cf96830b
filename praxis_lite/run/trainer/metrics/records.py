"""A JSON line per row of a dataset: what was decoded of it, or what its evaluation gave."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, not_written, shown
from praxis_lite.files.json_text import content_of
from praxis_lite.files.whole_files import write_whole
from praxis_lite.run.trainer.metrics.json_lines import strict_json


def write_records(
    path: Path, records: Sequence[Mapping[str, Any]], note: Callable[[str], None]
) -> None:
    """Writes a file of records, whole; raises ConfigError if it cannot be written.

    Other records that the file had are kept as NAME.1, or with the next number that is free, and
    `note` is told. NaN and the infinities are the strings "NaN", "Infinity" and "-Infinity".
    """
    content = "".join(_lines(path, records)).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and content_of(path) != content:
            number = 1
            while (former := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            os.replace(path, former)
            note(f"{path} had other records; they are in {former.name} now")
    except OSError as error:
        raise not_written(path, error) from error
    write_whole(path, content)


def add_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Adds to a file the records that it has not yet; raises ConfigError if it cannot be written.

    The file is written whole, in the form of `write_records`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = content_of(path).decode("utf-8", "replace").splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise not_written(path, error) from error
    lines += [line for line in _lines(path, records) if line not in lines]
    write_whole(path, "".join(lines).encode())


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file; raises ConfigError if it cannot be read, or a line is none."""
    try:
        text = content_of(path).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ConfigError(
                f"{path}, line {number}: not a JSON object: {shown(line, 80)!r}. Decode again, or "
                "mend that line."
            )
        records.append(record)
    return records


def _lines(path: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        json.dumps(strict_json(record, path.name), ensure_ascii=False) + "\n"
        for record in records
    ]
