"""Ends all processes of a job when any of them ends early, and reports which one and why.

Without it the others would wait in a collective until JAX aborts them, naming no host. Each process
has three threads for this. One writes a beat to JAX's coordination service and reads the beats of
others: the first process reads all of them, the other processes that of the first. The second
waits for a note that a process has ended. The third checks that the service answers at all.
"""

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from praxis_lite.core.errors import OutOfMemory
from praxis_lite.host.lack_of_memory import causes
from praxis_lite.job import processes
from praxis_lite.job.events import events
from praxis_lite.job.processes.beats import Beats, value_of
from praxis_lite.job.processes.coordination import PeerLost
from praxis_lite.job.processes.coordinator_gate import wait_until_lost
from praxis_lite.job.processes.exits import end_now, tell_ends
from praxis_lite.job.processes.stacks import AlarmOfLock

BEAT_SECONDS = 2.0
# A process that is alive may hold Python's lock for a while.
SILENT_SECONDS = 20.0
_LOCK_SECONDS = 16.0  # Then it writes its stacks, before the others report it as silent.
# JAX's own. It sends a beat in half of it, so it aborts 25 to 50 s after a death, later than this
# file acts.
JAX_HEARTBEAT_SECONDS = 50
# The first process runs the service, so it stays for so long that the others can read its note.
_LINGER_SECONDS = 3.0
_TELL_SECONDS = 1.0

_BEATS, _ENDED = "praxis_lite/beats", "praxis_lite/ended"
_NONE = -1  # No process has failed: all have ended well.
_threads: list[threading.Thread] = []
_seen: list[Beats] = []  # By this process, once it watches.
_num_answers = 0  # Of the service, to this process's beats.
_is_over = threading.Event()  # Training has ended well, on all processes.
_is_failing = threading.Event()  # This process reports itself why it ends.


def watch(beats: type[Beats] = Beats) -> None:
    """Starts to watch the other processes, and to let them see this process."""
    _seen.append(beats(BEAT_SECONDS))
    tell_ends(_tell_of_own_end)
    end_with_connection()
    for work in (_beat, _listen, _watch_service):
        _threads.append(threading.Thread(target=work, name=f"peers{work.__name__}", daemon=True))
        _threads[-1].start()


def end_with_connection() -> None:
    """Ends this process when its connection to the first one is lost.

    JAX, which hears of it later, would abort this process and name no host.
    """
    def watch() -> None:
        wait_until_lost()
        if (part := processes.membership()) is not None:
            end_now(part.lost_status)
        if not (_is_over.is_set() or _is_failing.is_set()):
            _end_after_first()

    if not processes.is_first():
        threading.Thread(target=watch, name="peers_connection", daemon=True).start()


