"""The compiled programs of an elastic job, kept for all generations on the same mesh.

They are stored in the job's directory, which all hosts share, because JAX lets only the first
process of a generation write them, and after a death that is a process on another host.
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
from praxis_lite.host.whole_files import write_whole
from praxis_lite.job import processes
from praxis_lite.job.jax_internals import compilation_cache_modules
from praxis_tools.elastic.worker_order import Order, report

FOLDER = "compiled"
compilation_cache, cache_key, compiler = compilation_cache_modules()


def keep_compiled(order: Order) -> None:
    """Lets JAX keep every program that this process compiles, and take those of other processes.

    Who may write into the folder can run code in the job, as with any compilation cache of JAX. A
    folder that the user has set (JAX_COMPILATION_CACHE_DIR) is kept. It must come before JAX
    compiles, but its devices are known.

    On simulated devices JAX's key of a program differs between processes, because XLA's topology
    of a CPU lists the process's own devices. So all but the first, which alone writes, would
    compile everything in each generation. Here the key has the processor's features in its place,
    and each process writes what is its own. On one host a program is compiled once for all.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder = str(Path(order.folder, FOLDER))
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.get_file_cache = lambda path: (_WholeFiles(Path(path)), path)
    _report_programs()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if attached_devices()[1] == "cpu" and processes.count() > 1:
        cache_key._hash_accelerator_config = _hash_processor
        # Caches of XLA for GPUs, whose folder would be part of the keys.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        is_one_host = processes.count_on_this_host() == processes.count()
        jax.config.update("jax_share_binary_between_hosts", is_one_host)
        _let_all_write()


def _report_programs() -> None:
    """Reports how many programs this process needed, and how many were not in the cache."""
    needed = cached = 0

    def count(name: str) -> None:
        nonlocal needed, cached
        needed += name == "/jax/compilation_cache/compile_requests_use_cache"
        cached += name == "/jax/compilation_cache/cache_hits"
        if name.startswith("/jax/compilation_cache/"):
            report(programs=needed, compiled=needed - cached)

    jax.monitoring.register_event_listener(lambda name, **more: count(name))


def _let_all_write() -> None:
    """Lets each process write programs; JAX lets only the process with the index 0."""
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


class _WholeFiles(compilation_cache.CacheInterface):
    """Programs by their keys; a process that is killed while it writes leaves no part of a program.

    JAX's own cache would: a file that is there already is never written again.
    """

    def __init__(self, folder: Path):
        self._path = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        """Returns a program, or None if it is not there."""
        try:
            return (self._path / key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: str, value: bytes) -> None:
        """Stores a program, unless another process has."""
        if not (self._path / key).exists():
            write_whole(self._path / key, value)


def _hash_processor(hashed: "hashlib._Hash", devices: Any) -> None:
    """Hashes the features of this host's processor, and how many devices there are."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    features = re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE)
    named = [platform.machine(), platform.processor(), *sorted(set(features)), str(devices.size)]
    hashed.update("\n".join(named).encode())
