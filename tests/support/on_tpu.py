"""Runs modules that compile for a TPU in processes without the CPU flags of the tests."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed",
)


def printed_by(module: str) -> Any:
    """Runs a module and returns the JSON in the last line of its output."""
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env.pop("XLA_FLAGS", None)  # XLA_FLAGS are for the CPU.
    run = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])
