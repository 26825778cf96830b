"""Requests for a profile while a job runs: by SIGUSR1, or by a file in its directory."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from praxis_lite.core.errors import shown
from praxis_lite.job import processes
from praxis_lite.job.processes.stop_request import StopRequest

NUM_STEPS = 3  # Of a profile whose request says no number.
MAX_STEPS = 1000
_SECONDS = 1.0  # Between two looks at the directory.


class ProfileRequests:
    """The requests that reach this process; those by a file reach the first process alone.

    Args:
      file: its text may be a number of steps; it is removed once it is read.
      stop: hears SIGUSR1.
      note: prints a line.
    """

    def __init__(self, file: Path, stop: StopRequest, note: Callable[[str], None]):
        self._file, self._stop, self._note = file, stop, note
        self._looked_at = -_SECONDS
        self._looks = processes.is_first()

    def taken(self) -> int:
        """Returns how many steps were asked for since the last call; 0 if none were."""
        asked, self._stop.profile_is_asked = self._stop.profile_is_asked, False
        now = time.monotonic()
        if self._looks and now - self._looked_at >= _SECONDS:
            self._looked_at = now
            if self._file.exists():
                return self._read() or NUM_STEPS * asked
        return NUM_STEPS * asked

    def _read(self) -> int:
        """Returns the number of steps that the file asks for; 0, and a line, if it is none."""
        try:
            text = self._file.read_text(errors="replace").strip()
            self._file.unlink()
        except OSError as error:
            self._looks = False
            self._note(
                f"{self._file} cannot be read and removed ({error.strerror or error}): no profile "
                "is asked for by a file from here on. SIGUSR1 asks for one, too."
            )
            return 0
        is_number = re.fullmatch(r"\d{1,4}", text, re.ASCII) and 1 <= int(text) <= MAX_STEPS
        if text and not is_number:
            self._note(
                f"{self._file.name} has {shown(text)!r}, so no profile is made; expected a "
                f"number of steps from 1 to {MAX_STEPS}, or an empty file for {NUM_STEPS}"
            )
            return 0
        return int(text) if text else NUM_STEPS
