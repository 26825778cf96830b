"""The files that a user's globs name, and those that a function makes where there are none."""

import glob
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.host.whole_files import not_written

# Writes files into the folder that it is given, or returns the examples of the one file.
Make = Callable[[str], Iterable[Mapping[str, Any]] | None]

_ROWS_PER_GROUP = 64


def matching_files(patterns: str, what: str = "TextCorpus") -> list[str]:
    """Returns the files that comma-separated globs (`**`, `~`) name, sorted, each once.

    Args:
        what: asks for them, for messages.

    Raises:
        ConfigError: a pattern names no file.
    """
    require(isinstance(patterns, str), f"{what}.files", patterns, "a text: globs between commas")
    expected = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if not expected:
        raise ConfigError(
            f"{what}: files is {patterns!r}, which names no file. Give a path or a glob."
        )
    return sorted({path for pattern in expected for path in _files_of(pattern, what)})


def _files_of(pattern: str, what: str) -> list[str]:
    expanded = os.path.expanduser(pattern)
    if os.path.isfile(expanded):  # A literal path may hold the characters of a glob.
        return [expanded]
    result = glob.glob(expanded, recursive=True)
    files = [path for path in result if os.path.isfile(path)]
    if files:
        return files
    if result:
        matched = f"only {'a directory' if len(result) == 1 else 'directories'}"
        change = f"Name the files in it, for instance {os.path.join(pattern, '**', '*.txt')!r}."
    else:
        matched, change = "nothing", "Correct the path or the glob."
    raise ConfigError(
        f"{what}: files names {pattern!r}, which matches {matched} (seen from {os.getcwd()}); "
        f"a file was wanted. {change}"
    )


def make_files(files: str, folder: str, make: Make) -> None:
    """Calls `make`, and moves the files that it has made into a folder.

    Args:
      files: of the source; where `make` returns examples, the path of one file.

    Raises:
      ConfigError: the disk does not take the files; one is there already; or the examples are for a
        file whose format is not written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as result:
            examples = make(result)
            if examples is not None:
                _write(os.path.join(result, os.path.basename(files)), files, examples)
            for name in sorted(os.listdir(result)):
                path = os.path.join(folder, name)
                if os.path.lexists(path):
                    raise ConfigError(
                        f"{path} is there, yet is none of the files {files!r} of the source, and "
                        "its function `make` would write over it. Name other files, or move it."
                    )
                os.replace(os.path.join(result, name), path)
    except OSError as error:
        raise not_written(folder, error) from error


def _write(path: str, files: str, examples: Iterable[Mapping[str, Any]]) -> None:
    if files.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        _write_json_lines(path, examples)
        return
    require(
        files.endswith(".parquet"), "The file of a source whose function `make` returns examples",
        files, "one whose name ends with .jsonl, .jsonl.gz, .jsonl.zst or .parquet",
    )
    pyarrow, parquet = optional_module("pyarrow", files), optional_module("pyarrow.parquet", files)
    table = pyarrow.Table.from_pylist([dict(example) for example in examples])
    parquet.write_table(table, path, row_group_size=_ROWS_PER_GROUP)


def _write_json_lines(path: str, examples: Iterable[Mapping[str, Any]]) -> None:
    lines = (json.dumps(example).encode() for example in examples)
    if path.endswith(".jsonl"):
        with open(path, "wb") as file:
            # No end of a last line: jobs keep the digest of a file that was made so.
            file.write(b"\n".join(lines))
        return
    with optional_module("pyarrow", path).output_stream(path, compression="detect") as file:
        for line in lines:
            file.write(line + b"\n")
