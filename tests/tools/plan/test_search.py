"""The search: which candidates there are, in which order, and what it writes runs as it is."""

import dataclasses
import json
import math
import sys
import types
from pathlib import Path

import pytest

from praxis_lite.config.experiment_overrides import configured
from praxis_lite.experiment import registry
from praxis_tools.plan.search import search as searching
from praxis_tools.plan.search.candidates import candidates, diversify, paths_of
from praxis_tools.plan.search.search_report import pareto_front, table
from praxis_tools.plan.topology import topology_of
from tests.support.job_runs import launch


@pytest.fixture(scope="module")
def found():
    config = configured(registry.get_experiment("lm.Synthetic"), ["mesh.ici_mesh_shape=(1,-1,1)"])
    topology = topology_of("cpu:8")
    shape = searching.shape_of(config, topology)
    return shape, list(candidates(config, shape, topology))


def test_the_sizes_are_the_models(found):
    shape, _ = found
    assert (shape.num_layers, shape.model_dims, shape.rows, shape.tokens_per_row) == (2, 32, 16, 32)
    assert shape.slots == pytest.approx(2, abs=0.1)  # Adam's, and a few counts.


def test_every_candidate_fills_the_devices_and_goes_together(found):
    _, all_found = found
    assert len({element.settings for element in all_found}) == len(all_found) > 50
    for item in all_found:
        layout = item.layout
        assert layout.num_devices == 8
        assert (layout.mdl == 1) == (layout.mdl_splits == "rows")
        assert 16 % layout.accumulation_steps == 0
        assert math.isfinite(item.seconds) and item.bytes > 0
    assert {one.preset for one in all_found} >= {
        "fsdp",
        "fsdp+tensor",
        "fsdp+ring",
        "megatron",
        "fsdp+context",
    }


def test_one_of_each_kind_comes_before_a_second(found):
    order = diversify(sorted(found[1], key=lambda item: item.seconds))
    assert sorted(map(repr, order)) == sorted(map(repr, found[1]))
    kinds = [(element.preset, element.layout.policy) for element in order]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))


def test_a_pipelines_candidates_are_its_schedules():
    config = configured(registry.get_experiment("pipelined.PyDocs"), [])
    topology = topology_of("cpu:8")
    shape = searching.shape_of(config, topology)
    result = list(candidates(config, shape, topology))
    # Four layers on two stages: once or twice round; with fewer microbatches than stages once.
    assert {item.settings[1].split("=")[1] for item in result} == {"1", "2"}
    by_number = {
        element.settings[0]: element.seconds
        for element in result
        if element.layout.policy == "save_everything" and element.settings[1].endswith("repeat=1")
    }
    path = "task.model.stacked_transformer_tpl.num_microbatches"
    assert by_number[f"{path}=8"] < by_number[f"{path}=2"] < by_number[f"{path}=1"]


def test_where_remat_is_set():
    config = configured(registry.get_experiment("lm.Synthetic"), [])
    expected = ["task.model.stacked_transformer_tpl.checkpoint_policy"]
    assert list(paths_of(config.task, "checkpoint_policy", "task")) == expected


@dataclasses.dataclass
class Plan:
    step_seconds: float | None
    peak_bytes_per_device: int
    fits: bool = True
    mfu: float | None = 0.5


def test_the_front_is_what_nothing_beats_in_both():
    best, slim, worse, large = Plan(1.0, 100), Plan(2.0, 50), Plan(3.0, 70), Plan(0.5, 900, False)
    unknown = Plan(None, 1000, False, None)
    item = type("One", (), {"name": "a"})()
    plans = [(item, plan) for plan in (worse, best, unknown, slim, large)]
    assert pareto_front(plans) == [best, slim]
    lines = table(plans).splitlines()
    assert [line[0] for line in lines[1:]] == [" ", "*", "*", " ", " "]
    assert searching.fastest(plans)[1] is best


def test_candidates_are_compiled_until_the_minutes_are_over(monkeypatch):
    clock, compiled = types.SimpleNamespace(seconds=1000.0), []

    def compile_for_half_a_minute(launched, packages, candidate, topology):
        clock.seconds += 30
        compiled.append(candidate.name)
        return Plan(1.0, 100)

    clock.monotonic = lambda: clock.seconds
    monkeypatch.setattr(searching, "time", clock)
    monkeypatch.setattr(searching, "shape_of", lambda config, topology: None)
    tried = [types.SimpleNamespace(name=f"{k}", seconds=1.0, bytes=0) for k in range(9)]
    monkeypatch.setattr(searching, "candidates", lambda config, shape, topology: tried)
    monkeypatch.setattr(searching, "diversify", lambda candidates: candidates)
    monkeypatch.setattr(searching, "plan_candidate", compile_for_half_a_minute)
    monkeypatch.setattr(searching, "_write", lambda *args: None)
    launched = types.SimpleNamespace(config=None)
    searching.search(launched, (), topology_of("cpu:8"), minutes=2.4, file=None)
    assert compiled == ["0", "1", "2", "3", "4"]


def test_a_mesh_of_other_axes_is_refused():
    done = launch("--mode=plan", "--exp=nnx_guide.DotReluDot", "--topology=cpu:8", "--search")
    assert done.code == 2
    assert "--search " in " ".join(done.err.split())


@pytest.mark.slow
def test_a_search_writes_an_experiment_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("plan_search")]:
        monkeypatch.delitem(sys.modules, name)  # Another search of this process wrote it.
    command = ["--mode=plan", "--topology=cpu:8"]
    done = launch(
        *command,
        "--exp=lm.Synthetic",
        "--search",
        "--search_minutes=0.02",
        "--set",
        "task.learner.learning_rate=3e-3",
    )
    assert done.code == 0, done.err
    assert "--set 'task.learner.learning_rate=3e-3'" in done.out
    records = json.loads(Path("plan_search/plans.json").read_text())
    assert records and all(record["topology"] == "cpu:8" for record in records)
    assert Path("plan_search/pareto.png").stat().st_size > 1000
    again = launch(
        *command,
        "--packages=plan_search",
        "--exp=plan_search.best.SyntheticPlanned",
        "--json=plan.json",
    )
    assert again.code == 0, again.err
    # The class is the configuration that was found: it has the same program.
    best = min((r for r in records if r["fits"]), key=lambda r: r["step_seconds"])
    actual = json.loads(Path("plan.json").read_text())["step_seconds"]
    assert actual == pytest.approx(best["step_seconds"])