def _end_after_first(
    words: str = "is gone: it was killed, or its host or network failed"
) -> NoReturn:
    message = f"error: {processes.name(0)} {words}; so process {processes.index()} ends too\n"
    os.write(2, message.encode(errors="replace"))
    end_now(1)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Waits until all processes have ended well, or ends them all when any has failed.

    The status of all is that of the exception, or 1 if a process was killed.
    """
    try:
        yield
    except BaseException as error:
        if processes.membership() is not None:
            _end_member(error)
        if processes.count() == 1:
            raise
        _fail(error)
    if processes.count() > 1:
        import jax

        # Not shorter: the first process may have much to write.
        processes.exchange("the end", "", 3600)
        _is_over.set()
        if processes.membership() is not None:
            _let_the_first_end_last()
        if processes.is_first() and _threads:
            _tell(_NONE, "", 0)  # So that _listen, of all processes, waits no longer.
        for thread in _threads:
            # Python would end them in the middle of JAX's C++, which aborts the process.
            thread.join()
        jax.distributed.shutdown()


def _let_the_first_end_last() -> None:
    """Ends all workers of an elastic job except the first, which runs the service and waits.

    With recoverability JAX does not wait for them, and aborts those that lose the service.
    """
    if not processes.is_first():
        processes.client().key_value_set(f"{_ENDED}/{processes.index()}", ".")
        _leave(0)
    for process in range(1, processes.count()):
        with contextlib.suppress(RuntimeError):  # It was killed.
            processes.client().blocking_key_value_get(
                f"{_ENDED}/{process}", int(1000 * _LINGER_SECONDS)
            )


def _end_member(error: BaseException) -> NoReturn:
    """Ends a process of an elastic job; its supervisor informs the others."""
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(cause, PeerLost) or _is_of_a_collective(error):
        # A lost process is the most likely cause, but the devices may have failed: print the error.
        words = next(iter(str(cause).splitlines()), "")[:500]
        print(f"lost another process, or the devices failed: {words}", file=sys.stderr, flush=True)
        events.report(why=f"has lost another process, or its devices failed: {words}")
        end_now(processes.membership().lost_status)
    code, words = _status_and_words(error)
    events.report(why=words)
    _leave(code)


def _fail(error: BaseException) -> NoReturn:
    if _is_of_a_collective(error):
        # Most likely a peer is gone: `_listen` learns which one, and ends this process.
        threading.Event().wait(SILENT_SECONDS + 5 * BEAT_SECONDS)
    _is_failing.set()
    code, words = _status_and_words(error)
    _tell(processes.index(), words, code)
    _leave(code)


def _status_and_words(error: BaseException) -> tuple[int, str]:
    """Prints an exception; returns its exit status, and a text for the other processes."""
    code = 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        error = error.__context__ or error  # What was printed, as a paragraph, before.
    else:
        traceback.print_exception(error)
    name = "" if type(error).__name__ == "ConfigError" else f"{type(error).__name__}: "
    return code, f"ended with status {code}: {name}{str(error)[:2000].rstrip('. ')}"


def _is_of_a_collective(error: BaseException) -> bool:
    """Returns True if an exception or one of its causes came from the devices or their links."""
    for cause in causes(error):
        if isinstance(cause, OutOfMemory):
            return False
        if type(cause).__name__ == "JaxRuntimeError" or "gloo" in str(cause).lower():
            return True
    return False


def _tell(process: int, words: str, code: int) -> None:
    """Notes for all processes that one has ended; the first note counts."""
    note = json.dumps({"process": process, "words": words, "code": code})
    with contextlib.suppress(RuntimeError):
        processes.client().key_value_set(_ENDED, note)


def _tell_of_own_end(code: int, words: str) -> None:
    """Notes for all that this process ends, in any state of its main thread; takes seconds."""
    if not _is_over.is_set():
        _is_failing.set()
        # The service may be stopped; then its calls never return.
        told = threading.Thread(target=_tell, args=(processes.index(), words, code), daemon=True)
        told.start()
        told.join(_TELL_SECONDS)
        _linger()


def _linger() -> None:
    """Waits so that the others can read the note, if this is the process that runs the service."""
    if processes.is_first() and processes.membership() is None:
        threading.Event().wait(_LINGER_SECONDS)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _linger()
    # JAX's own clean-up would wait for the process that is gone.
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
            _end_after_first()
        if note["process"] == _NONE:
            return
        # Several processes may fail for the same reason: each then prints its own error.
        if note["process"] != processes.index() and not _is_failing.wait(1.0):
            words = f"{processes.name(note['process'])} {note['words']}"
            line = f"[{processes.name(processes.index())}] error: {words}; so this process ends too"
            os.write(2, f"{line}\n".encode(errors="replace"))
            _leave(note["code"] or 1)
        return


def _beat() -> None:
    global _num_answers
    client, beats = processes.client(), _seen[0]
    process, is_first = processes.index(), processes.is_first()
    while not _is_over.wait(BEAT_SECONDS):
        try:
            client.key_value_set(f"{_BEATS}/{process}", beats.own(), allow_overwrite=True)
            beats.see(_beats_of_others(client, process))
            reported = beats.look(client)
        except RuntimeError:
            return  # The service is gone: _listen knows.
        _num_answers += 1
        for other in range(1, processes.count()) if is_first else (0,):
            if (seconds := beats.silent(other)) >= SILENT_SECONDS:
                _tell(other, beats.silent_in_words(other, seconds), 1)
        if reported is not None:
            _tell(reported, "is stuck, as reported above", 1)
            if reported == process:
                _is_failing.set()
                _leave(1)


def _beats_of_others(client: Any, process: int) -> dict[int, str]:
    """Returns the newest beats of all others in the first process, else that of the first."""
    if not processes.is_first():
        text = value_of(client, f"{_BEATS}/0")
        return {0: text} if text is not None else {}
    texts = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(_BEATS)}
    return {k: text for k, text in texts.items() if k != process}


def _watch_service() -> None:
    """Ends this process if the first process, which runs the service, is stopped but not gone.

    Also lets the stacks be written if C code holds Python's lock, so that no thread can run: the
    others see that as silence.
    """
    num_answers = num_silent = 0
    with AlarmOfLock(_LOCK_SECONDS) as alarm:
        while not _is_over.wait(BEAT_SECONDS):
            alarm.put_off()
            num_silent = 0 if _num_answers != num_answers else num_silent + 1
            num_answers = _num_answers
            if num_silent * BEAT_SECONDS >= SILENT_SECONDS and not processes.is_first():
                _end_after_first(_seen[0].silent_in_words(0, num_silent * BEAT_SECONDS))
