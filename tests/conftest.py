"""Configures all tests: eight simulated devices, no rank promotion, and warnings as errors."""

import contextlib
import ctypes
import gc
import hashlib
import importlib.metadata
import mmap
import os
import platform
import signal
import sys
from pathlib import Path

# Tests compile many small functions and run them briefly, so LLVM's optimizations take three times
# the time that they save. Set this before JAX starts; processes launched by tests inherit it.
_flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
# Compiling each module as one part instead of 32 parallel parts takes a quarter less CPU time.
_flags.append("--xla_cpu_parallel_codegen_split_count=1")
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Halves the compile time again. Newer versions do not have this flag.
    _flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(_flags)
os.environ["JAX_PLATFORMS"] = "cpu"


def _compilation_cache() -> Path:
    """Returns the directory of JAX's compilation cache for this jaxlib and this kind of CPU.

    It is in the environment's directory, so that `make clean` removes it. JAX's cache key does not
    include the CPU's features, and code compiled for another CPU may crash the process.
    """
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.exists() else [platform.machine()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    key = hashlib.sha256(f"{flags}\n{os.environ['XLA_FLAGS']}".encode()).hexdigest()[:16]
    jaxlib = importlib.metadata.version("jaxlib")
    return Path(sys.prefix) / "jax_programs_of_tests" / f"{jaxlib}-{key}"


# The workers of a test run, the processes that they launch and later runs share this cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_compilation_cache()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402
import pytest  # noqa: E402

from praxis_lite.core import MeshConfig, make_mesh, simulate_devices  # noqa: E402

MAX_RESIDENT_BYTES = 3072 * 2**20
# These files run first, so that no worker is still busy with one when the others have finished.
LONGEST_FILES = (
    "elastic/test_elastic.py",
    "docs/test_pages_that_run.py",
    "job/test_multiprocess.py",
    "tools/check/test_check.py",
    "faults/test_faults.py",
    "job/test_interrupted_jobs.py",
    "trackers/test_services.py",
    "trainer/test_jobs_in_stores.py",
    "layers/test_layers_on_meshes.py",
    "partitioner/test_experiment_gradients.py",
)

# If pytest runs in the background of a shell, SIGINT is ignored, also in jobs that tests launch.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    gc.disable()  # Saves a third of the time of collecting thousands of tests.
    # By default, pytest-xdist starts with the files that contain the most tests.
    config.option.loadscopereorder = False
    config.addinivalue_line("filterwarnings", "error")
    # OpenBLAS may set the CPU's invalid-value flag although no result is NaN (numpy issue 24067).
    config.addinivalue_line("filterwarnings", "ignore:invalid value encountered in matmul")
    # transformers 5.12 calls a deprecated function of tokenizers.
    config.addinivalue_line("filterwarnings", "ignore:Deprecated in 0.9.0")
    # JAX writes cached programs in place. A worker that reads one which another worker is still
    # writing gets this warning, and compiles the program itself.
    unreadable = "ignore:Error reading persistent compilation cache entry"
    config.addinivalue_line("filterwarnings", unreadable)


def pytest_collection_modifyitems(items):
    def is_quicker(item):
        return not item.path.as_posix().endswith(LONGEST_FILES)

    items.sort(key=is_quicker)


def pytest_collection_finish(session):
    # JAX creates many long-lived objects. With Python's default thresholds, the garbage collector
    # takes 5% of the test time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_forgotten():
    """Clears JAX's caches after a test file if the process uses too much memory."""
    yield
    # Clearing the caches after every file would recompile many functions; never clearing them would
    # use gigabytes per worker.
    if resident_bytes() > MAX_RESIDENT_BYTES:
        jax.clear_caches()
        gc.collect()
        # glibc returns freed memory to the system only on request. Without this call, the caches
        # would be cleared after every later file.
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes, or 0 if it is unknown."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.exists() else 0


@pytest.fixture
def mesh_of():
    """Returns a function that creates a mesh with the axes replica, data and mdl from its shape."""

    def mesh(*shape: int, axis_names=("replica", "data", "mdl")):
        return make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=axis_names))

    return mesh


@pytest.fixture
def registry_copy(monkeypatch):
    """Yields the registered experiments; what the test registers in it is forgotten at its end.

    Experiments of modules that are still imported then stay registered, because another test that
    imports such a module would not register them again.
    """
    from praxis_lite.experiment import registry

    original, copy = registry.registered, dict(registry.registered)
    monkeypatch.setattr(registry, "registered", copy)
    yield copy
    original.update({name: x for name, x in copy.items() if x.__module__ in sys.modules})
