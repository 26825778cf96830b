"""A worker process: makes its share of the batches, and ends with them or with its parent."""

import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import numpy as np

from praxis_lite.core.errors import ConfigError, Error
from praxis_lite.host.lack_of_memory import lack_of_memory, out_of_memory
from praxis_lite.host.user_errors import RemoteError, describe_error
from praxis_lite.inputs.base import IndexedPipeline
from praxis_lite.inputs.batch_arrays import require_numbers

# That are for the parent; a scheduler sends them to all processes of a job.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def share(first: int, stride: int, end: int | None) -> Iterable[int]:
    """Returns the indices first, first + stride, ... below `end`, or without end for None."""
    return itertools.count(first, stride) if end is None else range(first, end, stride)


class WorkerProcess:
    """A process that makes a share of a pipeline's batches, `num_prefetched` ahead.

    It writes each into a pipe: a header in JSON, then the arrays' bytes. Only the pipeline itself
    goes the other way, as multiprocessing sends an argument; nothing is read from a file.
    """

    def __init__(self, name: str, num_prefetched: int):
        # Spawned, not forked: a copy of a process with JAX's threads hangs sooner or later.
        context = multiprocessing.get_context("spawn")
        self._orders, orders = context.Pipe()
        self._batches, batches = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_work, args=(orders, batches, num_prefetched), name=name, daemon=True
        )
        # Otherwise the first start would do it, and unblock the signals.
        resource_tracker.ensure_running()
        # A child inherits the mask: a Ctrl-C must not reach a worker that does not ignore it yet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Now the worker alone holds these ends: its death closes them.
        orders.close()
        batches.close()
        self._name = f"{name} (process {self._process.pid})"

    def begin(
        self, pipeline: IndexedPipeline, mine: tuple[int, int, int | None], rows: slice
    ) -> None:
        """Tells it to make these rows of the batches `share(*mine)`.

        Raises:
            ConfigError: the pipeline cannot be sent, or the process has ended.
        """
        self._name += f" of {type(pipeline).__name__}"
        try:
            self._orders.send((pipeline, mine, rows))
        except (BrokenPipeError, ConnectionResetError):
            raise self._death(mine[0]) from None
        except Exception as error:
            raise ConfigError(
                f"WithWorkers: {type(pipeline).__name__} cannot be sent to worker processes "
                f"({error}). Use functions and classes of importable modules in its settings, no "
                "lambdas, or set kind='threads'."
            ) from error

    def batch(self, index: int) -> dict[str, np.ndarray]:
        """Waits for its next batch, which is `index`, and returns it.

        Raises:
            ConfigError: the process was killed, or met a ConfigError.
            RuntimeError: the pipeline raised anything else; has the worker's traceback.
        """
        try:
            header = json.loads(self._batches.recv_bytes())
            if "error" in header:
                if header["is_users"]:
                    raise ConfigError(header["error"])
                where = f"{self._name} failed at batch {index}"
                description = header["line"] and f"{where}: {header['line']}"
                raise RemoteError(f"{where}:\n{header['error']}", description)
            batch = {name: np.empty(shape, dtype) for name, shape, dtype in header["leaves"]}
            for leaf in batch.values():
                self._read_into(leaf)
        except (EOFError, ConnectionResetError):
            raise self._death(index) from None
        return batch

    def _read_into(self, leaf: np.ndarray) -> None:
        left = memoryview(leaf.reshape(-1).view(np.uint8))
        while left:
            count = os.readv(self._batches.fileno(), [left])
            if not count:
                raise EOFError
            left = left[count:]

    def _death(self, index: int) -> ConfigError:
        self._process.join(timeout=5)
        code, reason = self._process.exitcode, ""
        how = f"ended with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason = (
                " The kernel does that when memory runs out, and each worker has a copy of the "
                "pipeline: lower num_workers, or set kind='threads'."
            )
        return ConfigError(
            f"{self._name} {how}, and batch {index} did not come.{reason} Launched again, the job "
            "goes on from its newest checkpoint."
        )

    def kill(self) -> None:
        """Ends the process at once: its results are kept nowhere."""
        self._process.kill()
        self._process.join()
        self._batches.close()
        self._orders.close()


def _work(orders: Connection, batches: Connection, num_prefetched: int) -> None:
    """Runs in a worker process, until it has made its last batch or its parent is gone."""
    for item in _SIGNALS:
        signal.signal(item, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    # Before the pipeline's module imports JAX: the accelerators belong to the parent.
    os.environ["JAX_PLATFORMS"] = "cpu"
    finished: queue.Queue[_Message] = queue.Queue(num_prefetched)
    threading.Thread(target=_send, args=(finished, batches)).start()
    try:
        pipeline, mine, rows = orders.recv()
        threading.Thread(target=_end_with_parent, args=(orders,), daemon=True).start()
        for index in share(*mine):
            finished.put(_message(pipeline.rows(index, rows)))
    except BaseException as error:
        if lacking := lack_of_memory(error):
            error = out_of_memory(lacking)
        is_users = isinstance(error, Error)
        text = str(error) if is_users else traceback.format_exc()
        header = {"error": text, "is_users": is_users, "line": describe_error(error)}
        finished.put((json.dumps(header).encode(), ()))
    finished.put(None)


_Message = tuple[bytes, Sequence[np.ndarray]] | None


def _message(batch: Mapping[str, np.ndarray]) -> _Message:
    leaves = {name: np.asarray(leaf) for name, leaf in batch.items()}
    for name, leaf in leaves.items():
        require_numbers("WithWorkers", name, leaf)
    # By name, for the code of a bfloat16 is that of two raw bytes.
    header = {"leaves": [(name, leaf.shape, leaf.dtype.name) for name, leaf in leaves.items()]}
    return json.dumps(header).encode(), [np.ascontiguousarray(leaf) for leaf in leaves.values()]


def _send(finished: "queue.Queue[_Message]", batches: Connection) -> None:
    while message := finished.get():
        header, leaves = message
        try:
            batches.send_bytes(header)
            for leaf in leaves:
                left = memoryview(leaf.reshape(-1).view(np.uint8))
                while left:
                    left = left[os.write(batches.fileno(), left) :]
        except OSError:  # No one reads: the parent is gone.
            os._exit(0)


def _end_with_parent(orders: Connection) -> None:
    # Nothing is ever sent: this returns, or raises, when the parent's end is closed.
    with contextlib.suppress(EOFError, OSError):
        orders.recv_bytes()
    os._exit(0)
