"""How much memory the machine, the container and its own limit still allow this process.

And whether a compiled program can be run with it.
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

# The kernel's figures are estimates: what is refused lacks more than that.
_SLACK = 1.05

# Of each version of control groups: the limit, what is used, and the page cache's prefix.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def available_bytes(root: Path = Path("/")) -> float:
    """Returns how many bytes this process might still get.

    In a container psutil reports the whole machine, so control groups are read as well, from /proc
    and /sys below `root`.
    """
    left = [psutil.virtual_memory().available, *_left_in_groups(root)]
    return min(min(left) + psutil.swap_memory().free, _left_of_own_limit())


def check_room_for_devices(num_simulated: int) -> None:
    """Checks that the limit of this process's address space allows JAX's own threads.

    JAX aborts where it does not. Measured on two cores are 1.3 GiB for one simulated device and a
    tiny model, 1.8 GiB for eight; refused is what cannot be enough.

    Raises:
      OutOfMemory: it does not.
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

    Its arguments are there already. To be called after it is compiled, before it runs: the kernel
    grants more memory than there is, and kills the process when that is written to.

    Args:
      devices: of this process. Each has buffers of its own. Devices that are not simulated refuse
        by themselves what they cannot hold.
      program: as the subject of a sentence: "A step of train with datasets.train".
      advice: what to change, in whole sentences.
      num_processes: how many of this host are about to run it.

    Raises:
      OutOfMemory: it cannot.
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
        f"{program} takes {format_bytes(needed)} of this host beside its arguments, and "
        f"{format_bytes(int(available))} are available here: {devices}, with "
        f"{format_bytes(stats.temp_size_in_bytes)} of temporaries, {format_bytes(outputs)} of "
        f"outputs and {format_bytes(stats.argument_size_in_bytes)} of arguments each. {advice}"
    )


class FirstRuns:
    """Runs programs; before each runs for the first time, checks that this host has memory for it.

    Products that XLA may permute in it are mended.

    Args:
      program, advice: as of `check_program_fits`, of all of them.
    """

    def __init__(self, program: str, advice: str):
        self._program, self._advice = program, advice
        self._fitting: set[Hashable] = set()

    def run(self, function: Any, *args: Any, key: Hashable = None) -> Any:
        """Returns `function(*args)`.

        Args:
          function: as `jax.jit` returns it, or a step of a Partitioner.
          args: arrays among them on the devices that it runs on.
          key: for each other program that other arguments make of the function.

        Raises:
          OutOfMemory: this host cannot hold what the program makes.
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
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - psutil.Process().memory_info().vms


def _read(path: Path) -> str:
    """Returns a file's text, or "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
