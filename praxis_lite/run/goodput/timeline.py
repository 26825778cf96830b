"""The file timeline.jsonl, kept up to date by a launch: a kill loses a second at most."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import descriptor
from praxis_lite.run.events import SAVE, JobEvents, Listener, Phase
from praxis_lite.run.goodput.stretches import THE_END, Stretch

_EVERY_SECONDS = 1.0
_MOST_CLOSED = 100_000  # Lines that are kept for a disk that takes none.


class Timeline(Listener, contextlib.AbstractContextManager):
    """Keeps a file up to date with the events of a launch, while it is entered.

    The file has a line per stretch of the launch (see `Stretch`). A thread writes the line of the
    open stretch anew every second, in its place, so the file grows with the saves of a job and not
    with its seconds. It is not synced (fsync): a kill loses nothing, a power cut some lines.

    If the file cannot be written, `note` is told so once, and the run goes on; each second it is
    tried again, with all lines that are not written yet.

    Args:
      path: of the file.
      events: of the launch, whose seconds the file has.
      note: prints a line.

    Attributes:
      ended_by: what the last line says of the end, if no exception ends the launch.
    """

    def __init__(self, path: Path, events: JobEvents, note: Callable[[str], None]):
        self.ended_by = THE_END
        self._events, self._path, self._note = events, path, note
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._lost_to: int | None = None
        # The stretch's seconds are above these.
        self._before = dict.fromkeys(events.seconds(), 0.0)
        self._closed = b""  # Lines of closed stretches that are not in the file yet.
        self._file, self._offset, self._start = -1, 0, 0
        self._open_bytes = 0  # Of the open stretch's line, as it stands in the file.
        self._lock, self._is_over, self._has_failed = threading.Lock(), threading.Event(), False
        self._is_taken_back = False
        self._thread = threading.Thread(target=self._keep, name="timeline", daemon=True)

    def begins(self, phase: Phase, step: int | None) -> None:
        if phase.kind == SAVE and step not in (None, self._first_step):
            self.goes_on_from(step)

    def report(self, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            if name == "made":
                self.made(value)
            elif name == "trains_from":
                self.goes_on_from(value)
            elif name == "lost_to":
                self.loses(value)
            elif name == "ended_by":
                self.ended_by = value or THE_END
            elif name == "nothing_to_do":
                self.take_back()

    @property
    def is_kept(self) -> bool:
        """False once the lines of the launch were taken back."""
        return not self._is_taken_back

    def goes_on_from(self, step: int) -> None:
        """Begins a stretch at a step that was restored, or whose save begins."""
        with self._lock:
            if self._first_step is not None:
                now = self._events.seconds()
                if self._closed.count(b"\n") < _MOST_CLOSED:
                    self._closed += self._line(now, None)
                self._before = now
            self._first_step = self._last_step = step
            self._lost_to = None

    def loses(self, step: int) -> None:
        """Notes that the steps to `step`, after the stretch's first step, were made before."""
        self._lost_to = step

    def made(self, step: int) -> None:
        """Notes that a step has ended and its metrics are known."""
        self._last_step = step

    def take_back(self) -> None:
        """Leaves the file as it was before: a launch that finds nothing to do is no launch."""
        with self._lock, contextlib.suppress(OSError):
            self._is_over.set()
            self._is_taken_back = True
            if self._file >= 0:
                os.ftruncate(self._file, self._start)

    def __enter__(self) -> "Timeline":
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and issubclass(kind, ConfigError) and self._first_step is None:
            self.take_back()  # A launch that is refused changes no file.
        self._is_over.set()
        self._thread.join()
        if self.is_kept:
            self._write(self.ended_by if kind is None else kind.__name__)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _keep(self) -> None:
        while not self._is_over.wait(_EVERY_SECONDS):
            self._write()

    def _write(self, ended_by: str | None = None) -> None:
        with self._lock:
            if self._is_over.is_set() and ended_by is None:
                return
            try:
                if self._file < 0:
                    self._open()
                line = self._line(self._events.seconds(), ended_by)
                content = self._closed + line
                # Blanks cover what a longer line left.
                content = content[:-1].ljust(self._open_bytes - 1) + b"\n"
                if os.pwrite(self._file, content, self._offset) < len(content):
                    raise OSError(0, "not all of it was written")
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    self._note(
                        f"note: {self._path} cannot be written ({error.strerror or error}): where "
                        "the time goes is not known until it can be"
                    )
                return
            self._offset += len(self._closed)
            self._closed, self._open_bytes = b"", len(content) - len(self._closed)
            if self._has_failed:
                self._has_failed = False
                self._note(f"{self._path} can be written again")

    def _open(self) -> None:
        self._file = descriptor(self._path, os.O_RDWR | os.O_CREAT)
        self._start = self._offset = os.fstat(self._file).st_size
        if self._start and os.pread(self._file, 1, self._start - 1) != b"\n":
            self._closed = b"\n" + self._closed  # After a line that was cut short.

    def _line(self, now: dict[str, float], ended_by: str | None) -> bytes:
        seconds = {kind: value - self._before[kind] for kind, value in now.items()}
        stretch = Stretch(
            self._events.began, self._first_step, self._last_step, seconds, ended_by, self._lost_to
        )
        return stretch.line().encode()
