"""Appends lines to a file, and buffers them in memory while the file cannot be written."""

import contextlib
import logging
import os
import pathlib
import time

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import descriptor

_RETRY_SECONDS = 1.0


class RetryingLineWriter:
    """Appends lines to a file, and does not raise disk errors while training runs.

    Lines that cannot be written because of a full disk or an I/O error are kept in memory, and are
    retried together with later lines, at most once a second. The first failure and the next success
    are logged.

    Args:
      path: The file. It is created if its directory exists.

    Raises:
      OSError: The file cannot be opened.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file: int | None = self._open()
        self._lines: list[tuple[int, str]] = []
        self._error: OSError | None = None
        self._retry_at = 0.0

    def add(self, step: int, text: str) -> None:
        """Writes a step's line, or buffers the line if the file cannot be written."""
        self._lines.append((step, text))
        if self._error is None or time.monotonic() >= self._retry_at:
            self._write()

    def sync(self) -> None:
        """Syncs written lines to disk, so that they survive a host crash. Ignores disk errors."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)

    def close(self, *, raise_on_loss: bool) -> None:
        """Tries once more to write the buffered lines, and closes the file.

        Args:
          raise_on_loss: Whether to raise an error if lines are lost, instead of logging a note.

        Raises:
          ConfigError: Lines are lost. The message includes the file, the reason and the steps.
        """
        if self._lines:
            self._write()
        self._close_file()
        if self._lines:
            assert self._error is not None, "Lines remain only after an error."
            message = (
                f"{self._path} could not be written: {_reason(self._error)}; {self._lines_text()} "
                "are lost. Free disk space or repair the file system before the next launch."
            )
            self._lines.clear()
            if raise_on_loss:
                raise ConfigError(message)
            _log.warning(f"note: {message}")

    def _write(self) -> None:
        text = "".join(text for _, text in self._lines).encode()
        try:
            if self._file is None:
                self._file = self._open()
            size = os.fstat(self._file).st_size
            try:
                # One write suffices unless the disk is full, so readers see complete lines.
                while text:
                    text = text[os.write(self._file, text) :]
            except OSError:
                os.ftruncate(self._file, size)
                raise
        except OSError as error:
            self._failed(error)
            return
        if self._error is not None:
            _log.warning(f"{self._path} can be written again; wrote {self._lines_text()}")
        self._error = None
        self._lines.clear()

    def _open(self) -> int:
        return descriptor(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _failed(self, error: OSError) -> None:
        self._close_file()
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if self._error is None:
            _log.warning(
                f"note: {self._path} cannot be written: {_reason(error)}. Training continues, and "
                "lines are kept in memory until the file can be written"
            )
        self._error = error

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _lines_text(self) -> str:
        steps = [step for step, _ in self._lines]
        if steps[0] == steps[-1]:
            return f"the line of step {steps[0]}"
        return f"{len(steps):,} lines for steps {steps[0]} to {steps[-1]}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


_log = logging.getLogger(__name__)
