"""The end of a process without Python's own clean-up; its temporary folders are removed."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_folders: list[Path] = []
_told: list[Callable[[int, str], None]] = []


def temporary_folder() -> Path:
    """Returns a new folder, which is removed unless this process is killed or aborts."""
    _folders.append(Path(tempfile.mkdtemp(prefix="praxis_lite_")))
    return _folders[-1]


@atexit.register
def _remove_folders() -> None:
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


# A forked worker that ends must not take its parent's folders with it.
os.register_at_fork(after_in_child=_folders.clear)
os.register_at_fork(after_in_child=_told.clear)


def tell_ends(told: Callable[[int, str], None]) -> None:
    """Registers a function that `end_now` calls with the status and the reason."""
    _told.append(told)


def end_now(status: int, why: str = "") -> NoReturn:
    """Ends the process at once, from any thread, in any state of the other threads.

    Args:
      why: the reason for the other processes of the job, such as "was ended by SIGTERM"; "": they
        know it, or are not informed.
    """
    if why:
        for told in _told:
            told(status, why)
    _remove_folders()
    os._exit(status)
