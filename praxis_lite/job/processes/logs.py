"""The log of a process: the logger `praxis_lite`, and the handlers of commands and jobs.

The library only logs, to `logging.getLogger(__name__)` in each file; `praxis_tools` is a child of
`praxis_lite`. Commands write the log to their output (`command_log`), and training jobs write it to
the job directory (`job_log`).
"""

import abc
import contextlib
import copy
import enum
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from praxis_lite.core.errors import printable
from praxis_lite.job import processes
from praxis_lite.job.events import COMPILE, EVALUATION, RESTORE, SAVE, Listener, Phase

__all__ = ("message_of", "set_supervised_process", "warn_once_per_job", "write_now")

LOGGER = logging.getLogger("praxis_lite")

# Equal lines are folded for at most this long, so that a line that is logged every minute while the
# process waits appears each time.
_FOLD_SECONDS = 30.0
_PREFIX_FORMAT = "%(asctime)s %(levelname)s %(index)d: %(message)s"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class LogFormat(enum.Enum):
    """The format of a command's log.

    Attributes:
      TEXT: The message, with time, level and process unless it is written to a terminal.
      JSON: A JSON object per line.
    """

    TEXT = "text"
    JSON = "json"


class _LineFormatter(logging.Formatter):
    """Formats a record as "2026-01-31 12:34:56 INFO 0: message", with the process's index."""

    default_msec_format = None

    def __init__(self) -> None:
        super().__init__(_PREFIX_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        # The message may contain a file name that is not UTF-8, which cannot be written.
        record.message, record.index = printable(record.message), _index()
        return super().formatMessage(record)


class _TerminalFormatter(logging.Formatter):
    """Formats a record for a terminal: the message, with the level if it is a warning."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"{level}{printable(record.message)}"


class _JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        utc = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{utc}.{record.msecs:03.0f}Z",
            "level": record.levelname,
            "process": _index(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


_LINE, _TERMINAL, _JSON = _LineFormatter(), _TerminalFormatter(), _JsonFormatter()


_supervised: int | None = None


def set_supervised_process(index: int) -> None:
    """Sets the process index in the log of a supervisor, which is that of its worker."""
    global _supervised
    _supervised = index


def _index() -> int:
    return processes.index() if _supervised is None else _supervised


def message_of(line: str) -> str:
    """Removes the time and process from a log line, and the level if it is below WARNING."""
    date, _, rest = line.partition(" ")
    clock, _, rest = rest.partition(" ")
    level, _, rest = rest.partition(" ")
    index, found, message = rest.partition(": ")
    if not (found and level in _LEVELS and index.isdecimal() and f"{date}{clock}".count(":") == 2):
        return line
    return message if level in ("DEBUG", "INFO") else f"{level}: {message}"


class _FoldingHandler(logging.Handler, abc.ABC):
    """Writes equal consecutive records once, followed by "... repeated 12 times"."""

    def __init__(self) -> None:
        super().__init__()
        self._message, self._fold_until = "", 0.0
        self._repeated: logging.LogRecord | None = None  # The last folded record.
        self._num_repeats = 0

    def emit(self, record: logging.LogRecord) -> None:
        message = f"{record.levelname}: {record.getMessage()}"
        if message == self._message and record.created < self._fold_until:
            self._repeated = record
            self._num_repeats += 1
            return
        self._end_fold()
        self._message, self._fold_until = message, record.created + _FOLD_SECONDS
        self.write(record)

    @abc.abstractmethod
    def write(self, record: logging.LogRecord) -> None:
        """Writes a record."""

    def close(self) -> None:
        self._end_fold()
        super().close()

    def _end_fold(self) -> None:
        if self._repeated is not None:
            folded, plural = copy.copy(self._repeated), "s" * (self._num_repeats > 1)
            folded.msg, folded.args = f"... repeated {self._num_repeats} time{plural}", None
            self._repeated, self._num_repeats = None, 0
            self.write(folded)


class PrefixedStream:
    """A text stream that adds a prefix to each line.

    Attributes:
      unprefixed: The stream without the prefix.
    """

    def __init__(self, stream: TextIO, prefix: str):
        self.unprefixed, self._prefix, self._is_new_line = stream, prefix, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self.unprefixed.write(f"{self._prefix if self._is_new_line else ''}{line}")
            self._is_new_line = line.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unprefixed, name)


class TerminalLog(_FoldingHandler):
    """Writes the log of a command to standard output, and errors to standard error.

    Only the first process of a job has a standard output. All other processes write warnings to
    standard error. Records with `extra={"is_on_screen": True}` are skipped.

    Args:
      to_stderr: Whether to write all lines to standard error.

    Attributes:
      log_format: The format of the lines.
    """

    def __init__(self, *, to_stderr: bool = False) -> None:
        super().__init__()
        self.log_format, self._to_stderr = LogFormat.TEXT, to_stderr
        self.setLevel(logging.INFO)
        self.addFilter(lambda record: not record.__dict__.get("is_on_screen"))

    def write(self, record: logging.LogRecord) -> None:
        limit = logging.ERROR if processes.is_first() else logging.WARNING
        to_stderr = self._to_stderr or record.levelno >= limit
        stream: Any = sys.stderr if to_stderr else sys.stdout
        is_terminal = stream.isatty()
        has_process = not is_terminal or self.log_format is LogFormat.JSON
        if has_process and isinstance(stream, PrefixedStream):
            stream = stream.unprefixed
        print(self.text_of(record, is_terminal=is_terminal), file=stream, flush=True)

    def text_of(self, record: logging.LogRecord, *, is_terminal: bool) -> str:
        """Formats a record for a terminal, or for a file or pipe."""
        if self.log_format is LogFormat.JSON:
            return _JSON.format(record)
        return (_TERMINAL if is_terminal else _LINE).format(record)


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        raise  # noqa: PLE0704  # Called while the exception is handled.


class JobLog(_FoldingHandler):
    """Appends the log of a launch to a file. If the disk is full, the job continues without it.

    Records are collected until `open` is called. The size of the file needs no limit: it has about
    twenty lines per launch and a line per evaluation, so it is smaller than metrics.jsonl.
    """

    def __init__(self) -> None:
        super().__init__()
        self._early: list[logging.LogRecord] = []
        self._file: _File | None = None
        self._has_failed = False

    def open(self, path: Path) -> None:
        """Writes the collected records, and all later records, to a file."""
        self._file = _File(path, encoding="utf-8", delay=True)
        self._file.setFormatter(_LINE)
        early, self._early = self._early, []
        for record in early:
            self.write(record)

    def write(self, record: logging.LogRecord) -> None:
        if self._file is None:
            self._early.append(record)
            return
        try:
            self._file.emit(record)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                _log.warning(
                    "%s cannot be written: %s. The job continues, and lines may be missing there",
                    self._file.baseFilename,
                    error.strerror,
                )

    def write_now(self, record: logging.LogRecord) -> None:
        """Appends a record without taking a lock, which another thread may hold."""
        if self._file is not None and self._file.stream is not None:
            _write(self._file.stream.fileno(), f"{_LINE.format(record)}\n")

    def close(self) -> None:
        super().close()
        if self._file is not None:
            with contextlib.suppress(
                OSError
            ):  # The buffer may have lines that the disk cannot store.
                self._file.close()


class _ToRoot(logging.Handler):
    """Passes records to the handlers of the root logger, as if the level of LOGGER were not set."""

    def __init__(self, level: int, *, is_handled: bool):
        super().__init__()
        self._is_gated, self._is_handled = level == logging.NOTSET, is_handled

    def emit(self, record: logging.LogRecord) -> None:
        root = logging.getLogger()
        # Without handlers, `callHandlers` writes warnings to standard error.
        is_last_resort = not root.handlers
        if not (is_last_resort and self._is_handled) and (
            not self._is_gated or root.isEnabledFor(record.levelno)
        ):
            root.callHandlers(record)


@contextlib.contextmanager
def _with_handler(handler: logging.Handler) -> Iterator[None]:
    """Adds a handler for records at level INFO or above, or at the level that the user has set.

    The user's handlers get the same records as without this handler.
    """
    level, propagate = LOGGER.level, LOGGER.propagate
    added = [handler]
    if propagate:
        added.append(_ToRoot(level, is_handled=bool(LOGGER.handlers)))
    if level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    for each in added:
        LOGGER.addHandler(each)
    try:
        yield
    finally:
        for each in added:
            LOGGER.removeHandler(each)
            each.close()
        LOGGER.propagate = propagate
        if level == logging.NOTSET and LOGGER.level == logging.INFO:
            LOGGER.setLevel(logging.NOTSET)


_command: TerminalLog | None = None  # The handler of the running command.


@contextlib.contextmanager
def command_log(*, to_stderr: bool = False) -> Iterator[None]:
    """Context manager that writes the log to the output of a command.

    Args:
      to_stderr: Whether standard output contains only the result of the command.
    """
    global _command
    if _command is not None:
        yield
        return
    level, propagate, handler = LOGGER.level, LOGGER.propagate, TerminalLog(to_stderr=to_stderr)
    _command = handler
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # A library's root handler would write each message again.
    try:
        yield
    finally:
        _command = None
        LOGGER.removeHandler(handler)
        handler.close()
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate


def configure_log(*, verbose: bool, quiet: bool, log_format: LogFormat) -> None:
    """Applies the options of a command line to the command's log.

    Args:
      verbose: Whether debug messages are logged too, in the output and in log.txt.
      quiet: Whether the output contains only warnings and errors.
      log_format: The format of the lines in the output.
    """
    assert _command is not None, "A command is running."
    LOGGER.setLevel(logging.DEBUG if verbose else logging.INFO)
    _command.setLevel(logging.WARNING if quiet else LOGGER.level)
    _command.log_format = log_format


def is_json() -> bool:
    """Returns whether the log of the running command is JSON."""
    return _command is not None and _command.log_format is LogFormat.JSON


def is_on_terminal() -> bool:
    """Returns whether a Python program shows the complete log on a terminal."""
    handlers = [*LOGGER.handlers, *logging.getLogger().handlers]
    return LOGGER.isEnabledFor(logging.INFO) and any(
        isinstance(each, logging.StreamHandler) and each.stream and each.stream.isatty()
        for each in handlers
    )


@contextlib.contextmanager
def job_log() -> Iterator[None]:
    """Context manager that collects the log of a launch, for `open_job_log`.

    An exception that ends the launch is added to the file.
    """
    handler = JobLog()
    with _with_handler(handler):
        try:
            yield
        except Exception as error:
            handler.write(_record(logging.ERROR, f"{type(error).__name__}: {error}"))
            raise


def open_job_log(path: Path) -> None:
    """Appends the collected and all later records of a launch to a file; used inside `job_log`."""
    for handler in _job_logs():
        handler.open(path)


@contextlib.contextmanager
def lines_of(logger: str) -> Iterator[None]:
    """Context manager that writes one logger's lines to standard output in a Python program.

    This has no effect in a command, or if the program already shows the complete log.
    """
    if _command is not None or (LOGGER.hasHandlers() and LOGGER.isEnabledFor(logging.INFO)):
        yield
        return
    handler = TerminalLog()
    handler.addFilter(logging.Filter(logger))
    with _with_handler(handler):
        yield


def warn_once_per_job(message: str) -> None:
    """Logs a warning that is the same in all processes; only the first process prints it."""
    LOGGER.log(logging.WARNING if processes.is_first() else logging.INFO, "%s", message)


def write_now(message: str) -> None:
    """Logs a warning from a thread that must not wait for locks, such as a signal listener.

    Unless a Python program has configured its log, the line is written to standard error, bypassing
    buffers and locks that another thread may hold.
    """
    if not LOGGER.isEnabledFor(logging.WARNING):
        return
    if _command is None and logging.getLogger().handlers:
        LOGGER.warning("%s", message)
        return
    record, text = _record(logging.WARNING, message), message
    if _command is not None and not (os.isatty(2) and _command.log_format is LogFormat.TEXT):
        text = _command.text_of(record, is_terminal=False)
    elif os.isatty(2):
        text = f"\n{message}"  # The terminal may show ^C or the progress line.
    _write(2, f"{text}\n")
    for handler in _job_logs():
        handler.write_now(record)


class PhaseTimes(Listener):
    """Logs how long saves and other long phases took, as debug messages."""

    def __init__(self) -> None:
        self._running: list[tuple[str, float]] = []  # The kind and start of each phase.

    def begins(self, phase: Phase, step: int | None) -> None:
        if phase.kind in (COMPILE, RESTORE, EVALUATION, SAVE):
            self._running.append((phase.kind, time.monotonic()))

    def resumes(self, phase: Phase) -> None:
        while self._running and phase.counts_as != self._running[-1][0]:
            kind, start = self._running.pop()
            if (seconds := time.monotonic() - start) >= 0.1:
                _log.debug("%s took %.1f s", kind, seconds)


def _job_logs() -> list[JobLog]:
    return [each for each in LOGGER.handlers if isinstance(each, JobLog)]


def _record(level: int, message: str) -> logging.LogRecord:
    return LOGGER.makeRecord(LOGGER.name, level, __file__, 0, message, (), None)


def _write(file: int, text: str) -> None:
    data = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(file, data) :]


_log = logging.getLogger(__name__)
