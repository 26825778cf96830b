"""Connects the processes of a job, using flags or a launcher's environment variables."""

import contextlib
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, Error, PeerLost, require
from praxis_lite.host.atomic_files import create_atomically
from praxis_lite.host.host_names import is_loopback
from praxis_lite.host.object_stores import StorePath, is_store_url
from praxis_lite.job import processes
from praxis_lite.job.jax_internals import detected_processes
from praxis_lite.job.local_directory import local_directory
from praxis_lite.job.processes import addresses, peers
from praxis_lite.job.processes.beats import Beats
from praxis_lite.job.processes.coordinator_gate import Gate, user_folder
from praxis_lite.job.processes.logs import PrefixedStream
from praxis_lite.job.processes.membership import Membership, join
from praxis_lite.job.processes.standard_output import redirect_to_null

__all__ = ("connect_member", "process_numbers")

START_SECONDS = 45
# Name of the hidden file or object with the job's key, in the job directory.
_KEY_NAME = ".connecting.key"

# The environment variables with the number of processes and the index of this process.
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
    """Connects this process to the other processes of its job.

    Call this before JAX initializes devices. Afterwards, only the first process prints to standard
    output. If the flags and the environment specify no other processes, this function does nothing
    and does not import jax.

    Args:
      coordinator: The option --coordinator.
      num_processes: The option --num_processes.
      process_id: The option --process_id.
      start_seconds: The option --start_seconds.
      job_log_dir: The job directory, through which the processes share a secret key. If None and
        the processes run on several hosts, connections are not authenticated, so the network must
        be isolated.
      beats: Class that sends and receives the heartbeats.

    Raises:
      ConfigError: A flag is invalid or missing, or the processes cannot be connected.
    """
    require(start_seconds >= 1, "--start_seconds", start_seconds, "1 or more")
    found, found_by = find_others(coordinator, num_processes, process_id, os.environ)
    if found is None:
        return
    settings = _with_detected(found, start_seconds)
    with _shared_key(settings, job_log_dir) as key:
        _connect(settings, start_seconds, key)
        peers.watch(beats)
        processes.exchange_host_names(start_seconds)
    if processes.is_first():
        hosts = len({processes.host(k) for k in range(processes.count())})
        _log.info("%d processes on %d hosts, found by %s", processes.count(), hosts, found_by)
    else:
        _redirect_output(processes.index())


def connect_member(membership: Membership, start_seconds: int) -> None:
    """Connects a worker of an elastic job to the other workers of its generation.

    The worker is monitored by its supervisor instead of by the threads in `peers`.

    Args:
      membership: The role of this process.
      start_seconds: The option --start_seconds.

    Raises:
      PeerLost: The workers cannot be connected.
    """
    join(membership)
    if len(membership.members) == 1:
        return
    import jax

    # Otherwise, when a process is lost, JAX aborts the remaining processes before their supervisors
    # act.
    jax.config.update("jax_enable_recoverability", True)
    settings = {
        "coordinator_address": membership.coordinator,
        "num_processes": len(membership.members),
        "process_id": membership.index,
        "cluster_detection_method": "deactivate",
    }
    try:
        _connect(settings, start_seconds, membership.key, lost_status=membership.lost_status)
        peers.end_with_connection()
        processes.exchange_host_names(start_seconds)
    except Error as error:
        raise PeerLost(str(error)) from error
    if not processes.is_first():
        _redirect_output(processes.index())


def process_numbers(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str],
) -> tuple[int, int]:
    """Returns (process_id, num_processes) for this process in an elastic job.

    Raises:
      ConfigError: Neither flags nor environment variables specify these numbers.
    """
    if (num_processes, process_id) == (None, None):
        _, num_processes, process_id = _launcher(environment)
    if process_id is None and "JOB_COMPLETION_INDEX" in environment:
        process_id = int(environment["JOB_COMPLETION_INDEX"])
    if num_processes is None or process_id is None:
        raise ConfigError(
            "--elastic requires the number of processes and the index of this process. Add "
            "--num_processes=N and --process_id=K, counted from 0, on each host. SLURM and Open "
            "MPI set both numbers, and a Kubernetes job sets --process_id."
        )
    _check_flags(coordinator or "localhost:1", num_processes, process_id)
    return process_id, num_processes


