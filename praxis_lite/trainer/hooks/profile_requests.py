"""Receives requests to profile a running job, by SIGUSR1 or by a file in its directory."""

import logging
import re
import time
from pathlib import Path

from praxis_lite.core.errors import shortened
from praxis_lite.job import processes
from praxis_lite.job.processes.stop_request import StopRequest

NUM_STEPS = 3  # Number of steps to profile if the request does not specify a number.
MAX_STEPS = 1000
_POLL_SECONDS = 1.0


class ProfileRequests:
    """Collects this process's requests for a profile. Only the first process polls the file.

    Args:
      file: The file that requests a profile. It may contain a number of steps, and is removed after
        it is read.
      stop: Listener that receives SIGUSR1.
    """

    def __init__(self, file: Path, stop: StopRequest):
        self._file, self._stop = file, stop
        self._polled_at = -_POLL_SECONDS
        self._polls_file = processes.is_first()

    def take(self) -> int:
        """Returns the number of steps requested since the last call, or 0 if there was none."""
        has_signal, self._stop.profile_requested = self._stop.profile_requested, False
        now = time.monotonic()
        if self._polls_file and now - self._polled_at >= _POLL_SECONDS:
            self._polled_at = now
            if self._file.exists():
                return self._read() or NUM_STEPS * has_signal
        return NUM_STEPS * has_signal

    def _read(self) -> int:
        """Reads and removes the file, and returns the number of steps in it, or prints an error."""
        try:
            text = self._file.read_text(errors="replace").strip()
            self._file.unlink()
        except OSError as error:
            self._polls_file = False
            _log.info(
                f"{self._file} cannot be read and removed ({error.strerror or error}), so this "
                "launch will ignore the file. Send SIGUSR1 to request a profile."
            )
            return 0
        is_number = re.fullmatch(r"\d{1,4}", text, re.ASCII) and 1 <= int(text) <= MAX_STEPS
        if text and not is_number:
            _log.info(
                f"{self._file.name} contains {shortened(text)!r}, so no profile is recorded; "
                f"expected a number of steps from 1 to {MAX_STEPS}, or an empty file for "
                f"{NUM_STEPS} steps"
            )
            return 0
        return int(text) if text else NUM_STEPS


_log = logging.getLogger(__name__)
