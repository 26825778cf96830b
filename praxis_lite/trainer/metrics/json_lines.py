"""Reads and writes metrics.jsonl, which has a line for each step and survives killed runs."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import orjson

from praxis_lite.core.errors import ConfigError, is_number
from praxis_lite.host.atomic_files import not_written, write_atomically
from praxis_lite.host.file_reading import (
    descriptor,
    finish_last_line,
    is_json,
    lines_from_end,
    opened,
    opened_to_append,
)
from praxis_lite.trainer.metrics.retrying_line_writer import RetryingLineWriter

__all__ = (
    "append_lines",
    "evaluation_lines",
    "is_step",
    "json_line",
    "read_json_lines",
    "strict_json",
    "training_lines",
)

# Written as strings, because JSON has no NaN and strict parsers reject it.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# The first keys of each line. All other keys follow, sorted by name.
_LEADING_KEYS = ("step", "dataset", "loss")

# Number of bytes at the end of a file that are checked before lines are appended.
_CHECKED_BYTES = 1 << 16

# `sampled_lines` reads all lines from files up to this size, and this number of lines from larger
# files.
_SMALL_BYTES = 4 * 2**20
_NUM_SAMPLES = 8192

_PARSE_ERRORS = (ValueError, TypeError, KeyError, RecursionError)


class JsonLinesWriter(contextlib.AbstractContextManager):
    """Appends one line per step to a file, and flushes each line.

    Opening the file cleans up after an earlier run. An incomplete last line is removed. Lines for
    steps after `resume_step`, which the resumed run will write again, are moved to NAME.lost.jsonl.
    They are copied before the file is truncated, so that no line is lost if the process is killed
    in between. To find these lines, the file is read backwards, starting with the last 64 KiB. A
    file of evaluations is read completely, because other processes may append evaluations of
    earlier steps.

    If a later write to the file fails, lines are buffered (`RetryingLineWriter`). If the buffered
    lines still cannot be written when the context exits, ConfigError is raised, or a note is
    logged if another exception is being raised.

    Numbers have enough digits to round-trip float64. NaN and the infinities are written as the
    strings "NaN", "Infinity" and "-Infinity".

    Args:
      path: The file.
      resume_step: Last step whose lines are kept; -1 to keep no lines.

    Attributes:
      newest_kept: Newest step among the lines that are kept, or 0 if there are none.
      lost_steps: First and last step among the lines that were moved, or None if no line was moved.
      lost_path: The file to which lines are moved.

    Raises:
      ConfigError: A line that was read is invalid, or the file cannot be opened.
    """

    def __init__(self, path: pathlib.Path, resume_step: int):
        self.path, self.lost_path = path, lost_path(path)
        self.newest_kept = 0
        self.lost_steps: tuple[int, int] | None = None
        with locked_folder(self.path):
            try:
                with _open_for_update(self.path) as file:
                    self._move_lost(file, resume_step)
                self._lines = RetryingLineWriter(self.path)
            except OSError as error:
                raise not_written(self.path, error) from error

    def _move_lost(self, file: IO[bytes], last: int) -> None:
        """Moves the lines for steps after `last` to the file of lost lines.

        The file is read backwards to find `cut`, the offset of the first lost line. Lines after it
        are either lost or, if another process has appended them, kept. Lost lines are copied and
        synced to disk before the file is changed.
        """
        finish_last_line(file)
        cut: int | None = None
        newest, size = 0, os.fstat(file.fileno()).st_size
        for offset, line in _newest_first(self.path, file):
            step = line["step"]
            if step > last:
                # In reverse order, the first lost line has the newest step.
                newest = step if cut is None else newest
                cut, self.lost_steps = offset, (step, newest)
            else:
                self.newest_kept = max(self.newest_kept, step)
                if "dataset" not in line and size - offset > _CHECKED_BYTES:
                    break  # Earlier lines have earlier steps.
        if cut is None:
            return
        file.seek(cut)
        lost: list[bytes] = []
        kept: list[bytes] = []
        for text in file:
            (lost if _parse_line(text)["step"] > last else kept).append(text)
        _add_to(self.lost_path, b"".join(lost))
        if kept:
            # Other processes have appended lines between the lost ones. Replace the file
            # atomically.
            file.seek(0)
            write_atomically(self.path, file.read(cut) + b"".join(kept))
        else:
            os.ftruncate(file.fileno(), cut)

    def num_lines(self) -> int:
        """Counts the lines in the file by reading the complete file."""
        with opened(self.path) as file:
            return sum(1 for _ in file)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line, which must have an integer `step`. Scalar arrays are converted."""
        if not isinstance(line.get("step"), int | np.integer):
            raise ValueError(f"{self.path}: a line needs an integer 'step', got {dict(line)}")
        self._lines.add(int(line["step"]), json_line(line))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._lines.close(raise_on_loss=kind is None)


