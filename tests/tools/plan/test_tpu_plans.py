"""Plans by the TPU's own compiler, on a machine without a TPU."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.job_runs import CHECKOUT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the compiler for TPUs, is missing",
    ),
]

COMMANDS = {
    "slice": ["--exp=lm.PyDocs", "--topology=v5e:2x4"],
    "two slices": [
        "--exp=lm.PyDocs",
        "--topology=v5e:2x2",
        "--num_slices=2",
        "--set",
        "mesh.ici_mesh_shape=(1,2,2)",
        "mesh.dcn_mesh_shape=(1,2,1)",
    ],
    "no such slice": ["--exp=lm.PyDocs", "--topology=v5e:3x7"],
    "no mesh of slices": [
        "--exp=lm.PyDocs",
        "--topology=v5e:2x2",
        "--num_slices=2",
        "--set",
        "mesh.ici_mesh_shape=(1,-1,2)",
    ],
}
NIGHTLY_COMMANDS = {
    "too large": [
        "--exp=lm.PyDocs",
        "--topology=v5e:1x1",
        "--set",
        "mesh.ici_mesh_shape=(1,1,1)",
        "task.model.model_dims=8192",
        "task.model.hidden_dims=32768",
        "task.model.num_heads=64",
        "task.model.num_layers=16",
        "task.model.dim_per_head=128",
    ],
    "decoding": [
        "--exp=lm.Llama",
        "--topology=v5e:2x4",
        "--steps=decode",
        "--batch_sizes=1,64",
    ],
}
# Prints the exit status and the errors of each command, and the text of a program.
PROGRAM = """
import contextlib, io, json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from praxis_lite.core import MeshConfig, make_mesh
from praxis_lite.main import main
from praxis_tools.plan.topology import topology_of

ended = []
for argv in json.loads(sys.argv[1]):
    err, status = io.StringIO(), 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(["--mode=plan", *argv])
        except SystemExit as end:
            status = end.code
    ended.append((status, " ".join(err.getvalue().split())))
mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 64, 1)), topology_of("v5p:4x4x4").devices)
split = NamedSharding(mesh, P("data"))
gather = jax.jit(lambda x: x * 2, in_shardings=split, out_shardings=NamedSharding(mesh, P()))
text = gather.lower(jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)).compile().as_text()
print(json.dumps([ended, text]))
"""


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a command left: its exit status, its errors and the plan in its file."""

    status: int
    errors: str
    plan: dict[str, Any] | None


def planned_by(named, folder):
    """Returns what each command planned, and the program of a gather over 64 devices."""
    files = [folder / f"{number}.json" for number in range(len(named))]
    commands = [
        [*words, f"--json={file}"] for words, file in zip(named.values(), files, strict=True)
    ]
    # Neither this suite's choice of a platform nor its flags for CPUs: as a user has it.
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        env={**environment, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0, done.stderr
    ended, text = json.loads(done.stdout.splitlines()[-1])
    plans = {
        name: Planned(*end, json.loads(file.read_text()) if file.exists() else None)
        for name, end, file in zip(named, ended, files, strict=True)
    }
    return plans, text


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    return planned_by(COMMANDS, tmp_path_factory.mktemp("plans"))


@pytest.fixture
def plans(printed):
    return printed[0]


@pytest.fixture(scope="module")
def nightly_plans(tmp_path_factory):
    return planned_by(NIGHTLY_COMMANDS, tmp_path_factory.mktemp("plans"))[0]


def test_a_plan_for_a_slice_and_for_two(plans):
    assert plans["slice"].status == 0, plans["slice"].errors
    item = plans["slice"].plan
    assert item["fits"] and item["num_devices"] == 8
    assert 0 < item["step_seconds_low"] < item["step_seconds"] < item["step_seconds_high"] < 0.1
    assert {axis for actual in item["collectives"] for axis in actual["axes"]} == {"data", "mdl"}
    # Splash's matmuls are counted, and no kernel is unknown.
    assert item["notes"] == []
    assert plans["two slices"].status == 0, plans["two slices"].errors
    two = plans["two slices"].plan
    assert two["num_devices"] == 8
    assert any(result["crosses_slices"] for result in two["collectives"])
    assert two["exposed_seconds"] > item["exposed_seconds"]  # Between slices it is slower.


@pytest.mark.nightly
def test_what_does_not_fit(nightly_plans):
    large = nightly_plans["too large"]
    assert large.status == 2 and large.plan["fits"] is False
    assert "does not fit on v5e:1x1" in large.errors and "a mesh of at least" in large.errors


def test_what_libtpu_refuses(plans):
    refused, of_slices = (plans[name] for name in ("no such slice", "no mesh of slices"))
    assert [refused.status, of_slices.status] == [2, 2]
    assert "libtpu does not accept it" in refused.errors and refused.plan is None
    assert "mesh.dcn_mesh_shape is None" in of_slices.errors


@pytest.mark.nightly
def test_a_token_of_many_rows_is_no_loop_over_them(nightly_plans):
    decoding = nightly_plans["decoding"]
    assert decoding.status == 0, decoding.errors
    one = decoding.plan
    (many,) = one["other_steps"]
    for item in (one, many):
        assert 0 < item["decoding"]["share_of_limit"] < 1
        assert item["decoding"]["first_token_seconds"] > 0
    # 16 rows a device; a loop over them takes 5 us for each row and cache.
    assert many["step_seconds"] < one["step_seconds"] + 16 * 8 * 5e-6 / 2


def test_a_whole_slice_gathers_over_the_links_that_join_its_ends(printed):
    """Of a mesh, whose ends are not joined, it makes an all-reduce of zeros: twice the bytes."""
    _, text = printed
    assert " all-gather(" in text and " all-reduce(" not in text
    assert '"emitter":"3DAllGather' in text
