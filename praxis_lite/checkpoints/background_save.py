"""A single save: the state is copied to the host at once, all else happens in a thread.

Orbax writes `N.saving`. Then the first process checks that all arrays are in it, digests and
syncs every file, writes the manifest and the commit, and renames the folder to its number. A
failure on one process is a failure on all of them, and leaves nothing behind.
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
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job import processes

_MEET_SECONDS = 3600.0
# How long a process that cancels waits for the others' parts, so that all of them can be removed.
_CANCEL_SECONDS = 10.0
_OPEN_FILES = "/proc/self/fd"


class FailedSave(ConfigError):
    """A checkpoint could not be written; says which, why, and what to do."""


class BackgroundSave:
    """A save that has begun.

    Attributes:
      step: of the state.
      error: what made it fail, or None if nothing did so far.
      failed_alone: True if it failed where others of several processes may not have.
      opened: the directory under the path that Orbax gets; None: it has not begun.

    Args:
      directory: of all steps.
      manifest: what is known of the state; its files are added.
      name: of this save among all of the job, the same on all processes.
      published: called by every process once the step has its number.
    """

    def __init__(
        self,
        directory: Path,
        manifest: dict[str, Any],
        name: str,
        published: Callable[[int], None],
    ):
        self.step: int = manifest["step"]
        self.error: Exception | None = None
        self.failed_alone = False
        self._directory, self._manifest, self._published = directory, manifest, published
        self._folder = directory / f"{self.step}.saving"
        self._meeting = _Meeting(name)
        self.opened: OpenFolder | None = None
        self._writing: OrbaxWrite | None = None
        # Waited for in place of the thread: up to Python 3.12 a thread whose `join` a signal has
        # interrupted counts as ended, though it runs.
        self._ended = threading.Event()
        # No daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=self._run, name=f"save of step {self.step}")

    def begin(self, state: TrainState) -> None:
        """Returns once `state` is on the host, or once that has failed; see `error`.

        An exception that a signal raises here cancels the save, and propagates.
        """
        try:
            if processes.is_first():
                self._clear()
            self.opened = OpenFolder(self._directory)  # Kept: `why` reads its name.
            self._writing = OrbaxWrite(self._meeting.meet)
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
        """Waits until it is done; an exception that a signal raises may end this."""
        self._ended.wait()

    def cancel(self) -> bool:
        """Ends the save early and removes its files; returns False if it had ended already.

        Another process, that does not cancel it, hears of it once its own part is written. It is
        waited for, but not for long; what it writes later is removed by the next launch.
        """
        if not self.is_done():
            self._writing.cancel()
        self.join()
        return isinstance(self.error, CancelledWrite)

    def _run(self) -> None:
        try:
            self._writing.wait()
            if processes.is_first():
                stored_arrays(self._folder, self._manifest)  # Orbax may have written less.
                self._manifest["files"] = step_files.synced_digests(self._folder)
                step_dirs.commit(self._folder, self._manifest)
                step_dirs.publish(self._folder, self._directory / str(self.step))
            self._meeting.meet()
        except Exception as error:
            self._fail(error)
        else:
            self._published(self.step)
        finally:
            self._writing.close()
            self._ended.set()

    def _fail(self, error: Exception) -> None:
        self.error = error
        if not self.failed_alone:
            is_cancelled = isinstance(error, CancelledWrite)
            self._meeting.tell(why(error), _CANCEL_SECONDS if is_cancelled else _MEET_SECONDS)
        if processes.is_first():
            try:
                self._clear()
            except OSError as second:
                self.error.add_note(f"{self._folder} could not be removed: {second}")

    def _clear(self) -> None:
        """Removes the files that a save of this step wrote so far."""
        for path in step_dirs.set_aside(self._directory, *step_dirs.LEFTOVERS):
            if path.name.startswith(self._folder.name):
                step_dirs.remove_leftover(path)


class OpenFolder:
    """A folder that is open while this object lives, under a path that Orbax uses unchanged.

    Orbax globs the paths that it is given ("run[1]" matches "run1"), and etils takes /gs/... for a
    bucket. A path of an open file has no such characters. The number of the file must not be
    reused while Orbax or TensorStore may still write: see `SaveQueue.begin`.

    Attributes:
      path: "/proc/self/fd/N"; the folder's own where the system has no such paths.
    """

    def __init__(self, folder: Path):
        self.path = folder
        if os.path.isdir(_OPEN_FILES):
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, file)
            self.path = Path(_OPEN_FILES, str(file))


class _FailedThere(Exception):
    """A save failed, on which processes and why."""


class _Meeting:
    """Where the processes of a save wait for each other, and hear of each other's errors.

    Orbax lets them meet after all have written and after the first has put it together; then we
    do, once the step has its number. A process that fails says so where the others wait next.
    """

    def __init__(self, name: str):
        self._name, self._left = name, ["written", "put together", "published"]

    def meet(self, error: str = "", seconds: float = _MEET_SECONDS) -> None:
        place = self._left.pop(0)
        texts = processes.exchange(f"{self._name}/{place}", error, seconds)
        failed = [f"{processes.name(i)}: {text}" for i, text in enumerate(texts) if text]
        if failed:
            self._left.clear()
            raise _FailedThere("; ".join(failed))

    def tell(self, error: str, seconds: float) -> None:
        """Tells an error, unless it is what another process told; waits `seconds` for them."""
        if self._left:
            with contextlib.suppress(Exception):  # Its message is known here.
                self.meet(error or "an error without words", seconds)


def why(error: BaseException) -> str:
    """Returns the reason of a failure as a short message: the system's, and the path, if known."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (_place(str(error.filename)) if error.filename else "")
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, _FailedThere | ConfigError | CancelledWrite):
        return text
    # TensorStore: OUT_OF_RANGE: ... Failed writing: "PATH": ... [os_error_code='27']
    if code := re.search(r"os_error_code='(\d+)'", text):
        paths = re.findall(r'"(/[^"]+)"', text)
        return os.strerror(int(code[1])) + (_place(paths[-1]) if paths else "")
    return f"{type(error).__name__}: {_own_names(text)[:300]}" if text else type(error).__name__


def _place(path: str) -> str:
    # Names below that folder are Orbax's, and long.
    return " (" + re.sub(r"(/[0-9]+\.saving)[^/]*/.*", r"\1", _own_names(path)) + ")"


def _own_names(text: str) -> str:
    """Returns a text in which open folders have their own paths."""
    return re.sub(rf"{_OPEN_FILES}/[0-9]+", lambda name: os.path.realpath(name[0]), text)
