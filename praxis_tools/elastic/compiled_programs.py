"""Caches an elastic job's compiled functions for later generations on the same mesh.

In JAX, only the first process writes to the compilation cache, and the first process of the next
generation may run on a different host. Therefore, the cache is in the job directory, which all
hosts share. If the job is in an object store, each host has its own cache, to which each process
writes.
"""

import hashlib
import platform
import re
import threading
import types
from pathlib import Path
from typing import Any

import jax

from praxis_lite.core.sharding.mesh import attached_devices
from praxis_lite.host.atomic_files import user_cache, write_atomically
from praxis_lite.host.object_stores import is_store_url
from praxis_lite.job import processes
from praxis_lite.job.jax_internals import compilation_cache_modules
from praxis_tools.elastic.worker_assignment import Assignment, report

FOLDER = "compiled"
# Private modules of JAX without type annotations, whose functions are replaced below.
compilation_cache: Any
cache_key: Any
compiler: Any
compilation_cache, cache_key, compiler = compilation_cache_modules()


def use_shared_cache(assignment: Assignment) -> None:
    """Configures JAX's compilation cache so that all processes of the job share it.

    Call this after the devices are known and before anything is compiled. If the user has set
    JAX_COMPILATION_CACHE_DIR, that folder is used instead. As with any JAX compilation cache,
    anyone who can write to the folder can run code in the job.

    For simulated devices, JAX's cache keys differ between processes, because XLA's CPU topology
    lists the devices of the process. Since only the first process writes to the cache, all other
    processes would compile everything in each generation. Therefore, the keys are changed to
    contain the processor's features instead, and every process writes to the cache. On a single
    host, each function is compiled once for all processes.

    Args:
      assignment: Assignment of this worker.
    """
    is_local = is_store_url(assignment.folder)
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # Set by JAX.
        # Without --elastic, jobs also use the folder of the user.
        folder = user_cache() / "xla" if is_local else Path(assignment.folder, FOLDER)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        compilation_cache.get_file_cache = lambda path: (_AtomicFileCache(Path(path)), path)
    _report_compilations()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if attached_devices()[1] == "cpu" and processes.count() > 1:
        cache_key._hash_accelerator_config = _hash_processor
        # Disable XLA's GPU caches, because the path of their folder would become part of the cache
        # keys.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        is_one_host = processes.count_on_this_host() == processes.count()
        jax.config.update("jax_share_binary_between_hosts", is_one_host)
        _enable_writes_in_all_processes()
    elif is_local:
        _enable_writes_in_all_processes()


def _report_compilations() -> None:
    """Reports to the supervisor how many executables were needed and how many were compiled."""
    needed = cached = 0

    def count(name: str) -> None:
        nonlocal needed, cached
        needed += name == "/jax/compilation_cache/compile_requests_use_cache"
        cached += name == "/jax/compilation_cache/cache_hits"
        if name.startswith("/jax/compilation_cache/"):
            report(programs=needed, compiled=needed - cached)

    jax.monitoring.register_event_listener(lambda event, **metadata: count(event))


def _enable_writes_in_all_processes() -> None:
    """Makes JAX write to the compilation cache in every process instead of only in process 0.

    JAX checks whether `global_state.process_id` is 0 before it writes. During a write, this
    property is therefore 0 in the writing thread of every process.
    """
    writing, write = threading.local(), compiler._cache_write

    class State:
        client = processes.client()

        @property
        def process_id(self) -> int:
            return 0 if getattr(writing, "is_now", False) else processes.index()

    def write_as_first(*args: Any) -> None:
        writing.is_now = True
        try:
            write(*args)
        finally:
            writing.is_now = False

    compiler.distributed = types.SimpleNamespace(global_state=State())
    compiler._cache_write = write_as_first


class _AtomicFileCache(compilation_cache.CacheInterface):
    """A compilation cache that writes files atomically.

    If a process is killed while writing, JAX's own cache keeps the truncated file, because it never
    overwrites existing files.
    """

    def __init__(self, folder: Path):
        self._path = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        """Returns a serialized executable, or None if it is not in the cache."""
        try:
            return (self._path / key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: str, value: bytes) -> None:
        """Stores a serialized executable, unless it is already in the cache."""
        if not (self._path / key).exists():
            write_atomically(self._path / key, value)


def _hash_processor(hashed: "hashlib._Hash", devices: Any) -> None:
    """Hashes the features of this host's processor and the number of devices."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    features = re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE)
    parts = [platform.machine(), platform.processor(), *sorted(set(features)), str(devices.size)]
    hashed.update("\n".join(parts).encode())
