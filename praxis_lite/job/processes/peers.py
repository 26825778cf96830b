"""Ends all processes of a job when one of them fails, and reports which one failed and why.

Without this module, the other processes would wait in a collective until JAX aborts them, and the
error message would not identify the host. Three threads run in each process:

- `_send_heartbeats` writes a heartbeat to JAX's coordination service and reads other processes'
  heartbeats. The first process reads all heartbeats, and every other process reads the first
  process's heartbeat.
- `_wait_for_failure` waits until the coordination service records that a process has failed.
- `_watch_service` checks that the coordination service, which runs in the first process, responds.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from praxis_lite.core.errors import OutOfMemory, PeerLost
from praxis_lite.host.lack_of_memory import causes
from praxis_lite.host.object_stores import StoreUnreachable
from praxis_lite.job import processes
from praxis_lite.job.events import events
from praxis_lite.job.processes.beats import Beats, value_of
from praxis_lite.job.processes.coordinator_gate import wait_until_lost
from praxis_lite.job.processes.exits import end_now, on_end_now
from praxis_lite.job.processes.stacks import GilAlarm

BEAT_SECONDS = 2.0
# A live process may miss heartbeats for a while if C code holds the GIL.
SILENT_SECONDS = 20.0
# After this time without the GIL, a process writes its stacks, before other processes report it as
# silent.
_GIL_SECONDS = 16.0
# JAX's timeout. It must be longer, because JAX aborts processes without identifying the process
# that failed. JAX sends two heartbeats in this time, so it aborts 25 to 50 s after a failure.
JAX_HEARTBEAT_SECONDS = 50
# Time for which the first process, which runs the service, stays alive after a failure, so that the
# other processes can read the reason.
_LINGER_SECONDS = 3.0
_RECORD_SECONDS = 1.0

# Keys in JAX's coordination service.
_BEATS_KEY, _ENDED_KEY = "praxis_lite/beats", "praxis_lite/ended"
_NO_PROCESS = -1  # The process number in the record of a job that ended without a failure.

_threads: list[threading.Thread] = []
_beats: list[Beats] = []  # The heartbeats of this process, once it has called `watch`.
_num_responses = 0  # Number of heartbeats that the service has accepted.
_has_succeeded = threading.Event()  # Set when all processes have finished without an error.
_is_failing = threading.Event()  # Set when this process reports its own failure.


def watch(beats: type[Beats] = Beats) -> None:
    """Starts the threads that watch the other processes and send heartbeats to them."""
    _beats.append(beats(BEAT_SECONDS))
    on_end_now(_record_own_end)
    end_with_connection()
    for work in (_send_heartbeats, _wait_for_failure, _watch_service):
        _threads.append(threading.Thread(target=work, name=f"peers{work.__name__}", daemon=True))
        _threads[-1].start()


def end_with_connection() -> None:
    """Ends this process when its connection to the first process is lost.

    JAX would detect this later, and abort this process without identifying the failed host.
    """

    def wait() -> None:
        wait_until_lost()
        if (membership := processes.membership()) is not None:
            end_now(membership.lost_status)
        if not (_has_succeeded.is_set() or _is_failing.is_set()):
            _end_because_of_first()

    if not processes.is_first():
        threading.Thread(target=wait, name="peers_connection", daemon=True).start()


def _end_because_of_first(
    reason: str = "is gone: it was killed, or its host or network failed",
) -> NoReturn:
    message = f"error: {processes.name(0)} {reason}. Process {processes.index()} also exits.\n"
    os.write(2, message.encode(errors="replace"))
    end_now(1)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Makes all processes of a job end together, after success or when a process fails.

    After an exception in any process, all processes exit with the status of that process. If a
    process was killed, all other processes exit with status 1.
    """
    try:
        yield
    except BaseException as error:
        if (membership := processes.membership()) is not None:
            _end_member(error, membership.lost_status)
        if processes.count() == 1:
            raise
        _fail(error)
    if processes.count() > 1:
        import jax

        # The timeout is long because the first process may have large files to write.
        processes.exchange("the end", "", 3600)
        _has_succeeded.set()
        if processes.membership() is not None:
            _end_first_member_last()
        if processes.is_first() and _threads:
            _record_end(_NO_PROCESS, "", 0)  # Makes `_wait_for_failure` return in all processes.
        for thread in _threads:
            # A daemon thread that runs JAX's C++ code when Python exits would abort the process.
            thread.join()
        jax.distributed.shutdown()


def _end_first_member_last() -> None:
    """Ends the workers of an elastic job, the first worker last.

    The first worker runs the coordination service. If recoverability is enabled, JAX does not wait
    for the other processes at the end, and aborts processes that lose the service.
    """
    if not processes.is_first():
        processes.client().key_value_set(f"{_ENDED_KEY}/{processes.index()}", ".")
        _flush_and_end(0)
    for process in range(1, processes.count()):
        with contextlib.suppress(RuntimeError):  # The process was killed.
            processes.client().blocking_key_value_get(
                f"{_ENDED_KEY}/{process}", int(1000 * _LINGER_SECONDS)
            )


def _end_member(error: BaseException, lost_status: int) -> NoReturn:
    """Ends a worker in an elastic job after an exception; its supervisor informs other workers.

    Args:
      error: The exception.
      lost_status: Exit status if the exception was caused by the loss of another process.
    """
    cause = error.__context__ if isinstance(error, SystemExit) else error
    reason = next(iter(str(cause).splitlines()), "")[:500]
    if isinstance(cause, StoreUnreachable):
        _log.error("%s", reason)
        events.report(why=f"cannot reach a store: {reason}")
        end_now(lost_status)
    if isinstance(cause, PeerLost) or _is_collective_error(error):
        # Most likely a process was lost. Print the error, because the devices may have failed.
        _log.error("lost another process, or the devices failed: %s", reason)
        events.report(why=f"has lost another process, or its devices failed: {reason}")
        end_now(lost_status)
    status, reason = _print_exception(error)
    events.report(why=reason)
    _flush_and_end(status)


