"""Imports tensorflow on first use, without accelerators and with few threads."""

import contextlib
import functools
import os
import warnings
from types import ModuleType

from praxis_lite.host.optional_packages import optional_module


@functools.cache
def tensorflow(needed_by: str) -> ModuleType:
    """Returns the tensorflow module. Raises ConfigError if it is not installed, or broken."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # JAX sets it to 1.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # From tensorflow's own code.
        tf = optional_module("tensorflow", needed_by)
    # JAX owns the accelerators: tensorflow would take their memory at its first operation. A
    # program that has used tensorflow already keeps its devices and threads.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
        tf.config.set_visible_devices([], "TPU")
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    return tf
