"""Writes timeline.jsonl every second, so that at most one second is lost if a launch is killed."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import Error
from praxis_lite.host.file_reading import descriptor
from praxis_lite.job.events import SAVE, JobEvents, Listener, Phase
from praxis_tools.goodput.spans import THE_END, Span

_WRITE_SECONDS = 1.0


class Timeline(Listener, contextlib.AbstractContextManager):
    """Context manager that records the spans of a launch in a file.

    The file has one line per span (see `Span`). A thread overwrites the line of the current span
    every second, so the size of the file depends on the number of saves, not on the duration. The
    file is not synced with fsync: the file is complete after the process is killed, but lines may
    be missing after a power failure.

    If the file cannot be written, the error is logged once and training continues. Writing the
    missing lines is retried every second.

    Args:
      path: The file to write.
      events: Events of the launch, which provide the seconds in each category.
      note: Function that logs a line.

    Attributes:
      ended_by: Value of `Span.ended_by` in the last line, unless an exception ends the launch.
      is_discarded: Whether the lines of this launch were removed from the file.
    """

    def __init__(self, path: Path, events: JobEvents, note: Callable[[str], None]):
        self.ended_by = THE_END
        self._events, self._path, self._note = events, path, note
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._lost_to: int | None = None
        # Seconds of the launch before the current span began.
        self._seconds_before = dict.fromkeys(events.seconds(), 0.0)
        self._closed = b""  # Lines of closed spans that are not in the file yet.
        self._file, self._offset, self._start = -1, 0, 0
        self._num_bytes = 0  # Length of the current span's line in the file.
        self._lock, self._is_over, self._has_failed = threading.Lock(), threading.Event(), False
        self.is_discarded = False
        self._thread = threading.Thread(
            target=self._write_every_second, name="timeline", daemon=True
        )

    def begins(self, phase: Phase, step: int | None) -> None:
        if phase.kind == SAVE and step not in (None, self._first_step):
            self._begin_span(step)

    def report(self, facts: Mapping[str, Any]) -> None:
        if "made" in facts:
            self._last_step = facts["made"]
        if "trains_from" in facts:
            self._begin_span(facts["trains_from"])
        if "lost_to" in facts:
            self._lost_to = facts["lost_to"]
        if "ended_by" in facts:
            self.ended_by = facts["ended_by"] or THE_END
        if "nothing_to_do" in facts:
            self._discard()

    def _begin_span(self, step: int) -> None:
        """Begins a span at a step that was restored or is being saved."""
        with self._lock:
            if self._first_step is not None:
                now = self._events.seconds()
                self._closed += self._line(now, None)
                self._seconds_before = now
            self._first_step = self._last_step = step
            self._lost_to = None

    def _discard(self) -> None:
        """Removes the lines of a launch that was refused or had nothing to do."""
        with self._lock, contextlib.suppress(OSError):
            self._is_over.set()
            self.is_discarded = True
            if self._file >= 0:
                os.ftruncate(self._file, self._start)

    def __enter__(self) -> "Timeline":
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and issubclass(kind, Error) and self._first_step is None:
            self._discard()  # A launch that is refused must not change any file.
        self._is_over.set()
        self._thread.join()
        if not self.is_discarded:
            self._write(self.ended_by if kind is None else kind.__name__)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write_every_second(self) -> None:
        while not self._is_over.wait(_WRITE_SECONDS):
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
                # Pad with spaces to overwrite a previous line that was longer.
                content = content[:-1].ljust(self._num_bytes - 1) + b"\n"
                if os.pwrite(self._file, content, self._offset) < len(content):
                    raise OSError(0, "the write was incomplete")
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    self._note(
                        f"note: {self._path} cannot be written ({error.strerror or error}); "
                        "goodput is not recorded until writing succeeds"
                    )
                return
            # The closed lines are final. The next write replaces only the line after them.
            self._offset += len(self._closed)
            self._closed, self._num_bytes = b"", len(content) - len(self._closed)
            if self._has_failed:
                self._has_failed = False
                self._note(f"{self._path} can be written again")

    def _open(self) -> None:
        self._file = descriptor(self._path, os.O_RDWR | os.O_CREAT)
        self._start = self._offset = os.fstat(self._file).st_size
        if self._start and os.pread(self._file, 1, self._start - 1) != b"\n":
            self._closed = b"\n" + self._closed  # The last line in the file is incomplete.

    def _line(self, now: dict[str, float], ended_by: str | None) -> bytes:
        """Formats the line of the current span, which ends at `now`."""
        seconds = {kind: value - self._seconds_before[kind] for kind, value in now.items()}
        span = Span(
            self._events.began, self._first_step, self._last_step, seconds, ended_by, self._lost_to
        )
        return span.line().encode()
