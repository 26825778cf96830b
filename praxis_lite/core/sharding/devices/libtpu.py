"""libtpu, the compiler and driver of TPUs: left alone where there is no TPU; does it fit jax?"""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import re

import jax

from praxis_lite.core.sharding.devices.xla_options import check_environment

__all__ = ("WITHOUT_TPU", "mismatch")

log = logging.getLogger(__name__)

# Else libtpu asks Google's metadata server what machine this is, complains, and locks itself.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
}


@functools.cache
def leave_absent_tpus_alone() -> None:
    """Keeps JAX from loading a libtpu that is installed, as for plans, where there is no TPU.

    JAX (0.10 to 0.12) would load it when it makes its first device, and libtpu prints lines of
    errors, and a profile ends by SIGSEGV if it is not jax's own. To be called before that; where
    devices were made already, or JAX_PLATFORMS is set, nothing changes. JAX itself counts the chips
    of this host when it is imported, and takes "tpu,cpu" if there are any.

    Raises:
      ConfigError: as `check_environment`.
    """
    check_environment()
    if importlib.util.find_spec("libtpu") is None:
        return
    platforms = jax.config.jax_platforms
    if not platforms and not _has_other_plugins():
        jax.config.update("jax_platforms", "cpu")
        return
    if not platforms:  # GPUs, perhaps: JAX tries all that is installed.
        for setting, value in WITHOUT_TPU.items():
            os.environ.setdefault(setting, value)
    if (not platforms or "tpu" in platforms.split(",")) and (message := mismatch()):
        log.warning("WARNING: %s", message)


def mismatch() -> str | None:
    """Returns a sentence if libtpu is not the release that this jax names; None if it is."""
    try:
        installed = importlib.metadata.version("libtpu")
        requirements = importlib.metadata.requires("jax") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    pattern = r"libtpu\s*==\s*([\d.]+?)(?:\.\*)?\s*;\s*extra == .tpu."
    matches = [actual for item in requirements if (actual := re.fullmatch(pattern, item))]
    if not matches or f"{installed}.".startswith(f"{(expected := matches[0][1])}."):
        return None
    return (
        f"libtpu {installed} is installed, but jax {jax.__version__} goes with libtpu {expected}: "
        "programs may fail, and jax.profiler.start_trace may end the process by SIGSEGV. "
        f"pip install 'libtpu=={expected}.*'"
    )


def _has_other_plugins() -> bool:
    """Returns True if a plugin of JAX's, such as that for CUDA, is installed or named."""
    return bool(
        importlib.metadata.entry_points(group="jax_plugins")
        or importlib.util.find_spec("jax_plugins")
        or os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS")
    )
