"""Saves one state: copies it to the host immediately, and writes it in a background thread.

All processes write their shards to a folder. Then the first process checks that the folder contains
all arrays, and writes the manifest and the commit. If any process fails, the save fails in all
processes and its files are removed.
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.orbax_write import OPEN_FILES, CancelledWrite, OpenFolder, OrbaxWrite
from praxis_lite.checkpoints.steps.step_store import StepStore
from praxis_lite.checkpoints.stored_arrays import stored_arrays
from praxis_lite.checkpoints.tensorstore_write import TensorStoreWrite
from praxis_lite.core.errors import ConfigError, Error
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job import processes

_BARRIER_SECONDS = 3600.0
# Maximum time to wait for the other processes after a save is cancelled, before all files are
# removed.
_CANCEL_SECONDS = 10.0


class BackgroundSave:
    """A save that is in progress, or has ended.

    Args:
      steps: The steps in the directory.
      manifest: The manifest of the state, to which entries for the files are added.
      name: Name of this save, which is unique in the job and the same in all processes.
      before_commit: Called in every process before its arrays are complete, and in the first
        process again before the commit.
      published: Called in every process after the save is complete.

    Attributes:
      step: The step of the state.
      error: The error with which the save failed, or None.
      failed_alone: Whether this process failed before it could report the error to the others.
    """

    def __init__(
        self,
        steps: StepStore,
        manifest: dict[str, Any],
        name: str,
        before_commit: Callable[[], None],
        published: Callable[[int], None],
    ):
        self.step: int = manifest["step"]
        self.error: Exception | None = None
        self.failed_alone = False
        self._steps, self._manifest, self._published = steps, manifest, published
        self._before_commit = before_commit
        self._name = steps.folder_to_write(self.step)
        self._folder = steps.directory / self._name
        self._barriers = _Barriers(name)
        self._writing: OrbaxWrite | TensorStoreWrite | None = None
        # Wait for this event instead of the thread: up to Python 3.12, a thread is treated as
        # finished if its `join` was interrupted by a signal, although it is still running.
        self._ended = threading.Event()
        # Not a daemon thread, so that the interpreter waits for it at exit.
        self._thread = threading.Thread(target=self._run, name=f"save of step {self.step}")

    def begin(self, state: TrainState) -> None:
        """Copies `state` to the host and starts the thread; a failure is stored in `error`.

        If a signal handler raises an exception here, the save is cancelled and the exception
        propagates.
        """
        try:
            if processes.is_first():
                self._steps.clear(self.step)
            folder, wait = self._folder, self._barriers.wait
            if isinstance(folder, Path):
                self._writing = OrbaxWrite(folder, wait)
            else:  # Orbax cannot write to s3:// URLs.
                self._writing = TensorStoreWrite(folder, wait)
            self._writing.begin(state)
        except Exception as error:
            self.failed_alone = processes.count() > 1
            self._fail(error)
            self._ended.set()
        except BaseException:
            if self._writing is not None:
                self._writing.cancel()
                with contextlib.suppress(Exception):
                    self._writing.wait()
                self._writing.close()
            self._fail(CancelledWrite())
            self._ended.set()
            raise
        else:
            self._thread.start()

    def is_done(self) -> bool:
        return self._ended.is_set()

    def join(self) -> None:
        """Waits until the save ends. A signal handler may interrupt the wait with an exception."""
        self._ended.wait()

    def cancel(self) -> bool:
        """Cancels the save and removes its files. Returns False if the save has already ended.

        The other processes are notified at their next barrier. This process waits for a short time;
        files that the other processes write later are removed by the next launch.
        """
        if not self.is_done():
            assert self._writing is not None, "`begin` has been called."
            self._writing.cancel()
        self.join()
        return isinstance(self.error, CancelledWrite)

    def _run(self) -> None:
        writing = self._writing
        assert writing is not None, "`begin` has set it."
        try:
            self._before_commit()
            writing.wait()
            if processes.is_first():
                # Check that all arrays were written, because Orbax may omit some without an error.
                stored_arrays(self._folder, self._manifest)
                self._manifest["files"] = self._steps.file_entries(self._name)
                self._before_commit()
                self._steps.commit(self._name, self._manifest)
                self._steps.publish(self.step)
            self._barriers.wait()
        except Exception as error:
            self._fail(error)
        else:
            self._published(self.step)
        finally:
            writing.close()
            self._ended.set()

    def _fail(self, error: Exception) -> None:
        self.error = error
        if not self.failed_alone:
            is_cancelled = isinstance(error, CancelledWrite)
            seconds = _CANCEL_SECONDS if is_cancelled else _BARRIER_SECONDS
            self._barriers.report_error(why(error), seconds)
        if processes.is_first():
            try:
                self._steps.discard(self.step)
            except (OSError, ConfigError) as second:
                self.error.add_note(f"{self._folder} could not be removed: {second}")

    @property
    def opened(self) -> OpenFolder | None:
        """A folder that must stay open until the next save has started, or None."""
        return None if self._writing is None else self._writing.opened


class _PeerFailed(Exception):
    """The save failed in other processes. The message lists each process and its error."""


class _Barriers:
    """The barriers of a save, at which the processes also exchange errors.

    `OrbaxWrite` and `TensorStoreWrite` wait at the first barrier after each process has written its
    files, and at the second barrier after the first process has merged the files. The third barrier
    is after the first process has completed the step. A process that fails reports its error at the
    next barrier.
    """

    def __init__(self, name: str):
        self._name, self._remaining = name, ["written", "merged", "published"]

    def wait(self, error: str = "", seconds: float = _BARRIER_SECONDS) -> None:
        """Waits at the next barrier. Raises _PeerFailed if any process reports an error there."""
        barrier = self._remaining.pop(0)
        texts = processes.exchange(f"{self._name}/{barrier}", error, seconds)
        failed = [f"{processes.name(i)}: {text}" for i, text in enumerate(texts) if text]
        if failed:
            self._remaining.clear()
            raise _PeerFailed("; ".join(failed))

    def report_error(self, error: str, seconds: float) -> None:
        """Reports an error at the next barrier, unless another process has ended the save."""
        if self._remaining:
            with contextlib.suppress(Exception):  # `wait` raises this process's own error.
                self.wait(error or "an error without a message", seconds)


def why(error: BaseException) -> str:
    """Returns a short reason for a failed save: the operating system's message and the path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (_location(str(error.filename)) if error.filename else "")
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, _PeerFailed | Error | CancelledWrite):
        return text
    # TensorStore: OUT_OF_RANGE: ... Failed writing: "PATH": ... [os_error_code='27']
    if code := re.search(r"os_error_code='(\d+)'", text):
        paths = re.findall(r'"(/[^"]+)"', text)
        return os.strerror(int(code[1])) + (_location(paths[-1]) if paths else "")
    return f"{type(error).__name__}: {_real_paths(text)[:300]}" if text else type(error).__name__


def _location(path: str) -> str:
    # Remove the long names of Orbax's files inside the folder.
    return " (" + re.sub(r"(/[0-9]+\.saving)[^/]*/.*", r"\1", _real_paths(path)) + ")"


def _real_paths(text: str) -> str:
    """Replaces the paths of open file descriptors in a message with the paths of the files."""
    return re.sub(rf"{OPEN_FILES}/[0-9]+", lambda name: os.path.realpath(name[0]), text)