def lost_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the file to which the lines of recomputed steps are moved."""
    return path.with_name(f"{path.stem}.lost.jsonl")


def append_lines(path: pathlib.Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines in one write to a file to which another process may be writing.

    An incomplete last line, left by a killed writer, is removed. Raises ConfigError if the file
    cannot be written.
    """
    text = "".join(map(json_line, lines))
    try:
        with locked_folder(path), _open_for_update(path) as file:
            finish_last_line(file)
            with opened_to_append(path) as appended:
                appended.write(text)
    except OSError as error:
        raise not_written(path, error) from error


def _open_for_update(path: pathlib.Path) -> IO[bytes]:
    """Opens a regular file for reading and writing, and creates it if needed."""
    return os.fdopen(descriptor(path, os.O_RDWR | os.O_CREAT), "r+b")


def _add_to(path: pathlib.Path, text: bytes) -> None:
    """Appends lines to a file and syncs them to disk; restores the file if that fails."""
    is_new = not path.exists()
    try:
        with _open_for_update(path) as file:
            finish_last_line(file)
            size = file.seek(0, os.SEEK_END)
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, size)
                raise
    except OSError as error:
        if is_new:
            path.unlink(missing_ok=True)
        raise not_written(path, error) from error


@contextlib.contextmanager
def locked_folder(path: pathlib.Path) -> Iterator[None]:
    """Locks the file's folder, so that no other process truncates the file or appends to it.

    `JsonLinesWriter.write` takes no lock, because it appends complete lines. On file systems
    without locks, this function does nothing.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def read_json_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the parsed lines of a file, or [] if the file does not exist.

    The strings "NaN", "Infinity" and "-Infinity" become floats. An incomplete last line is ignored,
    because its writer was killed or is still writing.

    Raises:
      ConfigError: The file cannot be read, or a complete line is not a JSON object with a `step`.
    """
    return list(_read_lines(path)) if path.exists() else []


def _read_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the results of `read_json_lines` one at a time."""
    with _open_lines(path) as file:
        for number, text in enumerate(file, start=1):
            try:
                yield restore_non_finite(_parse_line(text))
            except _PARSE_ERRORS as error:
                # The last line may be incomplete.
                if isinstance(error, ValueError) and not file.read(1):
                    return
                raise _bad_line_error(path, number, text) from error


def newest_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the parsed lines of a file, newest first; nothing if the file does not exist.

    The file is read backwards, and only as far as needed.
    """
    if path.exists():
        with _open_lines(path) as file:
            for _, line in _newest_first(path, file):
                yield restore_non_finite(line)


def sampled_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the results of `read_json_lines` or, for a large file, of a sample of its lines.

    If a file is larger than 4 MiB, the sample consists of about 8,000 evenly spaced lines,
    including the first and the last line.
    """
    with _open_lines(path) as file:
        size, last_offset = os.fstat(file.fileno()).st_size, -1
        if size <= _SMALL_BYTES:
            yield from _read_lines(path)
            return
        for number in range(_NUM_SAMPLES):
            file.seek(size * number // _NUM_SAMPLES)
            if number:
                file.readline()  # Skip the rest of the line at this position.
            offset, text = file.tell(), file.readline()
            # A long line may contain several of the positions.
            if offset > last_offset and text.endswith(b"\n"):
                last_offset = offset
                yield restore_non_finite(_line_at(path, file, offset, text))
        # The sample includes the last line.
        for offset, line in itertools.islice(_newest_first(path, file), 1):
            if offset > last_offset:
                yield restore_non_finite(line)


def _newest_first(path: pathlib.Path, file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (offset, line) for each complete line of a file, in reverse order."""
    is_last = True
    for offset, text in lines_from_end(file):
        if is_last and not is_json(text):
            # Skip the text after the last line break, which is empty or an incomplete line.
            is_last = bool(not text)
            continue
        is_last = False
        yield offset, _line_at(path, file, offset, text)


