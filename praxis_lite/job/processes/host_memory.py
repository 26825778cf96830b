"""How much memory the machine, the container and its own limit still allow this process."""

import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

# Of each version of control groups: the limit, what is used, and the page cache's prefix.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def available_bytes(root: Path = Path("/")) -> float:
    """Returns how many bytes this process might still get, or infinity if that is not known.

    In a container /proc/meminfo speaks of the whole machine, so control groups are asked too. /proc
    and /sys are below `root`.
    """
    meminfo = _read(root / "proc/meminfo")
    found = {name: 1024 * int(kilobytes) for name, kilobytes in
             re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)}
    left = [found.get("MemAvailable", math.inf), *_left_in_groups(root)]
    return min(min(left) + found.get("SwapFree", 0), _left_of_own_limit())


def _left_in_groups(root: Path) -> Iterator[float]:
    """Yields the free bytes in each memory control group that this process is in."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version, base = 2, root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            version, base = 1, root / "sys/fs/cgroup/memory"
        else:
            continue
        # Parents' limits hold as well. If the path is one of the host's tree, which is not mounted
        # in the container, the base is the container's own group.
        folder = base / path.strip("/")
        for group in (folder, *folder.parents):
            yield _left_in_group(group, *_FILES[version])
            if group == base:
                break


def _left_in_group(group: Path, limit: str, usage: str, prefix: str) -> float:
    maximum, used = _read(group / limit).strip(), _read(group / usage).strip()
    if not (maximum.isdigit() and used.isdigit()):  # "max", or there is no such file.
        return math.inf
    cache = re.findall(
        rf"^{prefix}(?:in)?active_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE
    )
    return max(int(maximum) - int(used) + sum(map(int, cache)), 0)


def _left_of_own_limit() -> float:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    mapped = _read(Path("/proc/self/statm")).split()
    if limit == resource.RLIM_INFINITY or not mapped:
        return math.inf
    return limit - int(mapped[0]) * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    """Returns a file's text, or "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
