"""Keeps a program running when its output cannot be written: a closed pipe, a full disk."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from praxis_lite.core.errors import printable
from praxis_lite.job import processes
from praxis_lite.job.processes.signals import say

__all__ = ("print_log",)


def to_nothing(number: int) -> None:
    """Points a file descriptor, open or closed, to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:  # `open` takes the lowest free number, which may be this one.
        os.dup2(null, number)
        os.close(null)


class _MayBeLost:
    """A text stream that turns into /dev/null at its first error."""

    def __init__(self, stream: Any, name: str, goes_on: Callable[[], bool]):
        self._stream, self._name, self._goes_on = stream, name, goes_on

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        # Below Python's stream, so that its buffer goes there too and Python exits in silence.
        to_nothing(self._stream.fileno())
        if not self._goes_on():
            raise SystemExit(128 + signal.SIGPIPE)
        say(
            f"{self._name} cannot be written ({error.strerror}); the job goes on without it, "
            "its results are on disk"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_what_is_closed() -> None:
    """Opens /dev/null for each standard stream that was closed, as by `1>&-`.

    Otherwise a file of the job would get its descriptor, and `print` would write into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            to_nothing(number)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


@contextlib.contextmanager
def output_may_be_lost(*, goes_on: bool | Callable[[], bool]) -> Iterator[None]:
    """Lets a program outlive its standard output and standard error.

    Args:
      goes_on: True: it then continues without them. False: it ends quietly, as programs in a pipe
        do. A function is called when the output is lost.
    """
    asked = goes_on if callable(goes_on) else lambda: goes_on
    before = sys.stdout, sys.stderr
    local = (
        _MayBeLost(sys.stdout, "standard output", asked),
        _MayBeLost(sys.stderr, "standard error", asked),
    )
    sys.stdout, sys.stderr = local
    try:
        yield
        for stream in local:  # A short output may be entirely in Python's buffers.
            stream.flush()
    finally:
        for stream in local:
            with contextlib.suppress(SystemExit):
                stream.flush()
        # Unless another stream was put in its place meanwhile.
        if sys.stdout is local[0]:
            sys.stdout = before[0]
        if sys.stderr is local[1]:
            sys.stderr = before[1]


class _Print(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # The output of other processes than the first is dropped, but not their warnings.
        is_heard = processes.is_first() or record.levelno < logging.WARNING
        # A file name that is not UTF-8 cannot be encoded for a terminal.
        words = printable(record.getMessage())
        print(words, file=sys.stdout if is_heard else sys.stderr, flush=True)


def print_log() -> None:
    """Prints the logs of both packages, such as the choice of an attention kernel."""
    for name in ("praxis_lite", "praxis_tools"):
        log = logging.getLogger(name)
        if not log.handlers:
            log.addHandler(_Print())
            log.setLevel(logging.INFO)
            log.propagate = False  # Some library's handler of all logs would print it again.
