"""Lines added to a file, and kept in memory while the disk does not take them."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import descriptor

_RETRY_SECONDS = 1.0


class KeptLines:
    """A file to which each line is added at once; a disk that fails ends nothing.

    Lines that cannot be written (a full disk, an input/output error) are kept and tried again with
    a later line, a second later at the earliest. A note reports when that begins, and when they are
    in the file.

    Args:
      path: of the file, which is made if its directory is there.
      note: prints a line.

    Raises:
      OSError: the file cannot be opened at first.
    """

    def __init__(self, path: pathlib.Path, note: Callable[[str], None]):
        self._path, self._note = path, note
        self._file: int | None = self._opened()
        self._lines: list[tuple[int, str]] = []
        self._error: OSError | None = None
        self._retry_at = 0.0

    def add(self, step: int, text: str) -> None:
        """Writes the line of a step, or keeps it."""
        self._lines.append((step, text))
        if self._error is None or time.monotonic() >= self._retry_at:
            self._write()

    def close(self, *, is_last_word: bool) -> None:
        """Closes the file, having tried once more to write the kept lines.

        Args:
          is_last_word: raise the error that lines are lost; else it is noted.

        Raises:
          ConfigError: lines are lost; names the file, the reason and the steps.
        """
        if self._lines:
            self._write()
        self._drop_file()
        if self._lines:
            message = (
                f"{self._path} could not be written: {_reason(self._error)}; {self._of_steps()} "
                "are lost. Make room, or repair the file system, before the next launch."
            )
            self._lines.clear()
            if is_last_word:
                raise ConfigError(message)
            self._note(f"note: {message}")

    def _write(self) -> None:
        text = "".join(text for _, text in self._lines).encode()
        try:
            if self._file is None:
                self._file = self._opened()
            size = os.fstat(self._file).st_size
            try:
                while text:  # Once, unless the disk is full: a reader sees complete lines.
                    text = text[os.write(self._file, text) :]
            except OSError:
                os.ftruncate(self._file, size)
                raise
        except OSError as error:
            self._failed(error)
            return
        if self._error is not None:
            self._note(f"{self._path} can be written again, with {self._of_steps()}")
        self._error = None
        self._lines.clear()

    def _opened(self) -> int:
        return descriptor(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _failed(self, error: OSError) -> None:
        self._drop_file()
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if self._error is None:
            self._note(
                f"note: {self._path} cannot be written: {_reason(error)}. Training continues; the "
                "lines are kept in memory until the file can be written"
            )
        self._error = error

    def _drop_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _of_steps(self) -> str:
        steps = [step for step, _ in self._lines]
        if steps[0] == steps[-1]:
            return f"the line of step {steps[0]}"
        return f"{len(steps):,} lines of steps {steps[0]} to {steps[-1]}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
