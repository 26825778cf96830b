"""The tables of a profile, against sums by hand, and against the program of a job that trained."""

import dataclasses
import json
import os
import re

import jax
import jax.numpy as jnp
import pytest

from praxis_lite import ConfigError
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.hooks import profile_facts
from praxis_lite.trainer.hooks.profile_facts import DeviceFacts, ProfileFacts, read_facts
from praxis_tools.explain import hlo
from praxis_tools.plan.chips import CHIPS
from praxis_tools.plan.costs import FITTED
from praxis_tools.profile.buffers import largest_temporaries
from praxis_tools.profile.measured import OUTSIDE, Row, measure, text_of_step
from praxis_tools.profile.peak_memory import peak_memory
from praxis_tools.profile.profile_text import profile_text
from praxis_tools.profile.tables import PROFILE_TXT, folder_of, tables_of
from tests.support.job_runs import home, launch, succeed
from tests.support.line_jobs import LINE
from tests.support.traces import write_trace

# A loop of three turns, each with a matmul and an all-reduce over two devices; then a copy.
TEXT = """HloModule jit__train_step, is_scheduled=true, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (s: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %s = (s32[], f32[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[64,64] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %dot.1 = f32[64,64] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(_train_step)/jvp(enc)/while/body/ffn/dot_general"}
  %all-reduce.1 = f32[64,64] all-reduce(%dot.1), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(_train_step)/transpose(jvp(enc))/while/body/ffn/dot_general"}
  ROOT %out = (s32[], f32[64,64]) tuple(%next, %all-reduce.1)
}

%cond (s: (s32[], f32[64,64])) -> pred[] {
  %s = (s32[], f32[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}

ENTRY %main (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[64,64]) tuple(%zero, %p)
  %while.1 = (s32[], f32[64,64]) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[64,64] get-tuple-element(%while.1), index=1
  ROOT %copy.1 = f32[64,64] copy(%y)
}
"""  # noqa: E501
AXES = {"data": 2}
DEVICE = DeviceFacts(0, "cpu", "cpu", 0, None, None)
TRACE = "plugins/profile/step_5/process_0.xplane.pb"


def folder_with(path, kind="cpu", platform="cpu", **fields):
    """Returns a profile of two steps on two devices, of which the first was traced."""
    events, start = [], 0.0
    for run in (1, 2):
        stats = {"hlo_module": "jit__train_step", "device_ordinal": 0, "run_id": run}
        begin = start
        for name, duration in [*[("dot.1", 10.0), ("all-reduce.1", 20.0)] * 3, ("copy.1", 4.0)]:
            events.append((name, start, duration, {"hlo_op": name, **stats}))
            start += duration + 1.0
        events.append(("while.1", begin, 95.0, {"hlo_op": "while.1", **stats}))
        start += 1000.0
    write_trace(path / TRACE, {"/host:CPU": {"a": events}})
    (path / profile_facts.HLO_TXT).write_text(TEXT)
    (path / profile_facts.HLO_PROTO).write_bytes(b"")
    facts = ProfileFacts(
        first_step=5,
        last_step=6,
        seconds=0.01,
        axis_sizes=AXES,
        devices=[
            dataclasses.replace(DEVICE, id=id, platform=platform, device_kind=kind) for id in (0, 1)
        ],
        arrays={"mdl_vars/w": 700, "step": 4},
        step_bytes={
            "argument": 1000,
            "output": 704,
            "temp": 2000,
            "alias": 704,
            "generated_code": 0,
        },
        peak_bytes={},
    )
    facts = dataclasses.replace(facts, **fields)
    (path / "profile.json").write_text(json.dumps(dataclasses.asdict(facts)))
    return path


