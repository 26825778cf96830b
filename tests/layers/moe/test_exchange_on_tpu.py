"""The shared experts' products in a TPU's program, which run while tokens are exchanged."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler for TPUs, is missing"
)
def test_shared_experts_are_computed_while_tokens_are_exchanged():
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env.pop("XLA_FLAGS", None)  # Of the CPU.
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.exchange_runs"], capture_output=True, text=True,
        check=False, env=env, cwd=Path(__file__).parents[3],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    exchanges = json.loads(run.stdout.splitlines()[-1])
    # Rows and their experts there, outputs back; and backward besides the gates and gradients.
    assert len(exchanges) == 3 + 6
    shared = [[name for name in products if "shared_experts" in name] for products in exchanges]
    forward = [names for names in shared if any("transpose(jvp" not in name for name in names)]
    backward = [names for names in shared if any("transpose(jvp" in name for name in names)]
    assert len(forward) >= 2 and len(backward) >= 2
