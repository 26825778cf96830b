"""The end of a process without Python's own clean-up; its temporary folders are removed."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

_folders: list[Path] = []


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


def end_now(status: int) -> NoReturn:
    """Ends the process at once, from any thread, whatever the others are doing."""
    _remove_folders()
    os._exit(status)
