"""Saves one state: copies it to the host immediately, and writes it in a background thread.

On disk, Orbax writes the folder `N.saving`. Then the first process checks that the folder contains
all arrays, computes digests of all files and syncs the files, writes the manifest and the commit,
and renames the folder to `N`. In an object store, TensorStore writes the folder `N`, which becomes
a step when the commit is written. If any process fails, the save fails in all processes and its
files are removed.
"""

import contextlib
import os
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.orbax_write import CancelledWrite, OrbaxWrite
from praxis_lite.checkpoints.steps import step_dirs, step_files
from praxis_lite.checkpoints.stored_arrays import stored_arrays
from praxis_lite.checkpoints.tensorstore_write import TensorStoreWrite
from praxis_lite.core.errors import Error
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.host.object_stores import StorePath
from praxis_lite.job import processes

_BARRIER_SECONDS = 3600.0
# Maximum time to wait for the other processes after a save is cancelled, before all files are
# removed.
_CANCEL_SECONDS = 10.0
_OPEN_FILES = "/proc/self/fd"


class BackgroundSave:
    """A save that is in progress, or has ended.

    Args:
      directory: The folder of all steps.
      manifest: The manifest of the state, to which entries for the files are added.
      name: Name of this save, which is unique in the job and the same in all processes.
      before_commit: Called in every process before its arrays are complete, and in the first
        process again before the commit.
      published: Called in every process after the save is complete.

    Attributes:
      step: The step of the state.
      error: The error with which the save failed, or None.
      failed_alone: Whether this process failed before it could report the error to the others.
      opened: The open folder whose path is passed to Orbax, or None if Orbax has not been called.
    """

    def __init__(
        self,
        directory: Path | StorePath,
        manifest: dict[str, Any],
        name: str,
        before_commit: Callable[[], None],
        published: Callable[[int], None],
    ):
        self.step: int = manifest["step"]
        self.error: Exception | None = None
        self.failed_alone = False
        self._directory, self._manifest, self._published = directory, manifest, published
        self._before_commit = before_commit
        # Object stores have no renames: there, writing commit.json completes the step.
        self._is_local = isinstance(directory, Path)
        self._folder = directory / (f"{self.step}.saving" if self._is_local else str(self.step))
        self._barriers = _Barriers(name)
        self.opened: OpenFolder | None = None
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
                self._clear()
            if isinstance(self._directory, StorePath):
                self._writing = TensorStoreWrite(self._barriers.wait)
                self._writing.begin(self._directory / self._folder.name, state)
                return self._thread.start()
            # Keep the folder open, because `why` looks up its path for messages.
            self.opened = OpenFolder(self._directory)
            self._writing = OrbaxWrite(self._barriers.wait)
            self._writing.begin(self.opened.path / self._folder.name, state)
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
                self._manifest["files"] = step_files.synced_digests(self._folder)
                self._before_commit()
                step_dirs.commit(self._folder, self._manifest)
                step_dirs.publish(self._folder, self._directory / str(self.step))
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
                if self._is_local or not step_dirs.is_committed(self._folder):
                    self._clear()
            except OSError as second:
                self.error.add_note(f"{self._folder} could not be removed: {second}")

    def _clear(self) -> None:
        """Removes files left by a save of this step; in an object store, also an existing step."""
        if not self._is_local:
            return step_dirs.remove_leftover(self._folder)
        for path in step_dirs.set_aside(self._directory, *step_dirs.LEFTOVERS):
            if path.name.startswith(self._folder.name):
                step_dirs.remove_leftover(path)


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
        if os.path.isdir(_OPEN_FILES):
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, file)
            self.path = Path(_OPEN_FILES, str(file))


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
    return re.sub(rf"{_OPEN_FILES}/[0-9]+", lambda name: os.path.realpath(name[0]), text)
