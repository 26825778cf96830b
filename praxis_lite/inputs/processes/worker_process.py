"""A worker process that computes batches for its parent over a pipe."""

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

from praxis_lite.core.errors import ConfigError, OutOfMemory
from praxis_lite.host.lack_of_memory import lack_of_memory, out_of_memory
from praxis_lite.host.user_errors import RemoteError, describe_error
from praxis_lite.inputs.base import IndexedPipeline
from praxis_lite.inputs.batch_arrays import require_numbers

# Exceptions in a worker that are re-raised in the parent as the same class, not as RemoteError.
_KINDS = {"ConfigError": ConfigError, "OutOfMemory": OutOfMemory}
# Schedulers send these signals to all processes in a job; only the parent handles them.
_PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def strided_range(first: int, stride: int, end: int | None) -> Iterable[int]:
    """Returns first, first + stride, ... below `end`; an infinite range if `end` is None."""
    return itertools.count(first, stride) if end is None else range(first, end, stride)


class WorkerProcess:
    """A process that computes a pipeline's batches, up to `num_prefetched` ahead.

    The worker writes each batch to a pipe: a JSON header, then the bytes of the arrays. A second
    pipe sends the pickled pipeline to the worker; when this pipe breaks because the parent has
    exited, the worker also exits.
    """

    def __init__(self, name: str, num_prefetched: int):
        # Spawn, because forking a process with JAX's threads can deadlock.
        context = multiprocessing.get_context("spawn")
        self._requests, requests = context.Pipe()
        self._batches, batches = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run_worker, args=(requests, batches, num_prefetched), name=name, daemon=True
        )
        # Start the resource tracker of multiprocessing first. Otherwise, `start` below would start
        # it for the first worker, and this would unblock the signals.
        resource_tracker.ensure_running()
        # The worker inherits this mask, so Ctrl-C cannot kill it before it ignores SIGINT.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENT_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        # Close the worker's ends here, so that the pipes break when the worker exits.
        requests.close()
        batches.close()
        self._name = f"{name} (process {self._process.pid})"

    def start(
        self, pipeline: IndexedPipeline, indices: tuple[int, int, int | None], rows: slice
    ) -> None:
        """Sends the pipeline to the worker, which then computes its batches.

        Args:
            pipeline: Pipeline that computes the batches; must be picklable.
            indices: Arguments for `strided_range`, which returns the indices of the batches.
            rows: Rows of each global batch to compute.

        Raises:
            ConfigError: The pipeline cannot be pickled, or the process has exited.
        """
        self._name += f" of {type(pipeline).__name__}"
        try:
            self._requests.send((pipeline, indices, rows))
        except (BrokenPipeError, ConnectionResetError):
            raise self._exit_error(indices[0]) from None
        except Exception as error:
            raise ConfigError(
                f"WithWorkers: {type(pipeline).__name__} cannot be sent to worker processes "
                f"({error}). Its settings may contain only functions and classes from importable "
                "modules, and no lambdas. Change them, or set kind='threads'."
            ) from error

    def batch(self, index: int) -> dict[str, np.ndarray]:
        """Waits for the worker's next batch and returns it.

        Args:
            index: Index of the batch, for error messages.

        Raises:
            ConfigError: The process was killed, or the pipeline raised a ConfigError.
            OutOfMemory: The process ran out of memory.
            RemoteError: The pipeline raised another exception. The message contains the worker's
                traceback.
        """
        try:
            # A message is a header, followed by the bytes of each leaf.
            header = json.loads(self._batches.recv_bytes())
            if "error" in header:
                if header["kind"]:
                    raise _KINDS[header["kind"]](header["error"])
                message = f"{self._name} failed at batch {index}"
                summary = header["line"] and f"{message}: {header['line']}"
                raise RemoteError(f"{message}:\n{header['error']}", summary)
            batch = {name: np.empty(shape, dtype) for name, shape, dtype in header["leaves"]}
            for leaf in batch.values():
                self._read_into(leaf)
        except (EOFError, ConnectionResetError):
            raise self._exit_error(index) from None
        return batch

    def _read_into(self, leaf: np.ndarray) -> None:
        remaining = leaf.reshape(-1).view(np.uint8).data
        while remaining:
            num_bytes = os.readv(self._batches.fileno(), [remaining])
            if not num_bytes:
                raise EOFError
            remaining = remaining[num_bytes:]

    def _exit_error(self, index: int) -> ConfigError:
        self._process.join(timeout=5)
        code, advice = self._process.exitcode, ""
        cause = "closed its pipe" if code is None else f"exited with status {code}"
        if code is not None and code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            advice = (
                " The kernel probably ran out of memory: each worker has a copy of the pipeline. "
                "Lower num_workers, or set kind='threads'."
            )
        return ConfigError(
            f"{self._name} {cause} before it returned batch {index}.{advice} Launch the job again "
            "to resume from its latest checkpoint."
        )

    def kill(self) -> None:
        """Kills the worker and waits for it to exit; batches that were not received are lost."""
        self._process.kill()
        self._process.join()
        self._batches.close()
        self._requests.close()


def _run_worker(requests: Connection, batches: Connection, num_prefetched: int) -> None:
    """Computes the requested batches until the last batch is sent or the parent exits."""
    for number in _PARENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENT_SIGNALS)
    # Set this before unpickling the pipeline, which may import JAX: the parent uses the devices.
    os.environ["JAX_PLATFORMS"] = "cpu"
    finished: queue.Queue[_Message] = queue.Queue(num_prefetched)
    threading.Thread(target=_send, args=(finished, batches)).start()
    try:
        pipeline, indices, rows = requests.recv()
        threading.Thread(target=_exit_with_parent, args=(requests,), daemon=True).start()
        for index in strided_range(*indices):
            finished.put(_message(pipeline.rows(index, rows)))
    except BaseException as error:
        if lacking := lack_of_memory(error):
            error = out_of_memory(lacking)
        kind = next((name for name, cls in _KINDS.items() if isinstance(error, cls)), "")
        text = str(error) if kind else traceback.format_exc()
        header = {"error": text, "kind": kind, "line": describe_error(error)}
        finished.put((json.dumps(header).encode(), ()))
    finished.put(None)


_Message = tuple[bytes, Sequence[np.ndarray]] | None


def _message(batch: Mapping[str, np.ndarray]) -> _Message:
    leaves = {name: np.asarray(leaf) for name, leaf in batch.items()}
    for name, leaf in leaves.items():
        require_numbers("WithWorkers", name, leaf)
    # Send dtype names, because bfloat16 has the same type code as two raw bytes.
    header = {"leaves": [(name, leaf.shape, leaf.dtype.name) for name, leaf in leaves.items()]}
    return json.dumps(header).encode(), [np.ascontiguousarray(leaf) for leaf in leaves.values()]


def _send(finished: "queue.Queue[_Message]", batches: Connection) -> None:
    while message := finished.get():
        header, leaves = message
        try:
            batches.send_bytes(header)
            for leaf in leaves:
                remaining = leaf.reshape(-1).view(np.uint8).data
                while remaining:
                    remaining = remaining[os.write(batches.fileno(), remaining) :]
        except OSError:  # The pipe is broken: the parent has exited.
            os._exit(0)


def _exit_with_parent(requests: Connection) -> None:
    # The parent sends nothing more, so this returns only when the parent's end of the pipe closes.
    with contextlib.suppress(EOFError, OSError):
        requests.recv_bytes()
    os._exit(0)
