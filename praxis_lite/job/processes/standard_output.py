"""Keeps a process running when its output cannot be written, for example to a closed pipe."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from praxis_lite.job.processes.logs import write_now


def redirect_to_null(number: int) -> None:
    """Redirects a file descriptor to /dev/null, whether it is open or closed."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:  # `open` may return this same number if the descriptor was closed.
        os.dup2(null, number)
        os.close(null)


class _FailsafeStream:
    """A text stream that is redirected to /dev/null on the first error."""

    def __init__(self, stream: Any, name: str, continues: Callable[[], bool]):
        self._stream, self._name, self._continues = stream, name, continues

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._redirect(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._redirect(error)

    def _redirect(self, error: OSError) -> None:
        # Redirect the descriptor instead of Python's stream, so that flushing the stream's buffer
        # at exit does not fail again.
        redirect_to_null(self._stream.fileno())
        if not self._continues():
            raise SystemExit(128 + signal.SIGPIPE)
        write_now(
            f"{self._name} cannot be written ({error.strerror}); the job continues without it, "
            "and its results are on disk"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed, for example by `1>&-` in a shell.

    Otherwise, the next file that the job opens would get the stream's descriptor, and `print` would
    write to that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            redirect_to_null(number)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


@contextlib.contextmanager
def output_may_be_lost(*, continues: Callable[[], bool]) -> Iterator[None]:
    """Defines what happens when standard output or standard error cannot be written.

    Args:
      continues: Function that is called when output is lost, and returns whether the process
        continues without it. If False, the process exits quietly, like a program in a pipe.
    """
    original = sys.stdout, sys.stderr
    wrapped = (
        _FailsafeStream(sys.stdout, "standard output", continues),
        _FailsafeStream(sys.stderr, "standard error", continues),
    )
    sys.stdout, sys.stderr = wrapped
    try:
        yield
        for stream in wrapped:  # Short output may still be in Python's buffers.
            stream.flush()
    finally:
        for stream in wrapped:
            with contextlib.suppress(SystemExit):
                stream.flush()
        # Do not undo a replacement by other code.
        if sys.stdout is wrapped[0]:
            sys.stdout = original[0]
        if sys.stderr is wrapped[1]:
            sys.stderr = original[1]
