"""Eight simulated devices for every test; rank promotion raises; warnings are errors."""

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

# Tests compile many small programs and run them briefly: LLVM's optimisations cost three times
# what they give. Set before JAX starts; processes that tests launch inherit it.
_flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
# One part, and not 32 that threads compile beside each other: a quarter less to do in all.
_flags.append("--xla_cpu_parallel_codegen_split_count=1")
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Halves the compile time once more; newer versions no longer know it.
    _flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(_flags)
os.environ["JAX_PLATFORMS"] = "cpu"


def _compilation_cache() -> Path:
    """Returns the folder of compiled programs for this jax and this kind of CPU.

    It is in the environment's folder, so that `make clean` removes it. JAX's own key does not
    have the CPU's features, and a program compiled for another CPU may end the process.
    """
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.exists() else [platform.machine()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    key = hashlib.sha256(f"{flags}\n{os.environ['XLA_FLAGS']}".encode()).hexdigest()[:16]
    jaxlib = importlib.metadata.version("jaxlib")
    return Path(sys.prefix) / "jax_programs_of_tests" / f"{jaxlib}-{key}"


# The workers of a run, the processes that they launch and later runs share what they compile.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_compilation_cache()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402
import pytest  # noqa: E402

from praxis_lite.core import MeshConfig, make_mesh, simulate_devices  # noqa: E402

MAX_RESIDENT_BYTES = 3072 * 2**20
# They come first, so that no worker is left with one when the others have ended.
LONGEST_FILES = (
    "elastic/test_elastic.py",
    "docs/test_pages_that_run.py",
    "job/test_stuck_processes.py",
    "job/test_multiprocess.py",
    "tools/check/test_check.py",
    "faults/test_faults.py",
    "sweep/test_sweep_jobs.py",
    "job/test_interrupted_jobs.py",
    "layers/test_layers_on_meshes.py",
    "partitioner/test_experiment_gradients.py",
)

# A shell that runs pytest in its background has SIGINT ignored; jobs that tests launch would, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    gc.disable()  # A third of the time of collecting thousands of tests.
    # pytest-xdist would begin with the files of most tests, and end with those of the longest.
    config.option.loadscopereorder = False
    config.addinivalue_line("filterwarnings", "error")
    # OpenBLAS may leave the processor's flag set though no result is NaN: numpy issue 24067.
    config.addinivalue_line("filterwarnings", "ignore:invalid value encountered in matmul")


def pytest_collection_modifyitems(items):
    def is_quicker(item):
        return not item.path.as_posix().endswith(LONGEST_FILES)

    items.sort(key=is_quicker)


def pytest_collection_finish(session):
    # JAX makes many objects that live long: to look through them all for cycles as often as Python
    # does by itself takes a twentieth of the time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_forgotten():
    """Frees, after a file, the programs that its tests compiled, once there are many of them."""
    yield
    # Less often would be gigabytes per worker, and after every file many would be compiled again.
    if resident_bytes() > MAX_RESIDENT_BYTES:
        jax.clear_caches()
        gc.collect()
        # glibc returns freed memory to the system only on request: without it every further file
        # would find too much memory in use, and forget its programs.
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Returns the memory that this process holds now; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.exists() else 0


@pytest.fixture
def mesh_of():
    """Returns a function from an ICI shape to a mesh with axes replica, data, mdl."""

    def mesh(*shape: int, axis_names=("replica", "data", "mdl")):
        return make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=axis_names))

    return mesh
