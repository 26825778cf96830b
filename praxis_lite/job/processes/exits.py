"""Ends a process without Python's cleanup, except for the removal of its temporary folders."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_folders: list[Path] = []
_callbacks: list[Callable[[int, str], None]] = []


def temporary_folder() -> Path:
    """Creates a folder that is removed when this process exits, unless it is killed or aborted."""
    _folders.append(Path(tempfile.mkdtemp(prefix="praxis_lite_")))
    return _folders[-1]


@atexit.register
def _remove_folders() -> None:
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


# A forked worker must not remove its parent's folders when it exits.
os.register_at_fork(after_in_child=_folders.clear)
os.register_at_fork(after_in_child=_callbacks.clear)


def on_end_now(callback: Callable[[int, str], None]) -> None:
    """Registers a function that `end_now` calls with the exit status and the reason."""
    _callbacks.append(callback)


def end_now(status: int, why: str = "") -> NoReturn:
    """Ends the process immediately. Callable from any thread, even if other threads are busy.

    Args:
      status: The exit status.
      why: Reason to report to the other processes of the job, such as "was ended by SIGTERM", or ""
        to report nothing.
    """
    if why:
        for callback in _callbacks:
            callback(status, why)
    _remove_folders()
    os._exit(status)
