"""The memory that the machine, the container and ulimit still allow this process.

Checks whether a compiled program can run with it.
"""

import math
import re
import resource
from collections.abc import Collection, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from praxis_lite.core.errors import OutOfMemory, format_bytes

if TYPE_CHECKING:
    import jax

__all__ = ("FirstRuns", "available_bytes", "check_program_fits", "check_room_for_devices")

# The kernel's figures are estimates: what is refused lacks more than that.
_SLACK = 1.05

# Of each version of control groups: the limit, what is used, and the page cache's prefix.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def available_bytes(root: Path = Path("/")) -> float:
    """Returns the number of bytes that this process might still get.

    In a container psutil reports the complete machine, so control groups are read as well, from
    /proc and /sys below `root`.
    """
    left = [psutil.virtual_memory().available, *_left_in_groups(root)]
    return min(min(left) + psutil.swap_memory().free, _left_of_own_limit())


def check_room_for_devices(num_simulated: int) -> None:
    """Checks that the limit of this process's address space suffices for JAX's threads.

    Otherwise JAX aborts. It needs 1.3 GiB for one simulated device and a tiny model, 1.8 GiB for
    eight, measured on two cores; only clearly smaller limits are refused.

    Raises:
      OutOfMemory: It does not.
    """
    least, left = 2**30 + num_simulated * 2**26, _left_of_own_limit()
    if left < least:
        raise OutOfMemory(
            f"The limit of this process's address space (ulimit -v) leaves "
            f"{format_bytes(max(int(left), 0))}, and JAX takes more than {format_bytes(least)} for "
            f"{num_simulated} simulated devices, before any array. Raise the limit."
        )


def check_program_fits(
    compiled: "jax.stages.Compiled", devices: "Collection[jax.Device]", program: str, advice: str,
    num_processes: int = 1,
) -> None:
    """Checks that this host has memory for the buffers of a program of simulated devices.

    Its arguments are in memory already. Call it after compiling and before running the program: the
    kernel grants more memory than there is, and kills the process when that is written to.

    Args:
      devices: Of this process. Each has separate buffers. Devices that are not simulated raise
        errors themselves.
      program: As the subject of a sentence: "A step of train with datasets.train".
      advice: What to change, in complete sentences.
      num_processes: How many processes of this host are about to run it.

    Raises:
      OutOfMemory: The host has too little memory.
    """
    stats = compiled.memory_analysis()
    if stats is None or any(device.platform != "cpu" for device in devices):
        return
    num_buffers = num_processes * len(devices)
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    needed = num_buffers * (stats.temp_size_in_bytes + outputs)
    available = available_bytes()
    if needed <= _SLACK * available:
        return
    devices = f"{num_buffers} simulated devices" if num_buffers > 1 else "a simulated device"
    raise OutOfMemory(
        f"{program} takes {format_bytes(needed)} of this host in addition to its arguments, and "
        f"{format_bytes(int(available))} are available here: {devices}, with "
        f"{format_bytes(stats.temp_size_in_bytes)} of temporaries, {format_bytes(outputs)} of "
        f"outputs and {format_bytes(stats.argument_size_in_bytes)} of arguments each. {advice}"
    )


class FirstRuns:
    """Runs programs; before each runs for the first time, checks that this host has memory for it.

    Also works around products that XLA may permute.

    Args:
      program, advice: As for `check_program_fits`, for all programs.
    """

    def __init__(self, program: str, advice: str):
        self._program, self._advice = program, advice
        self._fitting: set[Hashable] = set()

    def run(self, function: Any, *args: Any, key: Hashable = None) -> Any:
        """Returns `function(*args)`.

        Args:
          function: A result of `jax.jit`, or a step of a Partitioner.
          args: Its arrays are on the devices that it runs on.
          key: Identifies the program, if other arguments make other programs of the function.

        Raises:
          OutOfMemory: This host has too little memory for the program's buffers.
        """
        if (function, key) not in self._fitting:
            import jax
            from jax.sharding import NamedSharding

            from praxis_lite.core.xla_workarounds.mended_products import mended

            arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
            shardings = [x.sharding for x in arrays if isinstance(x.sharding, NamedSharding)]
            lowered = function.trace(*args).lower()
            if shardings:
                mended(lowered, shardings[0].mesh)
            check_program_fits(
                lowered.compile(),  # The call finds it.
                arrays[0].sharding.addressable_devices if arrays else (),
                self._program, self._advice,
            )
            self._fitting.add((function, key))
        return function(*args)


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
        # Limits of parents apply as well. If the path is in the host's tree, which is not mounted
        # in the container, the base is the container's group.
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
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - psutil.Process().memory_info().vms


def _read(path: Path) -> str:
    """Returns a file's text, or "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
