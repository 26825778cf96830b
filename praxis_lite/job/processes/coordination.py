"""The number of this process in its job, and the messages between processes on the host.

There is nothing but `jax.distributed`. On the devices processes meet in the steps' collectives;
what they tell each other here goes through JAX's coordination service, and works while devices are
busy, or stuck.
"""

import collections
import contextlib
import socket
import threading
import time
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.job.events import MEETING, events
from praxis_lite.job.jax_internals import distributed_state

__all__ = ("PeerLost",)

_hosts: list[str] = []
_uses: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()


class PeerLost(ConfigError):
    """Another process of the job is gone, or did not come: this process cannot continue."""


def client() -> Any:
    """Returns the client of JAX's coordination service, or None if a process runs alone."""
    return getattr(distributed_state(), "client", None)


def index() -> int:
    """Returns the index of this process in the job; makes no device."""
    return distributed_state().process_id if client() else 0


def count() -> int:
    """Returns how many processes the job has; makes no device."""
    return distributed_state().num_processes if client() else 1


def is_first() -> bool:
    """Returns True if this process writes the job's files and speaks for it."""
    return index() == 0


def name(process: int) -> str:
    """Returns "process 1 (its host's name)"."""
    return f"process {process} ({host(process)})" if host(process) else f"process {process}"


def host(process: int) -> str:
    """Returns the name of a process's host; "" before `learn_hosts`."""
    return _hosts[process] if process < len(_hosts) else ""


def learn_hosts(timeout_seconds: float) -> None:
    """Asks every process for the name of its host, for `name`."""
    _hosts[:] = exchange("hosts", socket.gethostname(), timeout_seconds)


def count_on_this_host() -> int:
    """Returns how many processes of the job run here; hosts with the same name count together."""
    return max(1, sum(host(process) == host(index()) for process in range(count())))


def exchange(name: str, text: str, timeout_seconds: float = 300.0) -> list[str]:
    """Returns the texts of all processes under this name, in their order; waits for them all.

    The n-th call with a name, from any thread, meets the n-th of the other processes.
    `exchange(name, "")` is the one barrier there is. A text has at most about 3 MB. Raises
    PeerLost with the names of processes that gave nothing in time.
    """
    service = client()
    if service is None:
        return [text]
    is_main = threading.current_thread() is threading.main_thread()
    with events.phase(MEETING) if is_main else contextlib.nullcontext():
        return _exchanged(service, name, text, timeout_seconds)


def _exchanged(service: Any, name: str, text: str, timeout_seconds: float) -> list[str]:
    with _lock:
        _uses[name] += 1
        folder = f"praxis_lite/exchange/{name}/{_uses[name]}"
    deadline = time.monotonic() + timeout_seconds
    # A '.' before each: the service refuses an empty value.
    service.key_value_set(f"{folder}/{index()}", f".{text}")
    texts, missing = [], []
    for process in range(count()):
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            texts.append(service.blocking_key_value_get(f"{folder}/{process}", left)[1:])
        except RuntimeError as error:  # A JaxRuntimeError.
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            missing.append(process)
    if missing:
        raise _did_not_come(name, missing, timeout_seconds)
    # The last to read takes the keys away.
    if service.key_value_increment(f"{folder}/readers", 1) == count():
        service.key_value_delete(f"{folder}/")
    return texts


def _did_not_come(what: str, processes: list[int], seconds: float) -> PeerLost:
    return PeerLost(
        f"{' and '.join(map(name, processes))} did not come to '{what}' within {seconds:.0f} s: it "
        f"hangs, or does something else than {name(index())}. Look at its output, and start the "
        "same command on every host."
    )
