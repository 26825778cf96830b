"""metrics.jsonl: a flushed line per step, each step once, however often the run was killed."""

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
from praxis_lite.host.file_reading import (
    descriptor,
    finish_last_line,
    is_json,
    lines_from_end,
    opened,
    opened_to_append,
)
from praxis_lite.host.whole_files import not_written, write_whole
from praxis_lite.trainer.metrics.kept_lines import KeptLines

__all__ = (
    "append_lines", "evaluation_lines", "is_step", "json_line", "lines_if_any", "read_json_lines",
    "strict_json", "training_lines",
)

# Strict JSON has no such numbers, and a reader in another language would stop at a bare NaN.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# What a person looks for first; the other keys follow by name.
_LEADING_KEYS = ("step", "dataset", "loss")

# At the end of a file, whose lines are checked before others are added.
_CHECKED_BYTES = 1 << 16

# `sampled_lines` reads all of a smaller file, and this number of lines of a larger one.
_SMALL_BYTES = 4 * 2**20
_NUM_SAMPLES = 8192

_NOT_A_LINE = (ValueError, TypeError, KeyError, RecursionError)


class JsonLinesWriter(contextlib.AbstractContextManager):
    """Appends lines to a file, a line per step, each flushed as it is written.

    Opening the file removes what an earlier run left: a last line that a kill cut short, and the
    lines after `resume_step`, which the resumed run writes again. They are moved to
    NAME.lost.jsonl: first copied, then cut off, so a kill at any point loses nothing. Lines are
    read from the end of the file, 64 KiB at least, up to the last one that stays; only of
    evaluations, which other processes add in any order, all are read.
    Raises ConfigError if one of these lines cannot be read, or the file cannot be written at first.
    If it cannot be written later its lines are kept (`KeptLines`); if they cannot be written at the
    end either, leaving the context raises ConfigError, or prints a note during another exception.

    Numbers have as many digits as float64 needs, so float32 round-trips bit for bit. NaN and the
    infinities are written as the strings "NaN", "Infinity" and "-Infinity".

    Args:
      resume_step: the last step whose lines stay; -1: none do.
      note: told when the file cannot be written, and when it can be again.

    Attributes:
      newest_kept: the newest step among the lines of earlier runs that stay; 0 if there is none.
      lost_steps: the first and the last step of the lines that were moved; None if none were.
      lost_path: the file that they are in.
    """

    def __init__(
        self, path: str | os.PathLike[str], resume_step: int,
        note: Callable[[str], None] = print,
    ):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lost_path = lost_path(self.path)
        self.newest_kept, self.lost_steps = 0, None
        with no_other_changes(self.path):
            try:
                with _opened_to_change(self.path) as file:
                    self._move_lost(file, resume_step)
                self._lines = KeptLines(self.path, note)
            except OSError as error:
                raise not_written(self.path, error) from error

    def _move_lost(self, file: IO[bytes], last: int) -> None:
        """Moves the lines of steps after the `last` to the file of lost lines."""
        finish_last_line(file)
        cut, newest, size = None, 0, os.fstat(file.fileno()).st_size
        for offset, line in _newest_first(self.path, file):
            step = line["step"]
            if step > last:
                newest = step if cut is None else newest
                cut, self.lost_steps = offset, (step, newest)
            else:
                self.newest_kept = max(self.newest_kept, step)
                if "dataset" not in line and size - offset > _CHECKED_BYTES:
                    break  # All lines before are of earlier steps.
        if cut is None:
            return
        file.seek(cut)
        lost, kept = [], []
        for text in file:
            (lost if _parsed(text)["step"] > last else kept).append(text)
        _add_to(self.lost_path, b"".join(lost))
        if kept:  # Other processes' lines, between the lost ones: a reader sees all or none.
            file.seek(0)
            write_whole(self.path, file.read(cut) + b"".join(kept))
        else:
            os.ftruncate(file.fileno(), cut)

    def num_lines(self) -> int:
        """Returns how many lines the file has, by reading all of it."""
        with opened(self.path) as file:
            return sum(1 for _ in file)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line, which must have an integer `step`; scalar arrays become numbers."""
        if not isinstance(line.get("step"), int | np.integer):
            raise ValueError(f"{self.path}: a line needs an integer 'step', got {dict(line)}")
        self._lines.add(int(line["step"]), json_line(line))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._lines.close(is_last_word=kind is None)


def lost_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the file of the lines that were moved out of a file."""
    return path.with_name(f"{path.stem}.lost.jsonl")


