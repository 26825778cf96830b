"""Measures the memory available to this process, and checks that compiled functions fit in it."""

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

# Tolerance for comparisons, because the kernel's numbers are estimates.
_SLACK = 1.05

# For each version of control groups: the files that contain the limit and the usage, and the prefix
# of the entries for the page cache.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def available_bytes(root: Path = Path("/")) -> float:
    """Returns the number of bytes that this process may still allocate.

    psutil reports the machine's memory even in a container, so the limits set by control groups and
    ulimit are also taken into account.

    Args:
      root: The folder that contains proc and sys.
    """
    available = [psutil.virtual_memory().available, *_free_bytes_of_groups(root)]
    return min(min(available) + psutil.swap_memory().free, _free_address_space())


def check_room_for_devices(num_simulated: int) -> None:
    """Checks that the address space of this process (ulimit -v) is large enough for JAX's threads.

    If the address space is too small, JAX aborts the process. JAX needs about 1.3 GiB for one
    simulated device and a tiny model, and 1.8 GiB for eight devices. Only clearly smaller limits
    raise an error.

    Args:
      num_simulated: Number of simulated devices.

    Raises:
      OutOfMemory: The limit is too low.
    """
    required, available = 2**30 + num_simulated * 2**26, _free_address_space()
    if available < required:
        raise OutOfMemory(
            f"The limit of this process's address space (ulimit -v) leaves "
            f"{format_bytes(max(int(available), 0))}, but JAX needs more than "
            f"{format_bytes(required)} for {num_simulated} simulated devices, even before it "
            "creates arrays. Raise the limit."
        )


def check_program_fits(
    compiled: "jax.stages.Compiled",
    devices: "Collection[jax.Device]",
    program: str,
    advice: str,
    num_processes: int = 1,
) -> None:
    """Checks that this host has enough memory to run a compiled function on simulated devices.

    Call this between compiling and running the function. The check is needed because Linux
    overcommits memory: allocations succeed, and the process is killed only when it writes to memory
    that does not exist. The arguments are not counted, because they are already in memory.

    Args:
      compiled: The compiled function.
      devices: Devices of this process, each of which has separate buffers. Real devices are not
        checked, because they raise errors when they run out of memory.
      program: Subject of the error message, such as "A step of train with datasets.train".
      advice: Advice for the error message, in complete sentences.
      num_processes: Number of processes on this host that will run the function.

    Raises:
      OutOfMemory: The host has too little memory.
    """
    stats = compiled.memory_analysis()
    if stats is None or any(device.platform != "cpu" for device in devices):
        return
    num_buffers = num_processes * len(devices)
    # Outputs that reuse the memory of an argument need no additional memory.
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    needed = num_buffers * (stats.temp_size_in_bytes + outputs)
    available = available_bytes()
    if needed <= _SLACK * available:
        return
    devices = f"{num_buffers} simulated devices" if num_buffers > 1 else "a simulated device"
    raise OutOfMemory(
        f"{program} needs {format_bytes(needed)} on this host in addition to its arguments, but "
        f"only {format_bytes(int(available))} is available. It runs on {devices}, with "
        f"{format_bytes(stats.temp_size_in_bytes)} of temporaries, {format_bytes(outputs)} of "
        f"outputs and {format_bytes(stats.argument_size_in_bytes)} of arguments each. {advice}"
    )


class FirstRuns:
    """Runs jitted functions, checking before the first run of each that the host has enough memory.

    This class also applies the workaround for the XLA bug that permutes the results of matmuls.

    Args:
      program: Subject of error messages, as for `check_program_fits`.
      advice: Advice for error messages, as for `check_program_fits`.
    """

    def __init__(self, program: str, advice: str):
        self._program, self._advice = program, advice
        self._fitting: set[Hashable] = set()

    def run(self, function: Any, *args: Any, key: Hashable = None) -> Any:
        """Returns `function(*args)`.

        Args:
          function: A jitted function, or a step of a Partitioner.
          *args: The arguments, with arrays on the devices on which the function runs.
          key: Identifies the shapes of the arguments, if the function is compiled for several sets
            of shapes.

        Raises:
          OutOfMemory: This host has too little memory to run the function.
        """
        if (function, key) not in self._fitting:
            import jax
            from jax.sharding import Mesh, NamedSharding

            from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls

            arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
            shardings = (x.sharding for x in arrays)
            meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
            mesh = next((x for x in meshes if isinstance(x, Mesh)), None)
            lowered = function.trace(*args).lower()
            if mesh is not None:
                patch_matmuls(lowered, mesh)
            check_program_fits(
                lowered.compile(),  # The call below uses the cached executable.
                arrays[0].sharding.addressable_devices if arrays else (),
                self._program,
                self._advice,
            )
            self._fitting.add((function, key))
        return function(*args)


def _free_bytes_of_groups(root: Path) -> Iterator[float]:
    """Yields the number of free bytes in each of this process's memory control groups."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version, base = 2, root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            version, base = 1, root / "sys/fs/cgroup/memory"
        else:
            continue
        # The limits of parent groups apply as well. In a container, the path may be the host's
        # path, which is not mounted. In this case, the base folder is the container's group.
        folder = base / path.strip("/")
        for group in (folder, *folder.parents):
            yield _free_bytes_of_group(group, *_FILES[version])
            if group == base:
                break


def _free_bytes_of_group(group: Path, limit: str, usage: str, prefix: str) -> float:
    maximum, used = _read(group / limit).strip(), _read(group / usage).strip()
    if not (maximum.isdigit() and used.isdigit()):  # "max", or there is no such file.
        return math.inf
    cache = re.findall(
        rf"^{prefix}(?:in)?active_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE
    )
    return max(int(maximum) - int(used) + sum(map(int, cache)), 0)


def _free_address_space() -> float:
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
