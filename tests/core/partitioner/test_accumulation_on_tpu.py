"""The bytes that a TPU's program of micro-batches sums over devices: those of one batch."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh

from praxis_lite.core.partitioner import compiler_options


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler for TPUs, is missing"
)
def test_gradients_are_summed_over_devices_once_a_step():
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env.pop("XLA_FLAGS", None)  # Of the CPU.
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.accumulation_runs"], capture_output=True, text=True,
        check=False, env=env, cwd=Path(__file__).parents[3],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    whole, micro_batches = json.loads(run.stdout.splitlines()[-1])
    assert whole.keys() == micro_batches.keys() == {"all-reduce"}
    # Of each weight a gradient: two tables, and of three layers 4 projections and 2 of the MLP.
    weights = 2 * 256 * 128 + 3 * (4 * 128 * 128 + 2 * 128 * 512)
    assert 4 * weights <= whole["all-reduce"] <= 1.01 * 4 * weights
    # But for scalars: the sum of the weights of each micro-batch's tokens.
    assert 0 <= micro_batches["all-reduce"] - whole["all-reduce"] <= 4 * 4 * 4


def test_an_option_of_the_users_own_is_kept_and_other_platforms_have_none(monkeypatch):
    mesh, ours = Mesh(jax.devices(), "data"), compiler_options.ACCUMULATING
    assert compiler_options.more_options(ours, None, mesh) is None
    monkeypatch.setattr(
        compiler_options, "step_options", lambda options, mesh: options.get("tpu")
    )
    ((name, value),) = compiler_options.more_options(ours, None, mesh).items()
    assert compiler_options.more_options(ours, {name: 0}, mesh) == {name: 0} != {name: value}
    assert compiler_options.more_options({}, {"other": 1}, mesh) == {"other": 1}
