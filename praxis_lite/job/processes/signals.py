"""Signals that ask a process to end or for a profile, heard at once in any state of the process.

Python runs the handler of a signal in the main thread, between two bytecodes: a compiler or a wait
for devices holds it up for minutes. Underneath, C code writes the number of the signal to a socket
the moment it comes (`signal.set_wakeup_fd`), and a thread reads it there.
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

__all__ = ("STOPS_WORKER", "SignalListener", "hear_supervisor_alone", "name", "say")

# SIGHUP: the terminal is gone. Under nohup it is ignored, and stays so.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# From a supervisor to its worker, which does not hear SIGNALS: SLURM sends them to all processes of
# a host, and two of them would end the worker before it has saved.
STOPS_WORKER = signal.SIGUSR2

# It asks for a profile; unheard it would end the process.
PROFILES = signal.SIGUSR1

# A byte that is not the number of a signal: all signals that came before it have been read.
_MARK = 255
# The thread may wait for a lock that the main thread holds.
_HEAR_SECONDS = 1.0

# How long the main thread may take to clean up, when it ends without a checkpoint to write.
CLEAN_UP_SECONDS = 2.0


class SignalListener(contextlib.AbstractContextManager):
    """Hears SIGNALS and PROFILES while it is entered; a subclass defines what they do.

    A worker hears STOPS_WORKER in place of SIGNALS.

    Outside the main thread Python installs no handlers, so no signal is heard there. A signal that
    was ignored before stays ignored, and the user's handler of PROFILES is kept.
    """

    def __init__(self) -> None:
        # When _time_is_up is called, in seconds of time.monotonic; only the thread changes it.
        self._wakes_at: float | None = None
        self._has_heard_one = False
        self._raised: SystemExit | None = None
        self._handlers: dict[int, Any] = {}  # That were there before.

    @property
    def hears_profiles(self) -> bool:
        """Returns True if PROFILES is heard: entered in the main thread, with no handler before."""
        return PROFILES in self._handlers

    def _in_main(self, signum: int) -> None:
        """Called in the main thread, as soon as that runs Python again; may raise."""

    def _asked(self, signum: int) -> None:
        """Called in the thread, at once, for the first signal, and for each SIGHUP."""

    def _profile_asked(self) -> None:
        """Called in the thread, at once, for each PROFILES."""
        say(f"{name(PROFILES)}: no profile is made, because no training runs")

    def _asked_again(self, signum: int) -> None:
        """Called in the thread, at once, for a second signal; ends the process."""
        words, kept = f"{name(signum)}, the second signal", self._kept()
        say(f"{words}: ended at once{kept}")
        end_now(128 + signum, f"was ended by {words}{kept}")

    def _kept(self) -> str:
        """Returns words for the end of a line: what an end at once leaves."""
        return ""

    def _time_is_up(self) -> None:
        """Called in the thread, at `_wakes_at`."""

    def _let_thread_hear(self) -> None:
        """Returns once the thread has heard all signals that came; for the main thread.

        Python calls the handlers of signals that came while it waited in C++ in the order of their
        numbers, and each once: the thread alone knows which came first, and how many.
        """
        self._has_heard.clear()
        self._write.send(bytes([_MARK]))
        self._has_heard.wait(_HEAR_SECONDS)

    def __enter__(self) -> "SignalListener":
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._handlers, self._wakeup_fd, self._is_closing = {}, None, False
        self._has_heard = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            self._wakeup_fd = signal.set_wakeup_fd(
                self._write.fileno(), warn_on_full_buffer=False
            )
            for item in _asking:
                if signal.getsignal(item) is not signal.SIG_IGN:
                    self._handlers[item] = signal.signal(item, self._handle)
            if signal.getsignal(PROFILES) in (signal.SIG_DFL, *(one._handle for one in _entered)):
                self._handlers[PROFILES] = signal.signal(PROFILES, self._handle)
            _entered.append(self)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._restore()
        self._is_closing = True
        self._write.send(b"\0")
        self._thread.join()
        self._read.close()
        self._write.close()
        if self._raised is not None and error is not self._raised:
            # Some code made another exception of it.
            raise self._raised from None

    def _end(self, status: int) -> None:
        """Raises SystemExit, once; for the main thread."""
        if self._raised is None:
            self._raised = SystemExit(status)
            raise self._raised

    def _restore(self) -> None:
        if self in _entered:
            _entered.remove(self)
            for item, handler in self._handlers.items():
                # Python cannot put back a handler that it has not installed (None).
                signal.signal(item, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._wakeup_fd)

    def _handle(self, signum: int, frame: object) -> None:
        if signum in _asking:
            self._in_main(signum)

    def _listen(self) -> None:
        while not self._is_closing:
            seconds = None
            if self._wakes_at is not None:
                seconds = max(0.0, self._wakes_at - time.monotonic())
            if not select.select([self._read], [], [], seconds)[0]:
                self._wakes_at = None
                self._time_is_up()
                continue
            # `timeout` signals its command and then the command's group: that counts as one signal.
            for signum in dict.fromkeys(self._read.recv(64)):
                if signum in _asking:
                    self._heard(signum)
                elif signum == PROFILES and self.hears_profiles:
                    self._profile_asked()
                elif signum == _MARK:
                    self._has_heard.set()

    def _heard(self, signum: int) -> None:
        if signum == signal.SIGHUP:
            # A session that is closed sends SIGHUP next to SIGTERM, so SIGHUP is never the second.
            self._asked(signum)
        elif self._has_heard_one:
            self._asked_again(signum)
        else:
            self._has_heard_one = True
            self._asked(signum)


class EndsBySignal(SignalListener):
    """Ends the process at the first signal: a line, exit status 128 + its number, no traceback.

    The main thread gets a SystemExit, so that it removes what it has half written. If that does not
    end it in time, in a compiler for instance, the process ends all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._status: int | None = None
        self._why = ""

    def _in_main(self, signum: int) -> None:
        self._end(128 + signum)

    def _asked(self, signum: int) -> None:
        if self._status is None:
            say(f"ended by {name(signum)}")
            self._status, self._why = 128 + signum, f"was ended by {name(signum)}"
            self._wakes_at = time.monotonic() + CLEAN_UP_SECONDS

    def _time_is_up(self) -> None:
        end_now(self._status, self._why)


