"""Keeps JAX from loading libtpu on hosts without TPUs, and checks that libtpu matches jax."""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import re

import jax

from praxis_lite.core.sharding.devices.xla_options import check_environment

__all__ = ("WITHOUT_TPU", "mismatch")

_log = logging.getLogger(__name__)

# These settings keep libtpu from querying Google's metadata server, logging errors, and locking a
# file.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
}


@functools.cache
def avoid_loading_libtpu() -> None:
    """Keeps JAX from loading an installed libtpu if the host has no TPU.

    A host may have libtpu installed only to plan TPU jobs. JAX (0.10 to 0.12) would load it when
    creating the first device. libtpu would then log errors, and profiling would crash with SIGSEGV
    if the libtpu version did not match jax. Call this function before JAX creates devices. It has
    no effect later, or if JAX_PLATFORMS is set. On hosts with TPU chips, `import jax` itself sets
    the platforms to "tpu,cpu".

    Raises:
      ConfigError: See `check_environment`.
    """
    check_environment()
    if importlib.util.find_spec("libtpu") is None:
        return
    # JAX adds attributes for its settings at run time.
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if not platforms and not _has_other_plugins():
        jax.config.update("jax_platforms", "cpu")
        return
    if not platforms:  # There may be GPUs, so let JAX try all installed backends.
        for setting, value in WITHOUT_TPU.items():
            os.environ.setdefault(setting, value)
    if (not platforms or "tpu" in platforms.split(",")) and (message := mismatch()):
        _log.warning("%s", message)


def mismatch() -> str | None:
    """Returns a warning if jax requires a different version of libtpu, otherwise None."""
    try:
        installed = importlib.metadata.version("libtpu")
        requirements = importlib.metadata.requires("jax") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    # Matches a requirement such as `libtpu==0.0.17.*; extra == "tpu"`.
    pattern = r"libtpu\s*==\s*([\d.]+?)(?:\.\*)?\s*;\s*extra == .tpu."
    matches = [actual for item in requirements if (actual := re.fullmatch(pattern, item))]
    if not matches or f"{installed}.".startswith(f"{(expected := matches[0][1])}."):
        return None
    return (
        f"libtpu {installed} is installed, but jax {jax.__version__} requires libtpu {expected}: "
        "programs may fail, and jax.profiler.start_trace may crash with SIGSEGV. Run "
        f"pip install 'libtpu=={expected}.*'"
    )


def _has_other_plugins() -> bool:
    """Returns whether a JAX plugin, such as the CUDA plugin, is installed or configured."""
    return bool(
        importlib.metadata.entry_points(group="jax_plugins")
        or importlib.util.find_spec("jax_plugins")
        or os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS")
    )
