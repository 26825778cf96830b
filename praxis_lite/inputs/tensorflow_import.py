"""Imports tensorflow on first use, on the CPU and with two threads."""

import contextlib
import functools
import os
import warnings
from types import ModuleType

from praxis_lite.host.optional_packages import optional_module


@functools.cache
def tensorflow(needed_by: str) -> ModuleType:
    """Returns the tensorflow module.

    Args:
      needed_by: Name of the feature that needs tensorflow, for the error message.

    Raises:
      ConfigError: tensorflow is not installed, or its import fails.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # Override the 1 that JAX sets.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorflow's own code emits warnings on import.
        tf = optional_module("tensorflow", needed_by)
    # Hide the accelerators: tensorflow's first operation would allocate the memory that JAX needs.
    # This fails with a RuntimeError if the user's program has already run tensorflow operations.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
        tf.config.set_visible_devices([], "TPU")
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    return tf
