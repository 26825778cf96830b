"""tensorflow, imported late and quietly, kept to the CPU and to few threads."""

import contextlib
import functools
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from types import ModuleType

from praxis_lite.host.optional_packages import optional_module

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_LOG_LINE = re.compile(rb"[IWE]\d{4} \d\d:\d\d:\d+\.\d+ |WARNING: All log messages before absl::")


@functools.cache
def tensorflow(needed_by: str) -> ModuleType:
    """Returns the tensorflow module. Raises ConfigError if it is not installed, or broken."""
    with _quiet_log():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of tensorflow's own code; ours is not run here.
            tf = optional_module("tensorflow", needed_by)
        # JAX owns the accelerators: tensorflow would claim their memory at its first operation.
        # A program that has used tensorflow already keeps the devices and threads it chose.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
            tf.config.set_visible_devices([], "TPU")
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(2)
    return tf


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Drops tensorflow's log lines from standard error; TF_CPP_MIN_LOG_LEVEL=0 keeps them.

    Some are written straight to the file descriptor before that variable is looked at, so it is
    turned aside meanwhile. All other lines are passed on, and all lines if the import fails.
    """
    before = os.environ.get(_LOG_LEVEL)
    if before == "0":
        yield
        return
    os.environ[_LOG_LEVEL] = "3"  # JAX sets it to 1, so that a default would do nothing.
    sys.stderr.flush()
    stderr = os.dup(2)
    failed = True
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            if before is None:
                del os.environ[_LOG_LEVEL]
            else:
                os.environ[_LOG_LEVEL] = before
            aside.seek(0)
            kept = [line for line in aside if failed or not _LOG_LINE.match(line)]
            os.write(2, b"".join(kept))
