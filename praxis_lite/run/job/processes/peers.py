"""Ends all processes of a job when any of them ends before its time, and names it and the reason.

Without it the others would wait in a collective: JAX aborts them, naming no host, when a heartbeat
has been missed for 100 s. Each process has two threads here. One writes a beat to JAX's
coordination service, and in the first process reads all beats; the other waits there for word
that a process has ended.
"""

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

from praxis_lite.core.errors import OutOfMemory
from praxis_lite.host.lack_of_memory import causes
from praxis_lite.run.job import processes
from praxis_lite.run.job.elastic import order
from praxis_lite.run.job.elastic.order import LOST_PEER_STATUS
from praxis_lite.run.job.processes.aborts import speaking_before_aborts
from praxis_lite.run.job.processes.coordination import PeerLost
from praxis_lite.run.job.processes.exits import end_now

BEAT_SECONDS = 2.0
# A process that is alive may hold Python's lock for a while.
SILENT_SECONDS = 20.0
# JAX's own, for a first process that is stopped but not gone, which this file does not see. JAX
# sends a beat in half of it, so it aborts 25 to 50 s after a death, later than this file acts.
JAX_HEARTBEAT_SECONDS = 50
# How long the first process, which has the service, stays so that the others hear its word.
_LINGER_SECONDS = 3.0
_GONE = "is gone: it was killed, or its host or network failed"

_BEATS, _ENDED = "praxis_lite/beats", "praxis_lite/ended"
_NONE = -1  # No process has failed: all have ended well.
_threads: list[threading.Thread] = []
_last_words = contextlib.ExitStack()
_is_over = threading.Event()  # Training has ended well, on all processes.
_is_failing = threading.Event()  # This process says itself why it ends.


def watch() -> None:
    """Starts to watch the other processes, and to let them see this process."""
    _last_words.enter_context(speaking_before_aborts(_say_that_first_is_gone))
    for work in (_beat, _listen):
        _threads.append(threading.Thread(target=work, name=f"peers{work.__name__}", daemon=True))
        _threads[-1].start()


def _say_that_first_is_gone() -> None:
    """Says so even if JAX's own thread hears of it first.

    JAX then aborts, from the very thread that would bring _listen its answer.
    """
    if not processes.is_first() and not processes.first_answers():
        _first_is_gone()


