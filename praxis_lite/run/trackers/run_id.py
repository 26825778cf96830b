"""The id of a run, and each tracker's position in it: small files in JOB/trackers.

Anyone may have written them, so what they hold is checked; if they are damaged a note says so.
"""

import os
import re
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import read_json
from praxis_lite.files.whole_files import not_written, write_whole

_ID = re.compile(r"[0-9a-f]{32}")
_MOST_STEPS = 2**31 - 1


def run_id(folder: Path, note: Callable[[str], None]) -> str:
    """Returns the id in `folder`/run_id.json, which the first launch makes.

    A kill leaves either no file or a whole one. Raises ConfigError if it cannot be written.
    """
    path = folder / "run_id.json"
    saved = _read(path, note)
    if isinstance(saved, dict) and isinstance(saved.get("id"), str) and _ID.fullmatch(saved["id"]):
        return saved["id"]
    if saved is not None:
        note(f"note: {path} has no run id; trackers begin a new run")
    new = uuid.uuid4().hex
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise not_written(folder, error) from error
    write_whole(path, f'{{"id": "{new}"}}\n'.encode())
    return new


class Position:
    """The newest step, and the newest evaluation, that a tracker has recorded.

    Kept in a file that is overwritten in place, by one call each time, so that a kill leaves a
    position of before or of after a record. Without a file it is of this launch alone.
    """

    def __init__(self, path: Path | None, note: Callable[[str], None]):
        # A launch that was killed before its first record leaves an empty file.
        is_empty = path is None or (path.is_file() and not path.stat().st_size)
        saved, self._file = None if is_empty else _read(path, note), None
        saved = saved if isinstance(saved, dict) else {}
        self.step, self.evaluation = (
            value if type(value) is int and 0 <= value <= _MOST_STEPS else 0
            for value in (saved.get("step"), saved.get("evaluation"))
        )
        if path is None:
            return
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise OSError(f"{path} is no plain file")

    def save(self) -> None:
        """Writes the position."""
        if self._file is None:
            return
        text = f'{{"step": {self.step:>10}, "evaluation": {self.evaluation:>10}}}\n'
        os.pwrite(self._file, text.encode(), 0)

    def close(self) -> None:
        """Closes the file, if any."""
        if self._file is not None:
            os.close(self._file)


def _read(path: Path, note: Callable[[str], None]) -> Any:
    """Returns the value in a file, or None if there is none or it is damaged, with a note."""
    if not path.exists():
        return None
    try:
        return read_json(path)
    except ConfigError as error:
        note(f"note: {error}")
        return None
