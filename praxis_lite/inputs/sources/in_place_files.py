"""Files that are read in place: opened when a row is asked for, and refused if they changed."""

import abc
import collections
import dataclasses
import functools
import resource
from typing import Any

from praxis_lite.inputs.sources.base import RowsOfFiles

# Of the open files that the system lets a process have, other parts of it need some.
_MOST_OPEN = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_MOST_OPEN = 16_384 if _MOST_OPEN == resource.RLIM_INFINITY else max(16, _MOST_OPEN // 4)


@dataclasses.dataclass(eq=False)
class OpenedFiles(RowsOfFiles):
    """Source over files in which any row is found."""

    @abc.abstractmethod
    def open_file(self, path: str) -> Any:
        """Opens a file; it is closed with the last reference to the result."""

    def opened(self, file: int) -> Any:
        """Returns the result of `open_file` for a file; those of the last files are cached."""
        result = self._open.get(file)
        if result is None:
            self.require_unchanged(file)
            result = self._open[file] = self.open_file(self.paths[file])
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return result

    @functools.cached_property
    def _open(self) -> collections.OrderedDict[int, Any]:
        return collections.OrderedDict()