def _first_is_gone() -> NoReturn:
    message = f"error: {processes.name(0)} {_GONE}; so process {processes.index()} ends too\n"
    os.write(2, message.encode())
    end_now(1)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Waits until all processes have ended well, or ends them all when any has failed.

    The status of all is that of the exception, or 1 if a process was killed.
    """
    try:
        yield
    except BaseException as error:
        if order.current() is not None:
            _end_worker(error)
        if processes.count() == 1:
            raise
        _fail(error)
    if processes.count() > 1:
        import jax

        # Not shorter: the first process may have much to write.
        processes.exchange("the end", "", 3600)
        _is_over.set()
        if order.current() is not None:
            _let_the_first_end_last()
        if processes.is_first() and _threads:
            _tell(_NONE, "", 0)  # So that _listen, of all processes, waits no longer.
        for thread in _threads:
            # Python would end them in the middle of JAX's C++, which aborts the process.
            thread.join()
        jax.distributed.shutdown()


def _let_the_first_end_last() -> None:
    """Ends the workers of an elastic job but the first, which has the service and waits for them.

    JAX itself lets none wait that may be lost, and aborts those that find the service gone.
    """
    if not processes.is_first():
        processes.client().key_value_set(f"{_ENDED}/{processes.index()}", ".")
        _leave(0)
    for process in range(1, processes.count()):
        with contextlib.suppress(RuntimeError):  # It was killed.
            processes.client().blocking_key_value_get(
                f"{_ENDED}/{process}", int(1000 * _LINGER_SECONDS)
            )


def end_when_aborted() -> None:
    """Lets a worker of an elastic job end as one that has lost a peer, if JAX aborts it."""
    _last_words.enter_context(speaking_before_aborts(lambda: end_now(LOST_PEER_STATUS)))


def _end_worker(error: BaseException) -> NoReturn:
    """Ends the worker of an elastic job; its supervisor tells the others."""
    if isinstance(error, PeerLost | SystemExit) and isinstance(
        error.__context__ if isinstance(error, SystemExit) else error, PeerLost
    ) or _is_of_a_collective(error):
        end_now(LOST_PEER_STATUS)
    code, words = 1, str(error)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        words = str(error.__context__ or "")
    else:
        traceback.print_exception(error)
        words = f"{type(error).__name__}: {words}"
    order.report(why=f"ended with status {code}: {words[:2000].rstrip('. ')}")
    _leave(code)


def _fail(error: BaseException) -> NoReturn:
    if _is_of_a_collective(error):
        # Most likely its peer is gone: _listen hears which one that is, and ends this process.
        threading.Event().wait(SILENT_SECONDS + 5 * BEAT_SECONDS)
    _is_failing.set()
    code = 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        error = error.__context__ or error  # What was printed, as a paragraph, before.
    else:
        traceback.print_exception(error)
    name = "" if type(error).__name__ == "ConfigError" else f"{type(error).__name__}: "
    words = str(error)[:2000].rstrip(". ")
    _tell(processes.index(), f"ended with status {code}: {name}{words}", code)
    _leave(code)


def _is_of_a_collective(error: BaseException) -> bool:
    """Returns True if an exception, or its cause, is of the devices or their links."""
    for cause in causes(error):
        if isinstance(cause, OutOfMemory):
            return False
        if type(cause).__name__ == "JaxRuntimeError" or "gloo" in str(cause).lower():
            return True
    return False


def _tell(process: int, words: str, code: int) -> None:
    """Says to all that a process has ended; what was said first counts."""
    note = json.dumps({"process": process, "words": words, "code": code})
    with contextlib.suppress(RuntimeError):
        processes.client().key_value_set(_ENDED, note)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if processes.is_first() and order.current() is None:
        threading.Event().wait(_LINGER_SECONDS)
    # No clean-up of JAX's: it would wait for the process that is gone.
    end_now(code)


def _listen() -> None:
    client = processes.client()
    while not _is_over.is_set():
        try:
            note = json.loads(client.blocking_key_value_get(_ENDED, 10_000))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            if _is_over.is_set() or _is_failing.is_set():
                return
            _first_is_gone()
        if note["process"] == _NONE:
            return
        # Several processes may fail of the same: each says it in its own words.
        if note["process"] != processes.index() and not _is_failing.wait(1.0):
            words = f"{processes.name(note['process'])} {note['words']}"
            line = f"[{processes.name(processes.index())}] error: {words}; so this process ends too"
            os.write(2, f"{line}\n".encode(errors="replace"))
            _leave(note["code"] or 1)
        return


def _beat() -> None:
    client, number = processes.client(), 0
    last: dict[int, str | None] = {}
    num_silent = dict.fromkeys(range(1, processes.count()), 0)
    while not _is_over.wait(BEAT_SECONDS):
        number += 1
        try:
            client.key_value_set(
                f"{_BEATS}/{processes.index()}", str(number), allow_overwrite=True
            )
            beats = dict(client.key_value_dir_get(_BEATS)) if processes.is_first() else {}
        except RuntimeError:
            return  # The service is gone: _listen knows.
        if not processes.is_first():
            continue
        for process in num_silent:
            beat = beats.get(f"{_BEATS}/{process}")
            # In beats of this process, not in seconds: it may have been stopped itself.
            num_silent[process] = 0 if beat != last.get(process) else num_silent[process] + 1
            last[process] = beat
            if num_silent[process] * BEAT_SECONDS >= SILENT_SECONDS:
                silent = f"has not been heard of for {SILENT_SECONDS:.0f} s"
                _tell(process, _GONE.replace("is gone", silent), 1)