def _fail(error: BaseException) -> NoReturn:
    """Records an exception so that all other processes end, and ends this process."""
    if _is_collective_error(error):
        # Most likely, another process failed. Wait for `_wait_for_failure` to report it and to end
        # this process.
        threading.Event().wait(SILENT_SECONDS + 5 * BEAT_SECONDS)
    _is_failing.set()
    status, reason = _print_exception(error)
    _record_end(processes.index(), reason, status)
    _flush_and_end(status)


def _print_exception(error: BaseException) -> tuple[int, str]:
    """Prints an exception, and returns its exit status and a reason for the other processes."""
    status = 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
        error = error.__context__ or error  # The message of this error has already been printed.
    else:
        traceback.print_exception(error)
    name = "" if type(error).__name__ == "ConfigError" else f"{type(error).__name__}: "
    return status, f"ended with status {status}: {name}{str(error)[:2000].rstrip('. ')}"


def _is_collective_error(error: BaseException) -> bool:
    """Returns whether an exception or one of its causes is a device or network failure."""
    for cause in causes(error):
        if isinstance(cause, OutOfMemory):
            return False
        if type(cause).__name__ == "JaxRuntimeError" or "gloo" in str(cause).lower():
            return True
    return False


def _record_end(process: int, reason: str, status: int) -> None:
    """Records a process's end in the coordination service, unless an end is already recorded."""
    record = json.dumps({"process": process, "reason": reason, "status": status})
    with contextlib.suppress(RuntimeError):
        processes.client().key_value_set(_ENDED_KEY, record)


def _record_own_end(status: int, reason: str) -> None:
    """Records that this process exits, even if its main thread is busy. May take a few seconds."""
    if not _has_succeeded.is_set():
        _is_failing.set()
        # Use a thread, because the call never returns if the service is stopped.
        recorder = threading.Thread(
            target=_record_end, args=(processes.index(), reason, status), daemon=True
        )
        recorder.start()
        recorder.join(_RECORD_SECONDS)
        _linger()


def _linger() -> None:
    """Waits, in the process that runs the service, so that other processes can read the record."""
    if processes.is_first() and processes.membership() is None:
        threading.Event().wait(_LINGER_SECONDS)


def _flush_and_end(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _linger()
    # Skip JAX's clean-up, which would wait for the failed process.
    end_now(status)


def _wait_for_failure() -> None:
    """Ends this process when another process has recorded a failure."""
    client = processes.client()
    while not _has_succeeded.is_set():
        try:
            record = json.loads(client.blocking_key_value_get(_ENDED_KEY, 10_000))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            if _has_succeeded.is_set() or _is_failing.is_set():
                return
            _end_because_of_first()
        if record["process"] == _NO_PROCESS:
            return
        # If this process fails for the same reason, it prints its error within a second.
        if record["process"] != processes.index() and not _is_failing.wait(1.0):
            failure = f"{processes.name(record['process'])} {record['reason']}"
            own_name = processes.name(processes.index())
            line = f"[{own_name}] error: {failure}. This process also exits."
            os.write(2, f"{line}\n".encode(errors="replace"))
            _flush_and_end(record["status"] or 1)
        return


def _send_heartbeats() -> None:
    """Exchanges heartbeats, and records silent or stuck processes as failed."""
    global _num_responses
    client, beats = processes.client(), _beats[0]
    process, is_first = processes.index(), processes.is_first()
    while not _has_succeeded.wait(BEAT_SECONDS):
        try:
            client.key_value_set(f"{_BEATS_KEY}/{process}", beats.next_beat(), allow_overwrite=True)
            beats.receive(_newest_beats(client, process))
            stuck = beats.check(client)
        except RuntimeError:
            return  # The service has ended; `_wait_for_failure` ends this process.
        _num_responses += 1
        for other in range(1, processes.count()) if is_first else (0,):
            if (seconds := beats.silent_seconds(other)) >= SILENT_SECONDS:
                _record_end(other, beats.describe_silence(other, seconds), 1)
        if stuck is not None:
            _record_end(stuck, "is stuck, as reported above", 1)
            if stuck == process:
                _is_failing.set()
                _flush_and_end(1)


def _newest_beats(client: Any, process: int) -> dict[int, str]:
    """Returns the heartbeats that this process monitors: all others, or the first process's."""
    if not processes.is_first():
        text = value_of(client, f"{_BEATS_KEY}/0")
        return {0: text} if text is not None else {}
    texts = {
        int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(_BEATS_KEY)
    }
    return {k: text for k, text in texts.items() if k != process}


def _watch_service() -> None:
    """Ends this process if the first process, which runs the service, is suspended.

    It also postpones the alarm that writes this process's stacks. The alarm goes off while C code
    holds the GIL, when no Python thread runs and the other processes receive no heartbeats.
    """
    num_responses = num_silent = 0
    with GilAlarm(_GIL_SECONDS) as alarm:
        while not _has_succeeded.wait(BEAT_SECONDS):
            alarm.postpone()
            num_silent = 0 if _num_responses != num_responses else num_silent + 1
            num_responses = _num_responses
            if num_silent * BEAT_SECONDS >= SILENT_SECONDS and not processes.is_first():
                _end_because_of_first(_beats[0].describe_silence(0, num_silent * BEAT_SECONDS))


_log = logging.getLogger(__name__)
