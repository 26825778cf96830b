"""A folder held open, under a name that every library takes, whatever characters its own has."""

import os
import re
import weakref
from pathlib import Path

_OPEN_FILES = "/proc/self/fd"


class OpenFolder:
    """A folder that is held open while this object lives.

    Orbax globs the paths that it is given ("run[1]" matches "run1"), etils takes /gs/... for a
    bucket, and TensorStore refuses "..". Among the open files of a process each folder has a name
    without any of these.

    Attributes:
      path: "/proc/self/fd/N"; where the system has no such names, the folder's own.

    Raises:
      OSError: it cannot be opened.
    """

    def __init__(self, folder: Path):
        self.path = folder.absolute()
        if os.path.isdir(_OPEN_FILES):
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, file)
            self.path = Path(_OPEN_FILES, str(file))


def own_names(text: str) -> str:
    """Returns a text in which folders that are open have their own names."""
    return re.sub(rf"{_OPEN_FILES}/[0-9]+", lambda name: _own_name(name[0]), text)


def _own_name(name: str) -> str:
    try:
        return os.readlink(name)
    except OSError:  # Closed meanwhile.
        return name
