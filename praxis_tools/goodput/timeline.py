"""The file timeline.jsonl, kept up to date by a launch: a kill loses a second at most."""

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

_EVERY_SECONDS = 1.0


class Timeline(Listener, contextlib.AbstractContextManager):
    """Keeps a file up to date with the events of a launch, while it is entered.

    The file has a line per span of the launch (see `Span`). A thread overwrites the line of the
    open span every second, so the file grows with the saves of a job and not with its seconds. It
    is not synced (fsync): a kill loses nothing, a power cut some lines.

    If the file cannot be written, that is noted once and the run continues; each second it is tried
    again, with all lines that are not written yet.

    Args:
      path: of the file.
      events: of the launch, whose seconds the file has.
      note: prints a line.

    Attributes:
      ended_by: the end in the last line, if no exception ends the launch.
      is_taken_back: whether the lines of the launch were removed.
    """

    def __init__(self, path: Path, events: JobEvents, note: Callable[[str], None]):
        self.ended_by = THE_END
        self._events, self._path, self._note = events, path, note
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._lost_to: int | None = None
        # The span's seconds are above these.
        self._before = dict.fromkeys(events.seconds(), 0.0)
        self._closed = b""  # Lines of closed spans that are not in the file yet.
        self._file, self._offset, self._start = -1, 0, 0
        self._open_bytes = 0  # Of the open span's line, as it stands in the file.
        self._lock, self._is_over, self._has_failed = threading.Lock(), threading.Event(), False
        self.is_taken_back = False
        self._thread = threading.Thread(target=self._keep, name="timeline", daemon=True)

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
            self._take_back()

    def _begin_span(self, step: int) -> None:
        """Begins a span at a step that was restored, or whose save begins."""
        with self._lock:
            if self._first_step is not None:
                now = self._events.seconds()
                self._closed += self._line(now, None)
                self._before = now
            self._first_step = self._last_step = step
            self._lost_to = None

    def _take_back(self) -> None:
        """Removes the lines of this launch, which found nothing to do or was refused."""
        with self._lock, contextlib.suppress(OSError):
            self._is_over.set()
            self.is_taken_back = True
            if self._file >= 0:
                os.ftruncate(self._file, self._start)

    def __enter__(self) -> "Timeline":
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and issubclass(kind, Error) and self._first_step is None:
            self._take_back()  # A launch that is refused changes no file.
        self._is_over.set()
        self._thread.join()
        if not self.is_taken_back:
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
        span = Span(
            self._events.began, self._first_step, self._last_step, seconds, ended_by, self._lost_to
        )
        return span.line().encode()