def name(signum: int) -> str:
    """Returns "SIGTERM" for 15."""
    if signum == STOPS_WORKER:
        return "its supervisor"
    return signal.Signals(signum).name


def say(line: str) -> None:
    """Writes a line to standard error past Python's buffers, which another thread may hold."""
    # A terminal shows the half of a line that is redrawn in place, or ^C.
    start = "\n" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{start}{line}\n".encode())


def hear_supervisor_alone() -> None:
    """Lets this process, a worker, hear STOPS_WORKER in place of SIGNALS."""
    global _asking
    _asking = (STOPS_WORKER,)
    for item in SIGNALS:
        signal.signal(item, _unheard)
    for listener in _entered[-1:]:
        listener._handlers[STOPS_WORKER] = signal.signal(STOPS_WORKER, listener._handle)


def _unheard(signum: int, frame: object) -> None:
    """Does nothing. SIG_IGN would be inherited by the programs that a worker starts."""


_asking: tuple[int, ...] = SIGNALS
_entered: list[SignalListener] = []


def _forget() -> None:
    for listener in reversed(_entered[:]):
        listener._restore()
    for item in SIGNALS:
        if signal.getsignal(item) is _unheard:
            signal.signal(item, signal.SIG_DFL)


# A forked worker has no listening thread, and would write its signals to the parent's socket: a
# pool that ends its workers would end the training.
os.register_at_fork(after_in_child=_forget)
