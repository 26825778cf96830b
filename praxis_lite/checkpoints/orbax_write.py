"""Writes the arrays of a state to files with Orbax.

Orbax is only used to write arrays, in OCDBT format. Its CheckpointManager is not used, because it
treats any stray folder as the newest step, deletes in place, and reports failed saves late or
never. States are restored by `sharded_reading`, because each shard needs a part of the logical
arrays.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.checkpointers import async_checkpointer
from orbax.checkpoint._src.futures import future, signaling_client

from praxis_lite.checkpoints.stored_arrays import ITEMS
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job import processes

_TIMEOUT_SECONDS = 3600
OPEN_FILES = "/proc/self/fd"


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


# Drop Orbax's log messages about failures, which are also raised as exceptions.
logging.getLogger("absl").addFilter(_is_not_from_orbax)


def _run_until_all_done(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine, and returns its result after all tasks that it started are done.

    This replaces a function of Orbax that closes the loop when the first write fails. All other
    writes would then recreate folders that are being removed, and print tracebacks ("Event loop is
    closed").
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    except BaseException:
        loop.set_exception_handler(lambda loop, context: None)  # Report only the first failure.
        raise
    finally:
        while tasks := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(tasks))
        # A cancelled task may have left work running in a thread, such as creating a folder.
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


asyncio_utils._run_sync_via_new_loop = _run_until_all_done

_cancellable = asyncio_utils.cancellable


async def _cancellable_except_commits(awaitable: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes an awaitable cancellable unless it is a TensorStore commit.

    TensorStore completes a commit even if nothing awaits it, and would recreate a removed folder.
    Commits are therefore shielded here, and `_run_until_all_done` waits for them.
    """
    if isinstance(awaitable, ts.Future):
        awaitable = asyncio.shield(_result_of(awaitable))
    return await _cancellable(awaitable, *args, **kwargs)


async def _result_of(commit: ts.Future) -> Any:
    return await commit


asyncio_utils.cancellable = _cancellable_except_commits


class _MonotonicTime:
    """A replacement for the `time` module with a monotonic `time()`."""

    time = staticmethod(time.monotonic)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


# Orbax computes deadlines from the wall clock. A save may fail or hang if the clock is adjusted.
for _module in (async_checkpointer, future, signaling_client):
    _module.time = _MonotonicTime()


class CancelledWrite(Exception):
    """A write was cancelled before it was complete."""

    def __init__(self) -> None:
        super().__init__("it was cancelled by a signal")


class OpenFolder:
    """An open folder whose path contains no characters with a special meaning for Orbax.

    Orbax expands wildcards in paths ("run[1]" matches "run1"), and etils treats /gs/... as a
    bucket. The path of an open file descriptor avoids both problems. The descriptor must not be
    reused while Orbax or TensorStore may still write; see `SaveQueue.begin`.

    Attributes:
      path: "/proc/self/fd/N", or the folder's own path on systems without such paths.
    """

    def __init__(self, folder: Path):
        self.path = folder
        if os.path.isdir(OPEN_FILES):
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, file)
            self.path = Path(OPEN_FILES, str(file))


class OrbaxWrite:
    """A collective write of a state to a new folder.

    Args:
      folder: The new folder.
      barrier: Called in every process when Orbax synchronizes the processes.

    Attributes:
      opened: The open parent of the new folder.
    """

    def __init__(self, folder: Path, barrier: Callable[[], None]):
        self._folder, self.opened = folder, OpenFolder(folder.parent)
        handlers = {item: ocp.PyTreeCheckpointHandler(use_ocdbt=True) for item in ITEMS}
        self._is_cancelled, self._wait_at_barrier, self._num_barriers = False, barrier, 0
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**handlers),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=_TIMEOUT_SECONDS,
                barrier_sync_fn=self._barrier if processes.count() > 1 else None,
            ),
        )

    def begin(self, state: TrainState) -> None:
        """Copies the state to the host, and starts writing it."""
        args = {item: ocp.args.PyTreeSave(getattr(state, item)) for item in ITEMS}
        folder = self.opened.path / self._folder.name
        try:
            self._checkpointer.save(folder, args=ocp.args.Composite(**args))
        except Exception:
            _wait_for_threads()
            raise

    def wait(self) -> None:
        """Waits until the state is written. On failure, waits until all writes stop, and raises."""
        try:
            self._checkpointer.wait_until_finished()
            # Orbax raises no error after a cancellation. After the second barrier, the write is
            # complete.
            if self._is_cancelled and self._num_barriers < 2:
                raise CancelledWrite
        except BaseException:
            _wait_for_threads()
            raise

    def cancel(self) -> None:
        """Cancels the write, so that `wait` raises CancelledWrite. Callable from any thread."""
        self._is_cancelled = True
        self._checkpointer.cancel()
        # Orbax does not know its threads until `begin` has returned, so cancel them directly.
        for thread in _threads():
            if isinstance(thread, future._SignalingThread):
                thread.cancel()

    def _barrier(self, key: str, timeout_ms: int) -> None:
        self._wait_at_barrier()
        self._num_barriers += 1

    def close(self) -> None:
        """Stops Orbax's threads. Errors have already been raised by `wait`."""
        with contextlib.suppress(Exception):
            self._checkpointer.close()


def _wait_for_threads() -> None:
    """Waits for the threads that Orbax leaves running after part of a save has failed.

    A thread that has not started writing would wait up to an hour for a signal from the thread that
    failed. This function sends the signal.
    """
    for thread in _threads():
        if isinstance(thread, future._SignalingThread) and thread.main_task is None:
            future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
    for thread in _threads():
        threading.Thread.join(thread)  # The subclass's `join` would raise the thread's exception.


def _threads() -> list[threading.Thread]:
    """Returns all Orbax threads. They belong to one write, because writes do not overlap."""
    return [
        thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")
    ]