def _line_at(path: pathlib.Path, file: IO[bytes], offset: int, text: bytes) -> dict[str, Any]:
    """Parses the line at an offset. Raises ConfigError with the line number if invalid."""
    try:
        return _parse_line(text)
    except _PARSE_ERRORS as error:
        file.seek(0)
        raise _bad_line_error(path, 1 + file.read(offset).count(b"\n"), text) from error


def _parse_line(text: bytes) -> dict[str, Any]:
    try:
        line = orjson.loads(text)
    except ValueError:  # Python's parser, unlike the fast parser, accepts NaN and invalid UTF-8.
        line = json.loads(text.decode("utf-8", "replace"))
    if not is_step(line["step"]):
        raise TypeError("step is not an integer")
    return line


def _bad_line_error(path: pathlib.Path, number: int, text: bytes) -> ConfigError:
    return ConfigError(
        f"{path}, line {number}: not a JSON object with an integer 'step': "
        f"{text[:80].decode('utf-8', 'replace')!r}. Fix or remove that line; only the last line "
        "may be incomplete."
    )


@contextlib.contextmanager
def _open_lines(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a file of lines for reading. Raises ConfigError if it cannot be opened."""
    try:
        with opened(path) as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}). Fix its permissions, or remove it "
            "if it is not a file written by a run."
        ) from None


def is_step(value: object) -> bool:
    """Returns whether a value is an integer that float64 represents exactly."""
    return isinstance(value, int) and abs(value) <= 2**53


def training_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, or [] if it does not exist.

    Raises:
      ConfigError: A line is not valid, or its loss is not a number.
    """
    return _checked_lines(path, "a number 'loss'", lambda line: is_number(line.get("loss")))


def evaluation_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of eval_metrics.jsonl, or [] if it does not exist.

    Raises:
      ConfigError: A line is not valid, has no dataset, or has a metric that is not a number.
    """
    return _checked_lines(path, "a string 'dataset' and numbers", _is_evaluation)


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("dataset"), str) and all(
        is_number(value) for name, value in line.items() if name != "dataset"
    )


def _checked_lines(
    path: pathlib.Path, expected: str, is_valid: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    lines = read_json_lines(path)
    for number, line in enumerate(lines, start=1):
        if not is_valid(line):
            raise ConfigError(
                f"{path}, line {number} is {str(line)[:80]}; expected {expected}. Fix or remove "
                "that line."
            )
    return lines


def json_line(line: Mapping[str, Any]) -> str:
    """Serializes a line, including the line break."""
    keys = [key for key in _LEADING_KEYS if key in line]
    keys += sorted(line.keys() - set(keys))
    plain = {key: strict_json(line[key], key) for key in keys}
    return json.dumps(plain, allow_nan=False) + "\n"


def strict_json(value: Any, key: str) -> Any:
    """Converts a value to strict JSON: NaN and the infinities become strings.

    Args:
      value: A number, a string, a scalar array, or a mapping or list of these.
      key: Name of the value, for the error message.

    Raises:
      ValueError: The value has another type.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): strict_json(entry, f"{key}.{name}") for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(entry, key) for entry in value]
    if not isinstance(value, float):
        array = np.asarray(value)
        # Do not exclude kind 'V': it includes ml_dtypes' bfloat16, which can be converted to float.
        if array.shape != () or array.dtype.kind in "OSUMmc":
            raise ValueError(
                f"metric {key!r}: cannot write {type(value).__name__} of shape "
                f"{array.shape}, dtype {array.dtype}; expected a scalar or a string."
            )
        if array.dtype.kind in "biu":
            return array.item()
        value = float(array)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def restore_non_finite(value: Any) -> Any:
    """Converts the strings "NaN", "Infinity" and "-Infinity" to floats, at any depth."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: restore_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [restore_non_finite(entry) for entry in value]
    return value
