"""The bytes that a TPU's compiler plans for what lies in the host's memory."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import offload_runs


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler for TPUs, is missing"
)
def test_activations_and_slots_go_from_the_device_to_its_host():
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env.pop("XLA_FLAGS", None)  # Of the CPU.
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.offload_runs"], capture_output=True, text=True,
        check=False, env=env, cwd=Path(__file__).parents[3],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    device, offload = json.loads(run.stdout.splitlines()[-1]).values()
    assert not any(size for name, size in device.items() if name.startswith("host"))
    # Of 64 x 512 tokens over 4 devices, float32: inputs of 512, queries of 512 and a hidden layer
    # of 2048, these two split in 2.
    a_layer = 4 * 64 * 512 // 4 * (512 + 512 // 2 + 2048 // 2)
    assert offload["host_temp"] == offload_runs.NUM_LAYERS * a_layer
    # But for what is on its way: while a layer is computed with, the next is fetched.
    assert device["temp"] - offload["temp"] >= (offload_runs.NUM_LAYERS - 2) * a_layer
    slots = device["argument"] - offload["argument"]
    assert offload["host_argument"] == offload["host_output"] == offload["host_alias"] == slots
    # Two moments of each weight, all float32; what is left of the arguments is a batch of int32.
    assert 0 <= device["argument"] - 3 * slots // 2 < 2 * 4 * 64 * 512 // 4