def find_others(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str],
) -> tuple[dict[str, Any] | None, str]:
    """Finds the other processes of the job, without calling JAX.

    Args:
      coordinator: The option --coordinator.
      num_processes: The option --num_processes.
      process_id: The option --process_id.
      environment: The environment variables.

    Returns:
      A tuple of the arguments for `jax.distributed.initialize` and a description of how they were
      found, or (None, "") if the job has a single process.

    Raises:
      ConfigError: A flag is invalid or missing, or the launcher does not specify the coordinator.
    """
    launcher, size, rank = _launcher(environment)
    if (coordinator, num_processes, process_id) != (None, None, None):
        # With --coordinator alone, the launcher's numbers are used.
        if num_processes is None and process_id is None and size is not None:
            num_processes, process_id = size, rank
        _check_flags(coordinator, num_processes, process_id)
        if num_processes == 1:
            return None, ""
        settings = {
            "coordinator_address": coordinator,
            "num_processes": num_processes,
            "process_id": process_id,
            "cluster_detection_method": "deactivate",
        }
        return settings, f"--coordinator={coordinator}"
    # Empty settings let JAX detect the cluster, for which it needs the package `kubernetes`.
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
        f"{launcher} started {size} processes, of which this is number {rank}, but does not "
        "specify the host of the first process. Add --coordinator=HOST:PORT with this host and a "
        "free port on it, or install mpi4py."
    )


def _launcher(environment: Mapping[str, str]) -> tuple[str, int | None, int | None]:
    """Returns (launcher, num_processes, process_id), or ("", None, None) without a launcher."""
    for launcher, (size, rank) in _LAUNCHERS.items():
        if size in environment and rank in environment:
            # An sbatch script without srun runs only once, for any number of tasks.
            if launcher == "SLURM" and not all(name in environment for name in _SLURM_STEP):
                continue
            return launcher, int(environment[size]), int(environment[rank])
    return "", None, None


def _is_tpu(environment: Mapping[str, str]) -> bool:
    """Returns whether this is a host in a TPU slice with several hosts."""
    return (
        "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or environment.get("MEGASCALE_NUM_SLICES", "1") != "1"
        # On a TPU VM outside Kubernetes, let JAX query the metadata server, even for a single host.
        or (
            "TPU_WORKER_HOSTNAMES" not in environment
            and environment.get("JAX_PLATFORMS") != "cpu"
            and os.path.exists("/dev/accel0")
            and find_spec("libtpu") is not None
        )
    )


