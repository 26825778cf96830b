"""Handles signals that stop a process or request a profile, without delay.

Python runs signal handlers in the main thread between two bytecodes, so a compilation or a wait
for devices can delay them by minutes. However, Python's C code also writes each signal number to a
socket immediately (`signal.set_wakeup_fd`), and a separate thread in this module reads the socket.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from typing import Any

from praxis_lite.job.processes.exits import end_now
from praxis_lite.job.processes.logs import write_now

__all__ = ("STOPS_WORKER", "SignalListener", "listen_to_supervisor_only", "name")

# SIGHUP means that the terminal was closed. It is ignored under nohup, and remains ignored.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Sent by a supervisor to its worker, which ignores SIGNALS. SLURM sends SIGNALS to all processes on
# a host, so a worker that did not ignore them would exit at the second signal without saving.
STOPS_WORKER = signal.SIGUSR2

# Requests a profile. Its default action would end the process.
PROFILES = signal.SIGUSR1

# A byte that is not a signal number. It only wakes the listening thread.
_WAKE_UP = 255
# Maximum time for which the main thread waits for the listening thread, which may in turn wait for
# a lock that the main thread holds.
_LISTENER_SECONDS = 1.0

# Maximum time for the main thread to clean up if there is no checkpoint to write.
CLEAN_UP_SECONDS = 2.0


class SignalListener(contextlib.AbstractContextManager):
    """Context manager that handles SIGNALS and PROFILES; subclasses define the actions.

    In a worker of an elastic job, STOPS_WORKER takes the place of SIGNALS.

    Python can only install handlers in the main thread. If the context manager is entered in a
    different thread, no signals are handled. Signals that are already ignored remain ignored, and
    the user's handler for PROFILES remains installed.
    """

    def __init__(self) -> None:
        # Time (`time.monotonic`) at which to call `_on_timeout`; set by the listening thread.
        self._timeout_at: float | None = None
        self._has_stop_signal = False
        self._raised: SystemExit | None = None
        self._handlers: dict[int, Any] = {}  # The handlers to restore on exit.

    @property
    def handles_profile_signal(self) -> bool:
        """Whether PROFILES is handled, which requires the main thread and no user handler."""
        return PROFILES in self._handlers

    def _in_main_thread(self, signum: int) -> None:
        """Called in the main thread as soon as it executes Python code. May raise exceptions."""

    def _on_signal(self, signum: int) -> None:
        """Called immediately in the listening thread, for the first signal and for each SIGHUP."""

    def _on_profile_signal(self) -> None:
        """Called immediately in the listening thread, for each PROFILES signal."""
        write_now(f"{name(PROFILES)}: ignored, because only a training job can be profiled")

    def _on_second_signal(self, signum: int) -> None:
        """Called immediately in the listening thread for a second signal. Ends the process."""
        cause, outcome = f"{name(signum)}, the second signal", self._outcome()
        write_now(f"{cause}: ended at once{outcome}")
        end_now(128 + signum, f"was ended by {cause}{outcome}")

    def _outcome(self) -> str:
        """Returns a message about the latest checkpoint, to append on exit, or ""."""
        return ""

    def _on_timeout(self) -> None:
        """Called in the listening thread at `_timeout_at`."""

    def _wait_for_listener(self) -> None:
        """Waits in the main thread until the listening thread has handled all earlier signals.

        Only the listening thread knows the number and order of the signals: after a wait in C++,
        Python calls each pending handler once, in the order of signal numbers.
        """
        # Each wait has a separate event, because a second signal may interrupt this wait, and its
        # handler then also waits here.
        caught_up = threading.Event()
        self._waiting.append(caught_up)
        self._write.send(bytes([_WAKE_UP]))
        caught_up.wait(_LISTENER_SECONDS)

    def __enter__(self) -> "SignalListener":
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._handlers, self._is_closing = {}, False
        self._wakeup_fd = -1  # The previous wake-up descriptor; -1 means none.
        self._waiting: list[threading.Event] = []
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            self._wakeup_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            for signum in _stop_signals:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._handlers[signum] = signal.signal(signum, self._handle)
            own_handlers = [listener._handle for listener in _active_listeners]
            if signal.getsignal(PROFILES) in (signal.SIG_DFL, *own_handlers):
                self._handlers[PROFILES] = signal.signal(PROFILES, self._handle)
            _active_listeners.append(self)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._restore()
        self._is_closing = True
        self._write.send(b"\0")
        self._thread.join()
        self._read.close()
        self._write.close()
        if self._raised is not None and error is not self._raised:
            # Some code has replaced the SystemExit with a different exception.
            raise self._raised from None

    def _end(self, status: int) -> None:
        """Raises SystemExit in the main thread, at most once."""
        if self._raised is None:
            self._raised = SystemExit(status)
            raise self._raised

    def _restore(self) -> None:
        if self in _active_listeners:
            _active_listeners.remove(self)
            for signum, handler in self._handlers.items():
                # None means that the handler was not installed by Python and cannot be restored by
                # Python.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._wakeup_fd)

    def _handle(self, signum: int, frame: object) -> None:
        if signum in _stop_signals:
            self._in_main_thread(signum)

    def _listen(self) -> None:
        while not self._is_closing:
            seconds = None
            if self._timeout_at is not None:
                seconds = max(0.0, self._timeout_at - time.monotonic())
            if not select.select([self._read], [], [], seconds)[0]:
                self._timeout_at = None
                self._on_timeout()
                continue
            # Python writes a signal to the socket before it calls the signal's handler, so `recv`
            # returns the signals of all handlers that are waiting now.
            waiting = self._waiting[:]
            # Treat equal signals that arrive together as a single signal: `timeout` signals its
            # command, and then the command's process group.
            for signum in dict.fromkeys(self._read.recv(64)):
                if signum in _stop_signals:
                    self._dispatch(signum)
                elif signum == PROFILES and self.handles_profile_signal:
                    self._on_profile_signal()
            for caught_up in waiting:
                self._waiting.remove(caught_up)
                caught_up.set()

    def _dispatch(self, signum: int) -> None:
        if signum == signal.SIGHUP:
            # SIGHUP is never a second signal, because a closed session sends it after SIGTERM.
            self._on_signal(signum)
        elif self._has_stop_signal:
            self._on_second_signal(signum)
        else:
            self._has_stop_signal = True
            self._on_signal(signum)


class EndsBySignal(SignalListener):
    """Ends the process at the first signal N, with exit status 128 + N.

    No traceback is printed. A SystemExit is raised in the main thread, so that the thread can
    remove incomplete files. If the thread does not exit within CLEAN_UP_SECONDS, for example during
    a compilation, the process is ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._status = 0  # 128 + the number of the first signal, or 0 before the first signal.
        self._why = ""

    def _in_main_thread(self, signum: int) -> None:
        self._end(128 + signum)

    def _on_signal(self, signum: int) -> None:
        if not self._status:
            write_now(f"ended by {name(signum)}")
            self._status, self._why = 128 + signum, f"was ended by {name(signum)}"
            self._timeout_at = time.monotonic() + CLEAN_UP_SECONDS

    def _on_timeout(self) -> None:
        end_now(self._status, self._why)


