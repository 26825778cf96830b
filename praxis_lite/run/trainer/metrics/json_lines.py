"""metrics.jsonl: a flushed line per step, each step once, however often the run was killed."""

import contextlib
import fcntl
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, is_number
from praxis_lite.files.json_text import content_of, opened_to_append
from praxis_lite.files.whole_files import not_written, write_whole
from praxis_lite.run.trainer.metrics.kept_lines import KeptLines

# Strict JSON has no such numbers, and a reader in another language would stop at a bare NaN.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# What a person looks for first; the other keys follow by name.
_LEADING_KEYS = ("step", "dataset", "loss")

# A line that is cut short for so long is of a writer that was killed.
_CUT_SHORT_SECONDS = 2.0


class JsonLinesWriter(contextlib.AbstractContextManager):
    """Appends lines to a file, a line per step, each flushed as it is written.

    Opening the file mends what an earlier run left: a last line that a kill cut short goes, and
    the lines after `resume_step`, which the resumed run writes anew, are moved to NAME.lost.jsonl.
    The mended file replaces the old one whole, so a kill in the middle loses nothing. Raises
    ConfigError if a line in the middle cannot be read, or the file cannot be written at first. If
    it cannot be written later its lines are kept (`KeptLines`); if they cannot be written at the
    end either, leaving the context raises ConfigError, or notes it on the way of another exception.

    Numbers have as many digits as float64 needs, so float32 round-trips bit for bit. NaN and the
    infinities are written as the strings "NaN", "Infinity" and "-Infinity".

    Args:
      resume_step: None: every line is dropped; sys.maxsize: every line stays.
      note: told when the file cannot be written, and when it can be again.

    Attributes:
      num_kept: how many lines of earlier runs stay.
      lost_steps: the steps of lines that were moved, in their order.
      lost_path: the file that they are in.
    """

    def __init__(
        self, path: str | os.PathLike[str], resume_step: int | None,
        note: Callable[[str], None] = print,
    ):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lost_path = self.path.with_name(f"{self.path.stem}.lost.jsonl")
        with no_other_changes(self.path):
            self._mend(-1 if resume_step is None else resume_step)
            try:
                self._lines = KeptLines(self.path, note)
            except OSError as error:
                raise not_written(self.path, error) from error

    def _mend(self, last: int) -> None:
        lines = lines_if_any(self.path)
        kept = [line for line in lines if line["step"] <= last]
        lost = [line for line in lines if line["step"] > last]
        self.num_kept, self.lost_steps = len(kept), [line["step"] for line in lost]
        if lost:
            before = _former(self.lost_path)
            write_whole(self.lost_path, before + "".join(map(json_line, lost)).encode())
        content = "".join(map(json_line, kept)).encode()
        # A file that is in order stays the same file: another process may be adding to it.
        if not self.path.exists() or _former(self.path) != content:
            write_whole(self.path, content)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line, which must have an integer `step`; scalar arrays become numbers."""
        if not isinstance(line.get("step"), int | np.integer):
            raise ValueError(f"{self.path}: a line needs an integer 'step', got {dict(line)}")
        self._lines.add(int(line["step"]), json_line(line))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._lines.close(is_last_word=kind is None)


def append_lines(path: pathlib.Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines to a file that another process may be writing, all of them at once.

    A last line that a killed writer cut short goes, as in `JsonLinesWriter`. Raises ConfigError if
    the file cannot be written.
    """
    text, deadline = "".join(map(json_line, lines)), time.monotonic() + _CUT_SHORT_SECONDS
    try:
        with no_other_changes(path), opened_to_append(path) as file:
            while (content := content_of(path)) and not content.endswith(b"\n"):
                if time.monotonic() > deadline:
                    whole = content.rfind(b"\n") + 1
                    if _is_json(content[whole:]):
                        text = f"\n{text}"
                    else:
                        os.truncate(path, whole)
                    break
                time.sleep(0.02)
            file.write(text)
    except OSError as error:
        raise not_written(path, error) from error


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@contextlib.contextmanager
def no_other_changes(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock on the folder, so that no other process mends the file or adds to it as a guest.

    The writer of the file adds to it all the same: its lines and a guest's are whole. A file system
    without locks has none.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _former(path: pathlib.Path) -> bytes:
    """Returns a file's bytes; none, if it does not exist."""
    try:
        return content_of(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise not_written(path, error) from error


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the file's lines, "NaN" and the infinities as floats again.

    A last line that is cut short is left out: its writer was killed, or is writing it now. Raises
    ConfigError if there is no such file, or another line is no JSON object with a `step`.
    """
    path = pathlib.Path(path)
    try:
        # A kill may cut a file anywhere; a line that is no text fails below, as no JSON.
        texts = content_of(path).decode("utf-8", "replace").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a run writes it in its job_log_dir.") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}). A run writes it; take away what "
            "lies in its place."
        ) from None
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            if not is_step(line["step"]):
                raise TypeError("step is no integer")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number == len(texts) and isinstance(error, ValueError):
                break
            raise ConfigError(
                f"{path}, line {number}: not a JSON object with an integer 'step': {text[:80]!r}. "
                "Mend or remove that line; only the last one may be cut short.") from error
        lines.append(with_non_finite(line))
    return lines


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
    return _checked(
        path, "a text 'dataset' and numbers",
        lambda line: isinstance(line.get("dataset"), str)
        and all(is_number(value) for name, value in line.items() if name != "dataset"),
    )


def _checked(
    path: pathlib.Path, expected: str, is_right: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    lines = lines_if_any(path)
    for number, line in enumerate(lines, start=1):
        if not is_right(line):
            raise ConfigError(
                f"{path}, line {number} is {str(line)[:80]}; wanted is {expected}. Mend or remove "
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
    """Returns `value` as what strict JSON can hold: NaN and the infinities become words.

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
    """Returns a value of a line with "NaN" and the infinities, wherever in it, as floats."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: with_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_non_finite(entry) for entry in value]
    return value
