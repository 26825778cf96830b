"""Finds files that match glob patterns, or calls a user's function to create them."""

import glob
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.atomic_files import not_written
from praxis_lite.host.file_reading import has_extension
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.host.places import local_files

# A user's function that writes files into the given folder or returns the examples for a file.
Make = Callable[[str], Iterable[Mapping[str, Any]] | None]

_ROWS_PER_GROUP = 64


def matching_files(patterns: str, owner: str = "TextCorpus") -> list[str]:
    """Returns the files that match comma-separated globs, sorted and without duplicates.

    Args:
        patterns: Comma-separated globs; `**` and `~` are expanded. A glob may be a URL:
            gs://bucket/GLOB, s3://bucket/GLOB or hf://datasets/org/name[@revision]/GLOB.
        owner: Name of the class with the `files` setting, for error messages.

    Raises:
        ConfigError: A glob matches no file, or files cannot be downloaded.
    """
    require(isinstance(patterns, str), f"{owner}.files", patterns, "a str of comma-separated globs")
    globs = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if not globs:
        raise ConfigError(f"{owner}: files is {patterns!r}; expected a path or a glob.")
    return sorted({path for pattern in globs for path in _matches(pattern, owner)})


def _matches(pattern: str, owner: str) -> list[str]:
    expanded = local_files(pattern)
    if os.path.isfile(expanded):  # A file's name may contain the special characters of globs.
        return [expanded]
    matches = glob.glob(expanded, recursive=True)
    files = [path for path in matches if os.path.isfile(path)]
    if files:
        return files
    if matches:
        found = f"only {'a directory' if len(matches) == 1 else 'directories'}"
        fix = f"Match the files in it, for example with {os.path.join(pattern, '**', '*.txt')!r}."
        raise ConfigError(
            f"{owner}.files: the pattern {pattern!r} matches {found} (relative to {os.getcwd()}); "
            f"expected at least one file. {fix}"
        )
    raise nothing_matches(pattern, owner)


def nothing_matches(pattern: str, owner: str) -> ConfigError:
    """Returns the error for a glob that matches no file."""
    return ConfigError(
        f"{owner}.files: the pattern {pattern!r} matches nothing (relative to {os.getcwd()}); "
        "expected at least one file. Correct the path or the glob."
    )


def make_files(files: str, folder: str, make: Make) -> None:
    """Calls `make` in a temporary folder, and moves the created files into `folder`.

    Args:
      files: The source's `files` setting; if `make` returns examples, the path of a single file.
      folder: Destination of the files.
      make: Function that writes files or returns examples.

    Raises:
      ConfigError: The files cannot be written, a file already exists, or the extension of `files`
        is not a supported format for examples.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary_folder:
            examples = make(temporary_folder)
            if examples is not None:
                path = os.path.join(temporary_folder, os.path.basename(files))
                _write_examples(path, files, examples)
            for name in sorted(os.listdir(temporary_folder)):
                path = os.path.join(folder, name)
                if os.path.lexists(path):
                    raise ConfigError(
                        f"{path} exists, but does not match the source's files {files!r}; the "
                        "source's `make` function would overwrite it. Change `files`, or move the "
                        "file."
                    )
                os.replace(os.path.join(temporary_folder, name), path)
    except OSError as error:
        raise not_written(folder, error) from error


def _write_examples(path: str, files: str, examples: Iterable[Mapping[str, Any]]) -> None:
    if has_extension(files, ".jsonl", ".jsonl.gz", ".jsonl.zst"):
        _write_json_lines(path, examples)
        return
    if not has_extension(files, ".parquet"):
        raise ConfigError(
            f"The source's `make` function returns examples, but they cannot be written to "
            f"{files!r}. Set `files` to a name ending in .jsonl, .jsonl.gz, .jsonl.zst or .parquet."
        )
    pyarrow, parquet = optional_module("pyarrow", files), optional_module("pyarrow.parquet", files)
    table = pyarrow.Table.from_pylist([dict(example) for example in examples])
    parquet.write_table(table, path, row_group_size=_ROWS_PER_GROUP)


def _write_json_lines(path: str, examples: Iterable[Mapping[str, Any]]) -> None:
    lines = (json.dumps(example).encode() for example in examples)
    if has_extension(path, ".jsonl"):
        with open(path, "wb") as file:
            # Do not add a final newline: existing jobs have recorded digests of files without it.
            file.write(b"\n".join(lines))
        return
    compression = "gzip" if has_extension(path, ".gz") else "zstd"
    with optional_module("pyarrow", path).output_stream(path, compression=compression) as file:
        for line in lines:
            file.write(line + b"\n")