def append_lines(path: pathlib.Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines to a file that another process may be writing, all of them at once.

    A last line that a killed writer cut short goes, as in `JsonLinesWriter`. Raises ConfigError if
    the file cannot be written.
    """
    text = "".join(map(json_line, lines))
    try:
        with no_other_changes(path), _opened_to_change(path) as file:
            finish_last_line(file)
            with opened_to_append(path) as end:
                end.write(text)
    except OSError as error:
        raise not_written(path, error) from error


def _opened_to_change(path: pathlib.Path) -> IO[bytes]:
    """Opens a plain file, new or old, to read and to write it."""
    return os.fdopen(descriptor(path, os.O_RDWR | os.O_CREAT), "r+b")


def _add_to(path: pathlib.Path, text: bytes) -> None:
    """Adds lines to a file, which are on disk in the end."""
    is_new = not path.exists()
    try:
        with _opened_to_change(path) as file:
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
def no_other_changes(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock on the folder, so that no other process cuts the file or adds to it.

    The writer of the file adds to it all the same: its lines and theirs are complete. A file system
    without locks has none.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the file's lines, "NaN" and the infinities as floats again.

    A last line that is cut short is left out: its writer was killed, or is writing it now. Raises
    ConfigError if there is no such file, or another line is no JSON object with a `step`.
    """
    return list(_each_line(pathlib.Path(path)))


def _each_line(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of `read_json_lines`, one after the other."""
    with _opened_lines(path) as file:
        for number, text in enumerate(file, start=1):
            try:
                yield with_non_finite(_parsed(text))
            except _NOT_A_LINE as error:
                if isinstance(error, ValueError) and not file.read(1):
                    return
                raise _no_line(path, number, text) from error


def newest_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of `read_json_lines`, the last one first; none if there is no such file.

    Only those that are asked for are read: the end of a long file costs what that of a short one
    does.
    """
    if path.exists():
        with _opened_lines(path) as file:
            for _, line in _newest_first(path, file):
                yield with_non_finite(line)


def sampled_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of `read_json_lines`; of a file above 4 MiB some 8,000 evenly spread ones.

    The first and the last line are among them.
    """
    with _opened_lines(path) as file:
        size, done = os.fstat(file.fileno()).st_size, -1
        if size <= _SMALL_BYTES:
            yield from _each_line(path)
            return
        for number in range(_NUM_SAMPLES):
            file.seek(size * number // _NUM_SAMPLES)
            if number:
                file.readline()  # The rest of a line.
            offset, text = file.tell(), file.readline()
            if offset > done and text.endswith(b"\n"):
                done = offset
                yield with_non_finite(_line_at(path, file, offset, text))
        for offset, line in itertools.islice(_newest_first(path, file), 1):
            if offset > done:
                yield with_non_finite(line)


def _newest_first(path: pathlib.Path, file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (offset, line) of the lines of a file, the last one that is complete first."""
    is_last = True
    for offset, text in lines_from_end(file):
        if is_last and not is_json(text):
            is_last = bool(not text)  # What follows the last line break; and a line cut short.
            continue
        is_last = False
        yield offset, _line_at(path, file, offset, text)


def _line_at(path: pathlib.Path, file: IO[bytes], offset: int, text: bytes) -> dict[str, Any]:
    """Returns a line. Raises ConfigError with its number if it is none."""
    try:
        return _parsed(text)
    except _NOT_A_LINE as error:
        file.seek(0)
        raise _no_line(path, 1 + file.read(offset).count(b"\n"), text) from error


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        line = orjson.loads(text)
    except ValueError:  # Python's own parser takes NaN too, and text that is not UTF-8.
        line = json.loads(text.decode("utf-8", "replace"))
    if not is_step(line["step"]):
        raise TypeError("step is no integer")
    return line


def _no_line(path: pathlib.Path, number: int, text: bytes) -> ConfigError:
    return ConfigError(
        f"{path}, line {number}: not a JSON object with an integer 'step': "
        f"{text[:80].decode('utf-8', 'replace')!r}. Fix or remove that line; only the last one "
        "may be cut short."
    )


@contextlib.contextmanager
def _opened_lines(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a file of lines to read it. Raises ConfigError if that is not possible."""
    try:
        with opened(path) as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a run writes it in its job_log_dir.") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}). A run writes it; remove what "
            "is in its place."
        ) from None


def is_step(value: object) -> bool:
    """Returns True for an integer that a float64 holds exactly, as every step of a run is."""
    return isinstance(value, int) and abs(value) <= 2**53


def lines_if_any(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns `read_json_lines`, or [] if there is no such file."""
    return read_json_lines(path) if path.exists() else []


def training_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, or [] if there is no such file.

    Raises:
      ConfigError: as `read_json_lines`, or a line's loss is no number.
    """
    return _checked(path, "a number 'loss'", lambda line: is_number(line.get("loss")))


def evaluation_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of eval_metrics.jsonl, or [] if there is no such file.

    Raises:
      ConfigError: as `read_json_lines`, or a line has no dataset, or a metric that is no number.
    """
    return _checked(path, "a text 'dataset' and numbers", _is_evaluation)


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("dataset"), str) and all(
        is_number(value) for name, value in line.items() if name != "dataset"
    )


def _checked(
    path: pathlib.Path, expected: str, is_right: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    lines = lines_if_any(path)
    for number, line in enumerate(lines, start=1):
        if not is_right(line):
            raise ConfigError(
                f"{path}, line {number} is {str(line)[:80]}; expected {expected}. Fix or remove "
                "that line."
            )
    return lines


def json_line(line: Mapping[str, Any]) -> str:
    """Returns a line of the file, with its line break."""
    keys = [key for key in _LEADING_KEYS if key in line]
    keys += sorted(line.keys() - set(keys))
    plain = {key: strict_json(line[key], key) for key in keys}
    return json.dumps(plain, allow_nan=False) + "\n"


def strict_json(value: Any, key: str) -> Any:
    """Returns `value` as what strict JSON can hold: NaN and the infinities become texts.

    Numbers, texts, scalar arrays, and mappings and lists of them are taken. For others a ValueError
    names the `key`.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): strict_json(entry, f"{key}.{name}") for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(entry, key) for entry in value]
    if not isinstance(value, float):
        array = np.asarray(value)
        # ml_dtypes' bfloat16 is of kind 'V', which NumPy uses for raw bytes too: ask for a number.
        if array.shape != () or array.dtype.kind in "OSUMmc":
            raise ValueError(f"metric {key!r}: cannot write {type(value).__name__} of shape "
                             f"{array.shape}, dtype {array.dtype}; want a scalar number or text.")
        if array.dtype.kind in "biu":
            return array.item()
        value = float(array)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def with_non_finite(value: Any) -> Any:
    """Returns a value of a line with "NaN" and the infinities as floats, at any depth."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: with_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_non_finite(entry) for entry in value]
    return value
