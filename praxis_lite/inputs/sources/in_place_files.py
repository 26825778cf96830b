"""Base class of sources that read files in place and open them on first use."""

import abc
import collections
import dataclasses
import functools
import resource
from typing import Any

from praxis_lite.inputs.sources.base import RowsOfFiles

# Use at most a quarter of the file descriptors that the process may open.
_MAX_OPEN = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_MAX_OPEN = 16_384 if _MAX_OPEN == resource.RLIM_INFINITY else max(16, _MAX_OPEN // 4)


@dataclasses.dataclass(eq=False)
class OpenedFiles(RowsOfFiles):
    """Base class of sources over files whose format allows random access to rows."""

    @abc.abstractmethod
    def open_file(self, path: str) -> Any:
        """Opens a file and returns its rows; garbage collection of the rows closes the file."""

    def opened(self, file: int) -> Any:
        """Returns the rows of file number `file`, and keeps recently opened files open."""
        rows = self._open.get(file)
        if rows is None:
            self.require_unchanged(file)
            rows = self._open[file] = self.open_file(self.paths[file])
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        return rows

    @functools.cached_property
    def _open(self) -> collections.OrderedDict[int, Any]:
        return collections.OrderedDict()
