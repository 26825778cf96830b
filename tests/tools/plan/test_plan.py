"""Plans of small models on simulated devices, against explain, the compiler and hand counts."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from praxis_lite import ConfigError
from praxis_lite.config.build import build
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.experiment import registry
from praxis_tools.explain import hlo, hlo_matmuls
from praxis_tools.plan.chips import CHIPS
from praxis_tools.plan.job_on_topology import planned_partitioner, step_specs
from praxis_tools.plan.job_plan import plan_job
from praxis_tools.plan.memory import parse_out_of_memory, stacked_array_bytes
from praxis_tools.plan.plan_text import plan_text
from praxis_tools.plan.predict import compile_with_text, plan_of_compiled, plan_step
from praxis_tools.plan.search.formulas import bubble_share
from praxis_tools.plan.topology import Topology, topology_of
from tests.support.job_runs import launch

CONTRACT = {
    "fits": bool,
    "peak_bytes_per_device": int,
    "hbm_bytes_per_device": int,
    "step_seconds": float,
    "step_seconds_low": float,
    "step_seconds_high": float,
    "flops_per_device": int,
    "mfu": float,
    "collectives": list,
    "parameters": int,
    "compile_seconds": float,
    "topology": str,
    "num_devices": int,
}
ONE = {
    "kind": str,
    "axes": list,
    "layer": str,
    "count": int,
    "bytes": int,
    "exposed_seconds": float,
}


def job_of(*settings, exp="lm.Synthetic"):
    return build(configured(registry.get_experiment(exp), settings))


@pytest.fixture(scope="module")
def compiled():
    """The train step of a scanned model with remat, compiled once for eight devices."""
    job = job_of(
        "task.model.stacked_transformer_tpl.checkpoint_policy=save_nothing",
        "SHARDING_PRESET=fsdp+tensor",
    )
    topology = topology_of("cpu:8")
    partitioner = planned_partitioner(job, topology)
    ((step, _, spec),) = step_specs(job, partitioner, [partitioner.train_step])
    lowered = step.lower(spec)
    return partitioner, spec, topology, lowered.compile()


@pytest.fixture(scope="module")
def plan(compiled):
    partitioner, spec, topology, step = compiled
    return plan_of_compiled(partitioner, partitioner.train_step, spec, topology, step, 1.5)


def test_the_fields_of_json_are_a_contract(plan):
    record = json.loads(json.dumps(plan.to_json()))
    for name, kind in CONTRACT.items():
        assert type(record[name]) is kind, name
    assert record["collectives"]
    for item in record["collectives"]:
        for name, kind in ONE.items():
            assert type(item[name]) is kind, name
    assert (record["topology"], record["num_devices"]) == ("cpu:8", 8)


def test_a_plan_says_what_explain_and_the_compiler_say(plan, compiled):
    partitioner, _, _, step = compiled
    planned = hlo.memory_per_device(step)
    assert plan.peak_bytes_per_device == planned.peak
    parts = dataclasses.asdict(plan.memory)
    peak, _ = parts.pop("peak"), parts.pop("padding")
    assert sum(parts.values()) == peak
    leaves = list(partitioner.layout.leaves())
    assert plan.memory.weights + plan.memory.slots == sum(x.bytes_per_device for x in leaves)
    assert plan.parameters == sum(
        math.prod(x.shape) for x in leaves if x.path.startswith("mdl_vars/params")
    )
    assert plan.flops_per_device == hlo_matmuls.flops(step)
    actual = hlo.summarize(hlo.collectives(step))
    for kind, (count, size) in actual.items():
        ours = [item for item in plan.timeline.collectives.values() if item.kind == kind]
        assert (sum(our.count for our in ours), sum(one.bytes for one in ours)) == (count, size)


def test_activations_and_gradients_of_the_stack_by_hand(plan):
    # Two layers keep their inputs: rows over data (4), time over mdl (2), 32 dims in float32.
    assert plan.memory.activations >= 2 * (16 // 4) * (32 // 2) * 32 * 4
    assert plan.memory.gradients > 0
    # The backward pass computes the blocks again, and a block is most of the forward pass.
    assert 0.1 < plan.recomputed_flops / plan.flops_per_device < 0.3
    assert plan.hfu > plan.mfu


def test_seconds_add_up_and_are_in_their_range(plan):
    assert plan.step_seconds_low < plan.step_seconds < plan.step_seconds_high
    parts = plan.compute_seconds + plan.memory_seconds + plan.exposed_seconds
    assert plan.step_seconds == pytest.approx(parts)
    assert plan.tokens_per_second == pytest.approx(16 * 32 / 8 / plan.step_seconds)
    text = plan_text(plan)
    assert "fits      yes" in text and "a nominal core" in text and "exposed" in text
    assert "MFU" not in text  # Of simulated devices.


def too_small(compiled, hbm_bytes):
    partitioner, spec, topology, step = compiled
    chip = dataclasses.replace(topology.chip, hbm_bytes=hbm_bytes)
    small = dataclasses.replace(topology, chip=chip)
    return plan_of_compiled(partitioner, partitioner.train_step, spec, small, step, 1.0)


def test_what_just_fits_fits_and_a_byte_less_does_not(compiled, plan):
    peak = plan.peak_bytes_per_device
    assert too_small(compiled, peak).fits
    assert too_small(compiled, peak).why_not == ""
    assert not too_small(compiled, peak - 1).fits


def test_a_state_that_is_too_large_wants_more_devices_and_split_slots(compiled, plan):
    message = too_small(compiled, plan.memory.weights).why_not
    assert "a mesh of at least" in message and "slot_mesh_axes, ZeRO-1" in message


def test_activations_that_are_too_large_want_remat_and_microbatches(compiled, plan):
    text = too_small(compiled, plan.peak_bytes_per_device - 1).why_not
    assert "checkpoint_policy to 'save_nothing'" in text and "gradient_accumulation_steps" in text
    assert "a mesh of at least" not in text


OOM = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (97.58G) exceeds available HBM (94.74G). HLO module: jit_f."
)


def test_a_compiler_that_gives_up_is_a_plan_that_does_not_fit(compiled, monkeypatch):
    partitioner, spec, topology, _ = compiled

    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError(OOM)

    monkeypatch.setattr(partitioner.train_step, "lower", lambda spec: Lowered())
    result = plan_step(partitioner, partitioner.train_step, spec, topology)
    assert (result.fits, result.step_seconds) == (False, None)
    assert result.peak_bytes_per_device == int(97.58 * 2**30)
    assert "97.58G" in result.notes[0] and "Try one of" in result.why_not
    assert "does not fit" in plan_text(result)
    json.dumps(result.to_json())
    assert parse_out_of_memory(ValueError("something else")) is None


@pytest.mark.parametrize("reads", [True, False])
def test_what_xla_cannot_read_is_read_from_the_compilers_own_files(reads):
    class Compiled:
        def as_text(self):
            if reads:
                return "its own"
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: async-update")

        def memory_analysis(self):
            return 5

    class Lowered:
        def compile(self, options):
            folder = Path(options["xla_dump_to"])
            (folder / "module_1.jit_f.after_codegen.txt").write_text("HloModule of the step")
            (folder / "module_2.extracted.after_codegen.txt").write_text("HloModule")
            return Compiled()

    topology = Topology("tpu7x:4x4x4", CHIPS["tpu7x"], (4, 4, 4), 1, [])
    step = compile_with_text(Lowered(), topology)
    assert step.as_text() == ("its own" if reads else "HloModule of the step")
    assert step.memory_analysis() == 5


def test_gpus_are_modeled_and_said_to_be():
    topology = topology_of("gpu:h100:1x8")
    job = job_of()
    partitioner = planned_partitioner(job, topology)
    ((step, _, spec),) = step_specs(job, partitioner, [partitioner.eval_step])
    result = plan_step(partitioner, step, spec, topology)
    assert "modeled, not compiled" in result.notes[0]
    assert result.step_seconds_low < result.step_seconds < result.step_seconds_high


def test_a_mesh_that_does_not_fill_the_topology_is_refused():
    with pytest.raises(ConfigError, match=r"8.*cpu:4.*4.*ici_mesh_shape=\(1,-1"):
        planned_partitioner(job_of(), topology_of("cpu:4"))


def test_what_is_left_over_of_a_mesh_is_filled():
    job = job_of("mesh.ici_mesh_shape=(1,-1,2)")
    assert dict(planned_partitioner(job, topology_of("cpu:8")).mesh.shape)["data"] == 4
    with pytest.raises(ConfigError, match=r"mesh\.ici_mesh_shape.*\(1, -1, 2\).*3"):
        planned_partitioner(job, topology_of("cpu:3"))


def test_steps_without_a_dataset_are_refused():
    with pytest.raises(ConfigError, match=r"--steps=decode.*decode_datasets\(\)"):
        plan_job(job_of(), topology_of("cpu:8"), ["decode"])


def test_a_pipelines_bubbles_are_told():
    # Two stages, four microbatches, each twice round: 1 of 9 ticks.
    job = job_of(exp="pipelined.PyDocs")
    partitioner = planned_partitioner(job, topology_of("cpu:8"))
    ((_, _, spec),) = step_specs(job, partitioner, [partitioner.train_step])
    assert bubble_share(job.task.model, num_rows_of(spec)) == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology=v9:2x2"], "'v9'"),
        ([], "--topology"),
        (["--topology=cpu:4"], "cpu:4 has 4"),
        (["--topology=cpu:8", "--steps=20"], "'20'"),
        (["--measure", "--topology=cpu:8"], "cannot be combined with --topology"),
    ],
)
def test_the_command_line_refuses_in_one_paragraph(words, said):
    done = launch("--mode=plan", "--exp=lm.Synthetic", *words)
    assert done.code == 2, done
    assert said in " ".join(done.err.split())


def test_a_loop_without_a_name_that_lost_a_turn_holds_gradients():
    # As XLA writes it for several slices: 4 layers, of which 3 turns are left in the loop.
    text = """HloModule step

%body (s: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %s = (s32[], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4,8] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[4,8] negate(%x), metadata={op_name="jit(f)/transpose(jvp(blocks))/while/body/neg"}
  ROOT %out = (s32[], f32[4,8]) tuple(%next, %y)
}

%cond (s: (s32[], f32[4,8])) -> pred[] {
  %s = (s32[], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}

ENTRY %main (x: f32[4,8]) -> (s32[], f32[4,8]) {
  %x = f32[4,8] parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8]) tuple(%zero, %x)
  ROOT %loop = (s32[], f32[4,8]) while(%init), condition=%cond, body=%body
}
"""
    assert stacked_array_bytes(text) == (4 * 8 * 4, 0)
