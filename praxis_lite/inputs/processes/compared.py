"""Memo of files whose digests were verified by this process or its parent.

A file of 100 GB is so read once by a job's process, and not again by each of its workers.
"""

import os
import time

# Smaller files are compared whenever they are opened. Larger ones are also what is mapped.
SMALLEST = 1 << 20
# A write soon after a comparison may leave the same time of change: clocks of files tick slowly.
_SETTLED_SECONDS = 2.0

_State = tuple[int, ...]
Compared = dict[str, tuple[_State, str]]


def is_compared(path: str, found: os.stat_result, digest: str) -> bool:
    """Returns True if the file was compared with this digest and has not changed since."""
    return _compared.get(path) == (_state(found), digest)


def add(path: str, found: os.stat_result, digest: str) -> None:
    """Remembers that a large file has this digest, unless it was changed only now."""
    if found.st_size > SMALLEST and time.time() - found.st_ctime > _SETTLED_SECONDS:
        _compared[path] = (_state(found), digest)


def known() -> Compared:
    """Returns all that was compared, for `take` in a process that is started."""
    return dict(_compared)


def take(compared: Compared) -> None:
    """Adds the parent process's memo to this process's."""
    _compared.update(compared)


def _state(result: os.stat_result) -> _State:
    # The time of change (ctime) cannot be set, unlike that of modification.
    return result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns, result.st_ctime_ns


_compared: Compared = {}