def _check_flags(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    flags = {
        "--coordinator=HOST:PORT": coordinator,
        "--num_processes=N": num_processes,
        "--process_id=K": process_id,
    }
    missing = [flag for flag, value in flags.items() if value is None]
    if coordinator is None or num_processes is None or process_id is None:
        raise ConfigError(
            f"Each process of a job with several processes needs {', '.join(flags)}, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Add "
            f"{'it' if len(missing) == 1 else 'them'}, or remove all three flags."
        )
    host, _, port = coordinator.rpartition(":")
    require(
        bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
        "--coordinator",
        coordinator,
        "HOST:PORT, with the host of the first process and a free port from 1 to 65535 there, such "
        "as 10.0.0.1:12345",
    )
    require(num_processes >= 1, "--num_processes", num_processes, "1 or more")
    require(
        0 <= process_id < num_processes,
        "--process_id",
        process_id,
        f"a number from 0 to {num_processes - 1}, different in each of the {num_processes} "
        "processes",
    )


def _with_detected(settings: Mapping[str, Any], seconds: int) -> Mapping[str, Any]:
    """Adds arguments for `jax.distributed.initialize` that JAX detects in the cluster."""
    if "coordinator_address" in settings:
        return settings
    try:
        coordinator, num_processes, process_id, devices = detected_processes(
            settings.get("cluster_detection_method"), seconds
        )
        if coordinator is None:
            raise ValueError("JAX cannot find the first process")
    except (RuntimeError, ValueError, OSError) as error:
        raise _connection_error(error) from error
    return {
        "coordinator_address": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
        "cluster_detection_method": "deactivate",
        **({} if "JAX_LOCAL_DEVICE_IDS" in os.environ else {"local_device_ids": devices}),
    }


@contextlib.contextmanager
def _shared_key(
    settings: Mapping[str, Any], job_log_dir: str | None
) -> Iterator[bytes | Path | None]:
    """Provides the job's key while the processes connect, and deletes it afterwards.

    Yields:
      The key if the job directory is in an object store, otherwise the file through which the
      processes share the key, or None if there is no directory that all processes can read.
    """
    host, port = addresses.parse_address(settings["coordinator_address"])
    if is_loopback(host):
        try:
            file = user_folder() / f"{port}.key"
        except OSError as error:
            raise _connection_error(error) from error
    elif job_log_dir is None:
        yield None
        return
    elif is_store_url(job_log_dir):
        stored = StorePath.opened(job_log_dir, writes=True) / _KEY_NAME
        yield _key_in_store(stored)
        if settings["process_id"] == 0:
            stored.unlink()
        return
    else:
        file = local_directory(job_log_dir) / _KEY_NAME
    had_folder = file.parent.exists()
    yield file
    if settings["process_id"] == 0:
        file.unlink(missing_ok=True)
        if not had_folder:  # The job's settings may still turn out to be invalid.
            with contextlib.suppress(OSError):
                file.parent.rmdir()


def _key_in_store(stored: StorePath) -> bytes:
    """Returns the key in an object, which the first process to call this function creates.

    A launch that was killed may have left its key behind. All processes then use this key.
    """
    create_atomically(stored, secrets.token_hex(32).encode())
    return bytes.fromhex(stored.read_bytes().decode())


def _connect(
    settings: Mapping[str, Any], seconds: int, key: bytes | Path | None, lost_status: int = 2
) -> None:
    """Calls `jax.distributed.initialize`, using authenticating gates if there is a key.

    Args:
      settings: Arguments for `jax.distributed.initialize`.
      seconds: Maximum time to wait for the other processes before this process exits.
      key: The job's key, or the file to which the first process will write it. If None, the first
        process accepts any connection to its port.
      lost_status: Exit status after a timeout, in an elastic job.
    """
    import jax

    # JAX's preemption service would intercept SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    is_connected = threading.Event()

    def end_after_timeout() -> None:
        if not is_connected.wait(seconds):
            os.write(
                2,
                (
                    f"error: not all processes of the job have connected within {seconds} s. "
                    f"Process {settings['process_id']} exits. Check which process did not start or "
                    "cannot reach the coordinator. All need the same --num_processes and "
                    "--job_log_dir (on a shared file system or in a store), and a different "
                    "--process_id. If they start minutes apart, add --start_seconds=600.\n"
                ).encode(),
            )
            # With status 1, a cluster retries the job. This may help if a missing process starts
            # later.
            os._exit(1 if lost_status == 2 else lost_status)

    threading.Thread(target=end_after_timeout, daemon=True).start()
    try:
        # JAX's timeout is longer, because JAX aborts the process without a helpful message.
        jax.distributed.initialize(
            **{**settings, **_addresses(settings, key)},
            initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=peers.JAX_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _connection_error(error) from error
    finally:
        is_connected.set()
    hosts = os.environ.get("SLURM_STEP_NUM_NODES")
    is_alone_on_its_host = (hosts is not None and hosts == os.environ.get("SLURM_NTASKS")) or (
        os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    )
    if is_alone_on_its_host and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        # Under SLURM and Open MPI, JAX assumes one process per GPU and hides all but one GPU from
        # each process.
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", "all")


def _connection_error(error: Exception) -> ConfigError:
    return ConfigError(
        f"The processes of the job cannot be connected: {str(error).splitlines()[0]}. Check "
        "--coordinator (a free port on the host of the first process), --job_log_dir, that only "
        "one process has --process_id=0, and the launcher's output."
    )


def _addresses(settings: Mapping[str, Any], key: bytes | Path | None) -> dict[str, str]:
    """Starts this process's gate if there is a key, and returns the address arguments for JAX."""
    coordinator, is_first = settings["coordinator_address"], settings["process_id"] == 0
    to_reach, to_bind = addresses.to_reach(coordinator), addresses.to_bind(coordinator)
    if (bound := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")) and not isinstance(key, bytes):
        to_bind = addresses.parse_address(bound)
    if key is None:
        reach, bind = addresses.format_address(*to_reach), addresses.format_address(*to_bind)
    else:
        # JAX connects to the gate of this process through a Unix socket.
        gate = Gate(
            to_bind if is_first else to_reach, key, settings["num_processes"], is_first=is_first
        )
        reach = bind = gate.service
    return {
        "coordinator_address": reach,
        **({"coordinator_bind_address": bind} if is_first else {}),
    }


def _redirect_output(process: int) -> None:
    """Discards standard output, and prefixes lines on standard error with the process's index."""
    sys.stdout.flush()
    redirect_to_null(1)
    sys.stderr = PrefixedStream(sys.stderr, f"[process {process}] ")


_log = logging.getLogger(__name__)
