"""The blocks of docs/plan.md run, on a small model and simulated devices."""

import json
import re
import shlex
import sys
from pathlib import Path

import fiddle as fdl
import pytest

from praxis_lite import MeshConfig
from tests.support.job_runs import launch

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text("utf-8")
SMALL = [
    "--set", "ROWS=8", "SEQ_LEN=64", "MODEL_DIMS=32", "HIDDEN_DIMS=48", "NUM_LAYERS=2",
    "NUM_HEADS=4", "VOCAB_SIZE=61",
]


@pytest.mark.slow
def test_the_pages_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    experiment, _, mesh_for, budgets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    Path("my_pods.py").write_text(experiment, "utf-8")
    commands = re.findall(r"^python main.py (?!.*--steps=decode).*", PAGE, re.MULTILINE)
    plan, of_7b, search, again, measured, corrected = (
        re.sub(r"v5e:\w+", "cpu:8", command).replace("minutes=8", "minutes=0.02")
        for command in commands
    )
    assert "cpu:8" in plan
    done = launch(*shlex.split(of_7b)[2:], *SMALL)
    assert done.code == 0, done.err
    record = json.loads(Path("plan.json").read_text())
    named = re.search(r"## JSON\n\n(.*?): these stay", PAGE, re.DOTALL).group(1)
    outer = re.sub(r"\(a list of.*?\)", "", named, flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", outer)) <= set(record)
    done = launch(*shlex.split(search)[2:], *SMALL)
    assert done.code == 0, done.err
    assert "The fastest that fits" in done.out and "--packages=plan_search,my_pods" in done.out
    done = launch(*shlex.split(again)[2:])
    assert done.code == 0, done.err
    done = launch(*shlex.split(measured)[2:], *SMALL, "mesh.ici_mesh_shape=(1,8,1)")
    assert done.code == 0, done.err
    done = launch(*shlex.split(corrected)[2:], *SMALL)
    assert done.code == 0, done.err
    assert "of the plan (median of 1 in residuals.jsonl)" in done.out
    names = {"Llama7BOnOneSlice": object, "fdl": fdl, "MeshConfig": MeshConfig}
    exec(mesh_for, names)
    assert names["Llama7B"]().mesh_for(7) is None
    assert names["Llama7B"]().mesh_for(16).ici_mesh_shape == (1, 2, 8)
    exec(budgets, names)
    names["test_what_my_step_sends"]()
