"""Plans by the TPU's own compiler, on a machine without a TPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.support.job_runs import CHECKOUT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the compiler for TPUs, is missing",
    ),
]


def run(tmp_path, *words):
    # Neither this suite's choice of a platform nor its flags for CPUs: as a user has it.
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-m", "praxis_lite.main", "--mode=plan", *words,
         f"--json={tmp_path / 'plan.json'}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=500,
        env={**environment, "PYTHONPATH": str(CHECKOUT)},
    )


def test_a_plan_for_a_slice_and_for_two(tmp_path):
    done = run(tmp_path, "--exp=lm.PyDocs", "--topology=v5e:2x4")
    assert done.returncode == 0, done.stderr
    item = json.loads((tmp_path / "plan.json").read_text())
    assert item["fits"] and item["num_devices"] == 8
    assert 0 < item["step_seconds_low"] < item["step_seconds"] < item["step_seconds_high"] < 0.1
    assert {axis for actual in item["collectives"] for axis in actual["axes"]} == {"data", "mdl"}
    # Splash's matmuls are counted, and no kernel is unknown.
    assert item["notes"] == []
    done = run(
        tmp_path, "--exp=lm.PyDocs", "--topology=v5e:2x2", "--num_slices=2", "--set",
        "mesh.ici_mesh_shape=(1,2,2)", "mesh.dcn_mesh_shape=(1,2,1)",
    )
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "plan.json").read_text())
    assert two["num_devices"] == 8
    assert any(result["crosses_slices"] for result in two["collectives"])
    assert two["exposed_seconds"] > item["exposed_seconds"]  # Between slices it is slower.


def test_what_does_not_fit_and_what_libtpu_refuses(tmp_path):
    wide = "mesh.ici_mesh_shape=(1,1,1)"
    size = ["task.model.model_dims=8192", "task.model.hidden_dims=32768", "task.model.num_heads=64",
            "task.model.num_layers=16", "task.model.dim_per_head=128"]
    done = run(tmp_path, "--exp=lm.PyDocs", "--topology=v5e:1x1", "--set", wide, *size)
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert "does not fit on v5e:1x1" in message and "a mesh of at least" in message
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False
    done = run(tmp_path, "--exp=lm.PyDocs", "--topology=v5e:3x7")
    assert done.returncode == 2 and "libtpu says" in " ".join(done.stderr.split())
    done = run(
        tmp_path, "--exp=lm.PyDocs", "--topology=v5e:2x2", "--num_slices=2", "--set",
        "mesh.ici_mesh_shape=(1,-1,2)",
    )
    assert done.returncode == 2 and "mesh.dcn_mesh_shape is None" in " ".join(done.stderr.split())


def test_a_token_of_many_rows_is_no_loop_over_them(tmp_path):
    done = run(
        tmp_path, "--exp=lm.Llama", "--topology=v5e:2x4", "--steps=decode", "--batch_sizes=1,64",
    )
    assert done.returncode == 0, done.stderr
    one = json.loads((tmp_path / "plan.json").read_text())
    (many,) = one["other_steps"]
    for item in (one, many):
        assert 0 < item["decoding"]["share_of_limit"] < 1
        assert item["decoding"]["first_token_seconds"] > 0
    # 16 rows a device; a loop over them takes 5 us for each row and cache.
    assert many["step_seconds"] < one["step_seconds"] + 16 * 8 * 5e-6 / 2


_GATHER = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from praxis_lite.core import MeshConfig, make_mesh
from praxis_tools.plan.topology import topology_of
mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 64, 1)), topology_of("v5p:4x4x4").devices)
split = NamedSharding(mesh, P("data"))
gather = jax.jit(lambda x: x * 2, in_shardings=split, out_shardings=NamedSharding(mesh, P()))
print(gather.lower(jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)).compile().as_text())
"""


def test_a_whole_slice_gathers_over_the_links_that_join_its_ends():
    """Of a mesh, whose ends are not joined, it makes an all-reduce of zeros: twice the bytes."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", _GATHER], capture_output=True, text=True, timeout=500,
        env={**environment, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0, done.stderr
    assert " all-gather(" in done.stdout and " all-reduce(" not in done.stdout
    assert '"emitter":"3DAllGather' in done.stdout