def name(signum: int) -> str:
    """Returns the name of a signal, such as "SIGTERM" for 15."""
    if signum == STOPS_WORKER:
        return "its supervisor"
    return signal.Signals(signum).name


def listen_to_supervisor_only() -> None:
    """Makes this process, a worker, handle STOPS_WORKER and ignore SIGNALS until it exits."""
    global _stop_signals
    _stop_signals = (STOPS_WORKER,)
    for signum in SIGNALS:
        signal.signal(signum, _ignore)
        # A signal that arrived before STOPS_WORKER may be handled late, by a listening thread.
        for listener in _active_listeners:
            listener._handlers.pop(signum, None)
    for listener in _active_listeners[-1:]:
        listener._handlers[STOPS_WORKER] = signal.signal(STOPS_WORKER, listener._handle)


def _ignore(signum: int, frame: object) -> None:
    """Does nothing. Unlike SIG_IGN, it is not inherited by programs that a worker starts."""


_stop_signals: tuple[int, ...] = SIGNALS
_active_listeners: list[SignalListener] = []


def _restore_in_child() -> None:
    for listener in reversed(_active_listeners[:]):
        listener._restore()
    for signum in SIGNALS:
        if signal.getsignal(signum) is _ignore:
            signal.signal(signum, signal.SIG_DFL)


# A forked process has no listening thread, and would write its signals to its parent's socket. A
# pool that terminates its workers would then stop the training.
os.register_at_fork(after_in_child=_restore_in_child)
