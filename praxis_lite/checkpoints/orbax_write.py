"""Writes a state's arrays to files with Orbax; nothing else of Orbax is used.

Only OCDBT is written. Orbax's CheckpointManager is not used: it takes a stray folder for the
newest step, deletes in place, and reports a failed save late or never. Nor does Orbax restore:
`sharded_reading` reads each shard's part of the logical arrays.
"""

import asyncio
import contextlib
import logging
import threading
import time
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


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


# Failures are raised as our own errors; Orbax's log would report them twice.
logging.getLogger("absl").addFilter(_is_not_of_orbax)


def _run_to_the_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns a coroutine's result once all that it began is over.

    Orbax closes the loop at the first write that fails. The others would then make folders anew
    while we remove them, and each print a traceback: "Event loop is closed".
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    except BaseException:
        loop.set_exception_handler(lambda loop, context: None)  # Only the first failure is told.
        raise
    finally:
        while left := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(left))
        # A cancelled task leaves behind what it began in a thread: making a folder, say.
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


asyncio_utils._run_sync_via_new_loop = _run_to_the_end

_cancellable = asyncio_utils.cancellable


async def _cancellable_but_commits(awaitable: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of an awaitable that may be cancelled, unless TensorStore commits it.

    TensorStore finishes a commit that nobody awaits any more, and would make the folder again after
    it was removed: `_run_to_the_end` waits for the task that is shielded here.
    """
    if isinstance(awaitable, ts.Future):
        awaitable = asyncio.shield(_result_of(awaitable))
    return await _cancellable(awaitable, *args, **kwargs)


async def _result_of(commit: ts.Future) -> Any:
    return await commit


asyncio_utils.cancellable = _cancellable_but_commits


class _SteadyTime:
    """The module `time`, with a `time()` that no change of the system's clock moves."""

    time = staticmethod(time.monotonic)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


# Orbax computes deadlines from the wall clock: where that is set, a save fails or never ends.
for _module in (async_checkpointer, future, signaling_client):
    _module.time = _SteadyTime()


class CancelledWrite(Exception):
    """A write was cancelled before it was whole."""

    def __init__(self) -> None:
        super().__init__("it was cancelled by a signal")


class OrbaxWrite:
    """A state that is being written to a new folder, by all processes.

    Args:
      meet: called by every process where Orbax would let them wait for each other.
    """

    def __init__(self, meet: Callable[[], None]):
        handlers = {item: ocp.PyTreeCheckpointHandler(use_ocdbt=True) for item in ITEMS}
        self._is_cancelled, self._meet, self._num_met = False, meet, 0
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**handlers),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=_TIMEOUT_SECONDS,
                barrier_sync_fn=self._barrier if processes.count() > 1 else None,
            ),
        )

    def begin(self, folder: Path, state: TrainState) -> None:
        """Takes everything to the host; what `folder` has in the end is not there yet."""
        args = {item: ocp.args.PyTreeSave(getattr(state, item)) for item in ITEMS}
        try:
            self._checkpointer.save(folder, args=ocp.args.Composite(**args))
        except Exception:
            _wait_for_threads()
            raise

    def wait(self) -> None:
        """Waits until `folder` is there, or nothing writes to it any more; raises what failed."""
        try:
            self._checkpointer.wait_until_finished()
            # Orbax says nothing then, as of a write that is whole. After the second barrier it is.
            if self._is_cancelled and self._num_met < 2:
                raise CancelledWrite
        except BaseException:
            _wait_for_threads()
            raise

    def cancel(self) -> None:
        """Makes `wait` end early and raise CancelledWrite, unless it is over; from any thread."""
        self._is_cancelled = True
        self._checkpointer.cancel()
        # Orbax knows of its writes only once `begin` is over.
        for thread in _threads():
            if isinstance(thread, future._SignalingThread):
                thread.cancel()

    def _barrier(self, key: str, timeout_ms: int) -> None:
        self._meet()
        self._num_met += 1

    def close(self) -> None:
        """Ends its threads; what failed was told by `wait`."""
        with contextlib.suppress(Exception):
            self._checkpointer.close()


def _wait_for_threads() -> None:
    """Waits for the writes that Orbax leaves running after another part of the save failed.

    A part that has not begun waits, for an hour, for a signal of the part that failed. It is given
    the signal, and ends as the others do.
    """
    for thread in _threads():
        if isinstance(thread, future._SignalingThread) and thread.main_task is None:
            future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
    for thread in _threads():
        threading.Thread.join(thread)  # Its own join raises what it met.


def _threads() -> list[threading.Thread]:
    """Returns Orbax's threads, which are those of a single write."""
    return [
        thread for thread in threading.enumerate()
        if type(thread).__module__.startswith("orbax.")
    ]