def spoilt(path, **fields):
    file = path / "profile.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_layers_and_collectives_of_a_trace_by_hand(tmp_path):
    measured = measure(folder_with(tmp_path))
    us = {name: (row.count, round(1e6 * row.seconds, 3)) for name, row in measured.layers.items()}
    assert us == {"enc/ffn": (3, 30), OUTSIDE: (1, 4)}
    ((key, row),) = measured.collectives.items()
    assert key == ("all-reduce", ("data",), "gradient of enc/ffn")
    assert (row.count, round(1e6 * row.seconds, 3)) == (3, 60)
    # Seven instructions with gaps of a microsecond between.
    assert measured.step_seconds == pytest.approx(100e-6)
    assert measured.idle_seconds == pytest.approx(6e-6)
    # Three matmuls of 2 x 64^3 flops, at the share of the peak that the plan expects.
    dots = 3 * 2 * 64**3 / (CHIPS["cpu"].peak("f32") * FITTED.matmul)
    assert measured.layers["enc/ffn"].predicted == pytest.approx(dots)
    text = profile_text(measured, peak_memory(tmp_path))
    assert re.search(r"enc/ffn +30 us +30\.0% +3 ", text)
    assert re.search(r"all-reduce data  gradient of enc/ffn +60 us +60\.0% +3 ", text)
    assert "on 2 cpu devices (1 of them traced)" in text and " more " not in text
    # Of two layers and of two arrays, the larger ones.
    text = profile_text(measured, peak_memory(tmp_path), max_rows=1)
    assert re.search(r"1 more +4 us +4\.0% +1 ", text) and OUTSIDE not in text


def test_memory_adds_up_to_what_the_compiler_plans(tmp_path):
    memory = peak_memory(folder_with(tmp_path))
    assert (memory.peak, memory.batch, memory.outputs) == (3000, 296, 0)
    assert memory.arrays == {"mdl_vars/w": 700, "step": 4}
    assert memory.used is None
    text = tables_of(tmp_path)
    assert "not reported on the platform cpu" in text
    assert re.search(r"mdl_vars/w +700 B +23\.3%", text)
    used = folder_with(tmp_path / "used", peak_bytes={0: 5 * 2**20, 1: 2**20})
    assert "5.0 MiB" in tables_of(used)


def test_nothing_is_predicted_of_unknown_devices_and_that_is_said(tmp_path):
    folder_with(tmp_path, kind="Abacus 9", platform="abacus")
    measured = measure(tmp_path)
    assert measured.topology is None and measured.predicted_seconds is None
    assert all(row.predicted is None for row in measured.layers.values())
    assert "no predictions: the peak rates of Abacus 9 are unknown" in tables_of(tmp_path)
    folder_with(tmp_path, kind="a\x1b[31m terminal's", platform="abacus")
    assert "\x1b" not in tables_of(tmp_path)
    assert "all-reduce data" in tables_of(tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: (path / "profile.json").write_text('{"first_step": 5}'),
        lambda path: (path / "profile.json").write_text("[1]"),
        lambda path: (path / "profile.json").unlink(),
        lambda path: spoilt(path, devices=[{"id": 0}]),
        lambda path: spoilt(path, more=5),
        lambda path: (path / profile_facts.HLO_TXT).write_text("no program"),
        lambda path: (path / profile_facts.HLO_PROTO).write_bytes(b"\x0a\xff\xff"),
        lambda path: (path / profile_facts.HLO_TXT).write_text(TEXT.replace("%body (", "%bod (")),
        lambda path: (path / TRACE).unlink(),
        lambda path: ((path / TRACE).unlink(), os.mkfifo(path / TRACE)),
    ],
)
def test_missing_and_damaged_files_are_named(tmp_path, spoil):
    spoil(folder_with(tmp_path))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        tables_of(tmp_path)


def test_a_step_that_has_no_profile_is_named_with_those_that_have(tmp_path):
    files = JobDir(tmp_path)
    with pytest.raises(ConfigError, match="no profile. Train with --set run.profile.steps"):
        folder_of(files, None)
    for step in (9, 30):
        (files.profiles / str(step)).mkdir(parents=True)
        (files.profiles / str(step) / "profile.json").touch()
    assert folder_of(files, None).name == "30"
    with pytest.raises(ConfigError, match="--step is 3; .*: 9, 30"):
        folder_of(files, 3)


def test_the_largest_temporary_is_the_array_that_the_program_makes(tmp_path):
    def step(x):
        with jax.named_scope("wide"):
            wide = jnp.sin(x @ jnp.ones((8, 3001)))
        return jnp.sum(wide @ wide.T)

    compiled = jax.jit(step).lower(jnp.ones((7, 8))).compile()
    stats = compiled.memory_analysis()
    file = tmp_path / "step.pb"
    file.write_bytes(profile_facts._hlo_proto(compiled, stats))
    temporaries = largest_temporaries(file)
    assert 7 * 3001 * 4 in [size for _, size in temporaries[:3]]
    assert sum(size for _, size in temporaries) <= stats.temp_size_in_bytes
    text = compiled.as_text()
    assert all(f"%{name} " in text for name, _ in temporaries)


