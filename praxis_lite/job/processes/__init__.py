"""The processes of a job: their indices, and messages between them.

Messages are sent through the coordination service of `jax.distributed` instead of the devices, so
they work even while devices are busy or stuck.

The modules of this package start, watch and end the processes. The package does not depend on
models, mesh axes or the job's files.
"""

import collections
import contextlib
import socket
import threading
import time
from typing import Any

from praxis_lite.core.errors import PeerLost
from praxis_lite.job.events import MEETING, events
from praxis_lite.job.jax_internals import distributed_state
from praxis_lite.job.processes.membership import membership

__all__ = (
    "client",
    "count",
    "count_on_this_host",
    "exchange",
    "host",
    "index",
    "is_first",
    "exchange_host_names",
    "membership",
    "name",
)

_hosts: list[str] = []
_uses: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()


def client() -> Any:
    """Returns the client of JAX's coordination service, or None if there is a single process."""
    return getattr(distributed_state(), "client", None)


def index() -> int:
    """Returns the index of this process in the job, without initializing devices."""
    return distributed_state().process_id if client() else 0


def count() -> int:
    """Returns the number of processes in the job, without initializing devices."""
    return distributed_state().num_processes if client() else 1


def is_first() -> bool:
    """Returns whether this is the process that writes the job's files and prints its output."""
    return index() == 0


def name(process: int) -> str:
    """Returns the name of a process for messages, such as "process 1 (HOST)"."""
    return f"process {process} ({host(process)})" if host(process) else f"process {process}"


def host(process: int) -> str:
    """Returns the host name of a process, or "" before `exchange_host_names` is called."""
    return _hosts[process] if process < len(_hosts) else ""


def exchange_host_names(timeout_seconds: float) -> None:
    """Exchanges the host names of all processes, for `name` and `host`."""
    _hosts[:] = exchange("hosts", socket.gethostname(), timeout_seconds)


def count_on_this_host() -> int:
    """Returns the number of the job's processes on hosts with this host's name."""
    return max(1, sum(host(process) == host(index()) for process in range(count())))


def exchange(name: str, text: str, timeout_seconds: float = 300.0) -> list[str]:
    """Exchanges strings between all processes, which wait for each other.

    `exchange(name, "")` is a barrier.

    Args:
      name: Name of the exchange. The n-th calls with the same name in all processes are matched.
      text: This process's string, of at most about 3 MB.
      timeout_seconds: Maximum time to wait for the other processes.

    Returns:
      The strings of all processes, ordered by process index.

    Raises:
      PeerLost: A process sent no string in time. The message identifies the process.
    """
    service = client()
    if service is None:
        return [text]
    is_main = threading.current_thread() is threading.main_thread()
    with events.phase(MEETING) if is_main else contextlib.nullcontext():
        return _exchange(service, name, text, timeout_seconds)


def _exchange(service: Any, name: str, text: str, timeout_seconds: float) -> list[str]:
    with _lock:
        _uses[name] += 1
        folder = f"praxis_lite/exchange/{name}/{_uses[name]}"
    deadline = time.monotonic() + timeout_seconds
    # Prefix each string with '.', because the service rejects empty values.
    service.key_value_set(f"{folder}/{index()}", f".{text}")
    texts, missing = [], []
    for process in range(count()):
        milliseconds_left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            text = service.blocking_key_value_get(f"{folder}/{process}", milliseconds_left)
        except RuntimeError as error:  # A JaxRuntimeError.
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            missing.append(process)
        else:
            texts.append(text[1:])
    if missing:
        raise _timeout_error(name, missing, timeout_seconds)
    # The last process to read all strings deletes the keys.
    if service.key_value_increment(f"{folder}/readers", 1) == count():
        service.key_value_delete(f"{folder}/")
    return texts


def _timeout_error(exchange_name: str, processes: list[int], seconds: float) -> PeerLost:
    return PeerLost(
        f"{' and '.join(map(name, processes))} did not reach '{exchange_name}' within "
        f"{seconds:.0f} s, because of a hang or because the command differs from that of "
        f"{name(index())}. Check the output, and start the same command on every host."
    )
