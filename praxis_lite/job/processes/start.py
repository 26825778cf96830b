"""Connects the processes of a job, which find each other by flags or a launcher's variables."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.host_names import is_loopback
from praxis_lite.job import processes
from praxis_lite.job.jax_internals import detected_processes
from praxis_lite.job.local_directory import local_directory
from praxis_lite.job.processes import addresses, peers
from praxis_lite.job.processes.beats import Beats
from praxis_lite.job.processes.coordination import PeerLost
from praxis_lite.job.processes.coordinator_gate import Gate, user_folder
from praxis_lite.job.processes.membership import Membership, join
from praxis_lite.job.processes.standard_output import to_nothing

__all__ = ("connect_member", "own_number")

START_SECONDS = 45

# What a launcher calls the number of its processes, and which of them this is.
_LAUNCHERS = {
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MPI": ("PMI_SIZE", "PMI_RANK"),
}
_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID")


def start(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    start_seconds: int = START_SECONDS,
    job_log_dir: str | None = None,
    beats: type[Beats] = Beats,
) -> None:
    """Connects this process with the others of its job, and makes the first process speak for it.

    It must come before JAX makes a device. If neither flags nor the environment tell of other
    processes, nothing happens, and jax is not imported.

    Args:
      coordinator, num_processes, process_id, start_seconds: the options of these names.
      job_log_dir: the job's directory, by which its processes tell each other a key. Without it
        they need none if they are reached over the network, and the network must be isolated.
      beats: what they tell each other every few seconds, and look for.

    Raises:
      ConfigError: a flag is wrong or missing, or the processes cannot be connected.
    """
    require(start_seconds >= 1, "--start_seconds", start_seconds, "1 or more")
    settings, result = find_others(coordinator, num_processes, process_id, os.environ)
    if settings is None:
        return
    settings = _complete(settings, start_seconds)
    with _key_file(settings, job_log_dir) as file:
        _connect(settings, start_seconds, file)
        peers.watch(beats)
        processes.learn_hosts(start_seconds)
    if processes.is_first():
        hosts = len({processes.host(k) for k in range(processes.count())})
        print(f"{processes.count()} processes on {hosts} hosts, found by {result}", flush=True)
    else:
        _speak_as_another(processes.index())


def connect_member(part: Membership, start_seconds: int) -> None:
    """Connects a process with the others of its generation.

    Its supervisor watches it, so `peers` does not. Raises PeerLost if they cannot be connected.
    """
    join(part)
    if len(part.members) == 1:
        return
    import jax

    # Else JAX ends those that live when one is gone, before their supervisors act.
    jax.config.update("jax_enable_recoverability", True)
    settings = {
        "coordinator_address": part.coordinator, "num_processes": len(part.members),
        "process_id": part.index, "cluster_detection_method": "deactivate",
    }
    try:
        _connect(settings, start_seconds, part.key, lost_status=part.lost_status)
        peers.end_with_connection()
        processes.learn_hosts(start_seconds)
    except ConfigError as error:
        raise PeerLost(str(error)) from error
    if not processes.is_first():
        _speak_as_another(processes.index())


def own_number(
    coordinator: str | None, num_processes: int | None, process_id: int | None,
    environment: Mapping[str, str],
) -> tuple[int, int]:
    """Returns the number of this process of an elastic job, and how many the job has.

    Raises ConfigError if neither flags nor the environment tell.
    """
    if (num_processes, process_id) == (None, None):
        _, num_processes, process_id = _launcher(environment)
    if process_id is None and "JOB_COMPLETION_INDEX" in environment:
        process_id = int(environment["JOB_COMPLETION_INDEX"])
    require(
        num_processes is not None and process_id is not None, "--elastic",
        f"{num_processes} processes, of which this is number {process_id}", "both numbers",
        "Add --num_processes=N and --process_id=K, from 0, on each host; under SLURM and Open MPI "
        "neither is needed, and in a Kubernetes job --process_id is not.",
    )
    _check_flags(coordinator or "localhost:1", num_processes, process_id)
    return process_id, num_processes


def find_others(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str],
) -> tuple[dict[str, Any] | None, str]:
    """Returns the arguments of jax.distributed.initialize, and where they were found, as text.

    (None, "") if this process is alone. Raises ConfigError as `start`; asks nothing of JAX.
    """
    launcher, size, rank = _launcher(environment)
    if (coordinator, num_processes, process_id) != (None, None, None):
        if num_processes is None and process_id is None and size is not None:
            num_processes, process_id = size, rank
        _check_flags(coordinator, num_processes, process_id)
        if num_processes == 1:
            return None, ""
        settings = {
            "coordinator_address": coordinator, "num_processes": num_processes,
            "process_id": process_id, "cluster_detection_method": "deactivate",
        }
        return settings, f"--coordinator={coordinator}"
    if "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment:
        if _is_tpu(environment) or find_spec("kubernetes"):
            return {}, "the Kubernetes job"
        return None, ""
    if _is_tpu(environment):
        return {}, "the TPU slice"
    if size is None or size == 1:
        return None, ""
    if launcher == "SLURM" or "OMPI_MCA_orte_hnp_uri" in environment:
        return {}, launcher
    if find_spec("mpi4py"):
        return {"cluster_detection_method": "mpi4py"}, "mpi4py"
    raise ConfigError(
        f"{launcher} started {size} processes, of which this is number {rank}, but does not say "
        "where the first one runs. Add --coordinator=HOST:PORT, with the first process's host and "
        "a free port there, or install mpi4py."
    )


def _launcher(environment: Mapping[str, str]) -> tuple[str, int | None, int | None]:
    for launcher, (size, rank) in _LAUNCHERS.items():
        if size in environment and rank in environment:
            # A script of sbatch without srun runs once, for any number of its tasks.
            if launcher == "SLURM" and not all(name in environment for name in _SLURM_STEP):
                continue
            return launcher, int(environment[size]), int(environment[rank])
    return "", None, None


def _is_tpu(environment: Mapping[str, str]) -> bool:
    """Returns True on a host of a TPU slice that has several hosts."""
    return (
        "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or environment.get("MEGASCALE_NUM_SLICES", "1") != "1"
        # On a TPU VM outside Kubernetes JAX asks the metadata server, even if it is one host.
        or ("TPU_WORKER_HOSTNAMES" not in environment and environment.get("JAX_PLATFORMS") != "cpu"
            and os.path.exists("/dev/accel0") and find_spec("libtpu") is not None)
    )


def _check_flags(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    flags = {
        "--coordinator=HOST:PORT": coordinator, "--num_processes=N": num_processes,
        "--process_id=K": process_id,
    }
    missing = [flag for flag, value in flags.items() if value is None]
    if missing:
        raise ConfigError(
            f"Of several processes each is started with {', '.join(flags)}, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Add "
            f"{'it' if len(missing) == 1 else 'them'}, or leave all three out."
        )
    host, _, port = coordinator.rpartition(":")
    require(
        bool(host) and port.isdecimal() and 0 < int(port) < 2**16, "--coordinator", coordinator,
        "HOST:PORT, the first process's host and a free port there from 1 to 65535, such as "
        "10.0.0.1:12345",
    )
    require(num_processes >= 1, "--num_processes", num_processes, "1 or more")
    require(
        0 <= process_id < num_processes, "--process_id", process_id,
        f"a number from 0 to {num_processes - 1}, another one for each of the {num_processes} "
        "processes",
    )


def _complete(settings: Mapping[str, Any], seconds: int) -> Mapping[str, Any]:
    """Returns the arguments of jax.distributed.initialize with what JAX finds out by itself."""
    if "coordinator_address" in settings:
        return settings
    try:
        coordinator, num_processes, process_id, devices = detected_processes(
            settings.get("cluster_detection_method"), seconds
        )
        if coordinator is None:
            raise ValueError("JAX does not find the first one")
    except (RuntimeError, ValueError, OSError) as error:
        raise _cannot_be_connected(error) from error
    return {
        "coordinator_address": coordinator, "num_processes": num_processes,
        "process_id": process_id, "cluster_detection_method": "deactivate",
        **({} if "JAX_LOCAL_DEVICE_IDS" in os.environ else {"local_device_ids": devices}),
    }


@contextlib.contextmanager
def _key_file(settings: Mapping[str, Any], job_log_dir: str | None) -> Iterator[Path | None]:
    """Yields the file that contains the job's key while the processes connect.

    None: there is no directory for it that all processes can read.
    """
    host, port = addresses.split(settings["coordinator_address"])
    if is_loopback(host):
        try:
            file = user_folder() / f"{port}.key"
        except OSError as error:
            raise _cannot_be_connected(error) from error
    elif job_log_dir is None:
        yield None
        return
    else:
        file = local_directory(job_log_dir) / ".connecting.key"
    is_there = file.parent.exists()
    yield file
    if settings["process_id"] == 0:
        file.unlink(missing_ok=True)
        if not is_there:  # It is not yet known whether the job may begin.
            with contextlib.suppress(OSError):
                file.parent.rmdir()


def _connect(
    settings: Mapping[str, Any], seconds: int, key: bytes | Path | None, lost_status: int = 2
) -> None:
    """Connects this process with the others.

    Args:
      key: of the job, or the file that will have it; None: anyone who reaches the first process's
        port is taken for a process of the job.
    """
    import jax

    # JAX's preemption service would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    is_connected = threading.Event()

    def give_up() -> None:
        if not is_connected.wait(seconds):
            os.write(2, (
                f"error: the processes of the job have not all come together within {seconds} s; "
                f"so process {settings['process_id']} ends. See which did not start, or cannot "
                "reach the first one's host and port. All need the same --num_processes, another "
                "--process_id each, and the same --job_log_dir, which all hosts share. Where they "
                "start at very different times, give all of them --start_seconds=600.\n"
            ).encode())
            # A missing process may yet start, so clusters try again.
            os._exit(1 if lost_status == 2 else lost_status)

    threading.Thread(target=give_up, daemon=True).start()
    try:
        # JAX aborts the process when its own time is up, so that is longer.
        jax.distributed.initialize(
            **{**settings, **_addresses(settings, key)}, initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=peers.JAX_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _cannot_be_connected(error) from error
    finally:
        is_connected.set()
    hosts = os.environ.get("SLURM_STEP_NUM_NODES")
    is_alone_on_its_host = (hosts is not None and hosts == os.environ.get("SLURM_NTASKS")) or (
        os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    )
    if is_alone_on_its_host and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        # Under SLURM and Open MPI JAX shows a process one GPU: the host has one process for each.
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", "all")


def _cannot_be_connected(error: Exception) -> ConfigError:
    return ConfigError(
        f"The processes of the job cannot be connected: {str(error).splitlines()[0]}. Check "
        "--coordinator (a free port of the first process's host) and --job_log_dir, that only one "
        "process has --process_id=0, or what the launcher reports."
    )


def _addresses(settings: Mapping[str, Any], key: bytes | Path | None) -> dict[str, str]:
    """Returns the addresses of JAX's coordination service; starts this process's gate to it."""
    coordinator, is_first = settings["coordinator_address"], settings["process_id"] == 0
    to_reach, to_bind = addresses.to_reach(coordinator), addresses.to_bind(coordinator)
    if (bound := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")) and not isinstance(key, bytes):
        to_bind = addresses.split(bound)
    if key is None:
        reach, bind = addresses.joined(*to_reach), addresses.joined(*to_bind)
    else:
        gate = Gate(
            to_bind if is_first else to_reach, key, settings["num_processes"], is_first=is_first
        )
        reach = bind = gate.service
    return {
        "coordinator_address": reach, **({"coordinator_bind_address": bind} if is_first else {})
    }


def _speak_as_another(process: int) -> None:
    """Leaves standard output to the first process; lines on standard error say whose they are."""
    sys.stdout.flush()
    to_nothing(1)
    sys.stderr = PrefixedStream(sys.stderr, f"[process {process}] ")


class PrefixedStream:
    """A text stream that begins each line with a prefix."""

    def __init__(self, stream: TextIO, prefix: str):
        self._stream, self._prefix, self._is_new_line = stream, prefix, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write(f"{self._prefix if self._is_new_line else ''}{line}")
            self._is_new_line = line.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