# Two scopes with the same matmul, once and ten times.
EXPERIMENTS = '''
import fiddle as fdl
import jax
import jax.numpy as jnp
import optax

from praxis_lite import MeshConfig, RunConfig, register
from praxis_lite.core.learner.learner import Learner
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask
from jobzoo.lines import Line, Lines


def init(key):
    return {"light": jnp.eye(384), "heavy": jnp.eye(384)}


def loss(params, inputs, key):
    x = jnp.broadcast_to(inputs["labels"][:1], (384, 384)) / 400
    with jax.named_scope("light"):
        x = jnp.tanh(x @ params["light"])
    with jax.named_scope("heavy"):
        for _ in range(10):
            x = jnp.tanh(x @ params["heavy"])
    return jnp.sum(x) * 1e-6 + jnp.square(inputs["labels"])


@register
class Heavy(Line):
    """A layer ten times as heavy as another."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 1, 1))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.sgd), learning_rate=0.1)
        return fdl.Config(LossTask, fdl.Config(FunctionModel, init), loss, learner)

    def datasets(self):
        return {"train": fdl.Config(Lines, batch_size=13)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=12)
'''


@pytest.mark.slow
def test_a_layer_of_ten_times_the_work_takes_about_ten_times_the_time(tmp_path):
    assert LINE  # Its module writes the experiment that this one starts from.
    (home() / "jobzoo/heavy.py").write_text(EXPERIMENTS)
    done = succeed(
        "--exp=jobzoo.heavy.Heavy",
        f"--job_log_dir={tmp_path / 'job'}",
        "--set",
        "run.profile.steps=3:13",
    )
    folder = JobDir(tmp_path / "job").profiles / "3"
    layers = measure(folder).layers
    heavy, light = (
        layers[name].seconds + layers[f"gradient of {name}"].seconds for name in ("heavy", "light")
    )
    # A machine that does other work too stalls now the one layer and now the other.
    assert 3 < heavy / light < 30, layers
    assert next(iter(layers)) == "gradient of heavy"
    assert layers["heavy"].predicted / layers["light"].predicted == pytest.approx(10, rel=0.2)
    assert "heavy" in done.out and "more rows: " in done.out
    shown = launch("--mode=profile", f"--job_log_dir={tmp_path / 'job'}", "--step=3")
    assert shown.code == 0, shown.err
    assert shown.out == (folder / PROFILE_TXT).read_text()


@pytest.mark.slow
def test_counts_and_sums_are_those_of_the_program_on_eight_devices(tmp_path):
    succeed(
        "--exp=jobzoo.experiments.Tiny",
        f"--job_log_dir={tmp_path / 'job'}",
        "--set",
        "run.profile.steps=4:6",
    )
    folder = JobDir(tmp_path / "job").profiles / "4"
    measured, facts = measure(folder), read_facts(folder)
    counts = {}
    for (kind, *_), row in measured.collectives.items():
        counts[kind] = counts.get(kind, 0) + row.count
    expected = hlo.summarize(hlo.collectives(text_of_step(folder), facts.axis_sizes))
    assert counts == {kind: count for kind, (count, _) in expected.items()}
    rows: list[Row] = [*measured.layers.values(), *measured.collectives.values()]
    # XLA's threads run some instructions of a device beside each other.
    total = sum(row.seconds for row in rows) + measured.idle_seconds
    assert measured.step_seconds == pytest.approx(total, rel=0.2)
    assert measured.num_devices == 8
    memory = peak_memory(folder)
    assert sum(memory.layers.values()) <= memory.temporaries
    assert sum(memory.layers.values()) > 0.9 * memory.temporaries
    layout = JobDir(tmp_path / "job").layout_txt.read_text()
    for path, size in memory.arrays.items():
        assert re.search(rf"^{re.escape(path)} .* {size:,}( |$)", layout, re.MULTILINE), path
