"""Compiles a step for a topology and predicts the step's memory, communication and time."""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from praxis_lite.checkpoints.init.packed_layouts import unpacked_layout
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls
from praxis_lite.trainer.compilation import current_metadata
from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_text import parse, text_of
from praxis_tools.plan.costs import FITTED, Efficiencies
from praxis_tools.plan.decoding import predict_decoding, token_loop_body
from praxis_tools.plan.job_on_topology import PLANNING_OPTIONS
from praxis_tools.plan.memory import memory_advice, memory_breakdown, parse_out_of_memory
from praxis_tools.plan.schedule.schedule import schedule
from praxis_tools.plan.search.formulas import bubble_share
from praxis_tools.plan.step_plan import PredictedStepPlan, StepPlan
from praxis_tools.plan.topology import PhysicalMesh, Topology, physical_mesh

PyTree = Any


def plan_step(
    partitioner: Partitioner, step: Step, element_spec: PyTree, topology: Topology
) -> StepPlan:
    """Compiles a step and returns its plan.

    If the compiler runs out of memory, the plan only contains the required memory and advice.

    Args:
      partitioner: Partitioner on the mesh of the topology's devices.
      step: A step of the partitioner.
      element_spec: Shapes and types of a global batch.
      topology: Devices to compile for.

    Raises:
      ConfigError: The task or a layer rejected a setting while the step was being traced.
    """
    chip, start = topology.chip, time.monotonic()
    lowered = patch_matmuls(step.lower(element_spec), partitioner.mesh)
    try:
        compiled = compile_with_text(lowered, topology)
    except jax.errors.JaxRuntimeError as error:
        out_of_memory = parse_out_of_memory(error)
        if out_of_memory is None:
            raise
        num_bytes, message = out_of_memory
        return StepPlan(
            **_basic_fields(partitioner, step, element_spec, topology),
            fits=False,
            peak_bytes_per_device=max(num_bytes, chip.hbm_bytes + 1),
            compile_seconds=time.monotonic() - start,
            notes=(f"compiler error: {message}",),
            why_not=memory_advice(None, partitioner.layout, chip.hbm_bytes),
        )
    return plan_of_compiled(
        partitioner, step, element_spec, topology, compiled, time.monotonic() - start
    )


def plan_of_compiled(
    partitioner: Partitioner,
    step: Step,
    element_spec: PyTree,
    topology: Topology,
    compiled: jax.stages.Compiled,
    compile_seconds: float,
) -> PredictedStepPlan:
    """Returns the plan of a step that is already compiled for the topology's devices."""
    layout, mesh, chip = partitioner.layout, partitioner.mesh, topology.chip
    text = text_of(compiled)
    memory = memory_breakdown(layout, hlo.memory_per_device(compiled), text, step)
    fits = memory.peak <= chip.hbm_bytes
    device_positions = physical_mesh(dict(mesh.shape), list(mesh.devices.flat), topology)
    has_decoder = step is partitioner.decode_step and partitioner.task.decoder is not None
    # In a decode step, each iteration of this loop is a token, and everything else is the prefill.
    loop = token_loop_body(parse(text)) if has_decoder else None
    fields = predicted_fields(
        text, topology, device_positions, num_units(element_spec), loop_body=loop
    )
    if loop is not None:
        prefill_seconds = schedule(text, chip, device_positions, skipped_loop=loop).seconds
        decoding = predict_decoding(
            partitioner, element_spec, chip, fields["step_seconds"], prefill_seconds
        )
        per_device = decoding.tokens_per_second / mesh.size
        fields |= {"decoding": decoding, "tokens_per_second": per_device, "unit": "tokens"}
    bubbles = None
    if step is not partitioner.decode_step:
        bubbles = bubble_share(partitioner.task.model, num_rows_of(element_spec))
    return PredictedStepPlan(
        **_basic_fields(partitioner, step, element_spec, topology) | fields,
        fits=fits,
        peak_bytes_per_device=memory.peak,
        compile_seconds=compile_seconds,
        memory=memory,
        compiled=compiled,
        bubble_share=bubbles,
        why_not="" if fits else memory_advice(memory, layout, chip.hbm_bytes),
    )


def _basic_fields(
    partitioner: Partitioner, step: Step, element_spec: PyTree, topology: Topology
) -> dict[str, Any]:
    """Returns the StepPlan fields that are known without compiling the step."""
    unit = partitioner.task.weight_unit
    if unit == "examples" and len(getattr(_weights(element_spec), "shape", ())) > 1:
        unit = "tokens"  # A custom loss that weights each token.
    return {
        "step": step.kind,
        "topology": topology.name,
        "num_devices": partitioner.mesh.size,
        "hbm_bytes_per_device": topology.chip.hbm_bytes,
        "parameters": num_parameters(partitioner.layout),
        "unit": "rows" if step is partitioner.decode_step else unit,
    }


def predicted_fields(
    text: str,
    topology: Topology,
    mesh: PhysicalMesh,
    num_units: float,
    efficiencies: Efficiencies = FITTED,
    loop_body: str | None = None,
) -> dict[str, Any]:
    """Simulates a compiled program and returns the StepPlan fields that depend on it.

    Args:
      text: HLO text of the compiled program.
      topology: Devices for which the program was compiled.
      mesh: Positions of the mesh's devices in the topology.
      num_units: Number of tokens (or rows) in a global batch.
      efficiencies: Fractions of the chip's peak rates that programs reach.
      loop_body: Name of the body of the decoding loop. If given, the step is one iteration of this
        loop.
    """
    chip, num_devices = topology.chip, len(topology.devices)
    timeline = schedule(text, chip, mesh, efficiencies, loop_body=loop_body)
    low, middle, high = (efficiencies.step_seconds + timeline.seconds,) * 3
    notes = []
    if topology.compiled_for == "tpu":
        # The text does not show whether a permute uses one or both links; `high` assumes one.
        low = (
            efficiencies.step_seconds
            + schedule(text, chip, mesh, efficiencies, both_links=True, loop_body=loop_body).seconds
        )
        slowdown = 1 + efficiencies.waiting * math.log2(topology.num_slices)
        low, middle, high = low * slowdown, middle * slowdown, high * slowdown
    elif topology.compiled_for == "gpu":
        notes.append(
            "the efficiencies for GPUs are not fitted: 60% of the peak and 80% of the network "
            "bandwidth are guesses"
        )
    # A GPU whose compiler is not installed.
    elif chip.name != "cpu":
        work = timeline.compute_seconds + timeline.memory_seconds
        low = max(work, timeline.collective_seconds)
        middle = (low + timeline.seconds) / 2
        notes.append(
            "modeled, not compiled: flops, bytes and collectives are from the program that XLA "
            f"compiles for {num_devices} CPU devices (with all-reduces instead of reduce-scatters, "
            f"and without fused attention kernels), and speeds are those of {chip.name}. The lower "
            "end of the range assumes that all collectives overlap, the upper end that none do. To "
            "compile for the GPU, install the "
            "version of JAX's CUDA plugin that matches jax: pip install jax-cuda13-plugin "
            "jax-cuda13-pjrt"
        )
    notes += chip.narrow_type_notes(timeline.flops_by_type)
    if timeline.unknown_kernels:
        names = ", ".join(sorted(timeline.unknown_kernels)[:3])
        notes.append(f"kernels of unknown cost are counted as zero seconds: {names}")
    spread, peak = efficiencies.spread, chip.peak()
    model_flops = timeline.flops - timeline.recomputed_flops
    return {
        "step_seconds": middle,
        "step_seconds_low": low / (1 + spread),
        "step_seconds_high": high * (1 + spread),
        "compute_seconds": timeline.compute_seconds,
        "memory_seconds": timeline.memory_seconds,
        "network_seconds": timeline.collective_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "host_bytes": sum(copy.bytes for copy in timeline.host_copies.values()),
        "host_seconds": timeline.host_copy_seconds,
        "host_exposed_seconds": timeline.exposed_host_copy_seconds,
        "flops_per_device": timeline.flops,
        "recomputed_flops": timeline.recomputed_flops,
        "mfu": model_flops / (middle * peak),
        "hfu": timeline.flops / (middle * peak),
        "tokens_per_second": num_units / num_devices / middle,
        "expert_round_seconds": timeline.expert_round_seconds or None,
        "timeline": timeline,
        "notes": tuple(notes),
    }


def num_parameters(layout: StateLayout) -> int:
    """Returns the number of parameters of a model, excluding padding."""
    leaves = unpacked_layout(layout).leaves()
    return sum(math.prod(leaf.shape) for leaf in leaves if leaf.path.startswith("mdl_vars/params"))


def num_units(element_spec: PyTree) -> int:
    """Returns the number of tokens in a batch, or the number of rows if there are no `weights`."""
    weights = _weights(element_spec)
    return num_rows_of(element_spec) if weights is None else math.prod(weights.shape)


def _weights(element_spec: PyTree) -> Any:
    return element_spec.get("weights") if isinstance(element_spec, dict) else None


class _CompiledWithText:
    """A compiled step with HLO text read from the compiler's dump."""

    def __init__(self, compiled: jax.stages.Compiled, text: str):
        self._compiled, self._text = compiled, text

    def as_text(self) -> str:
        return self._text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def compile_with_text(lowered: Any, topology: Topology) -> Any:
    """Compiles a step so that the `as_text` method of the result works.

    For programs with collectives on SparseCores (TPU7x), `Compiled.as_text` fails because XLA
    cannot parse its own output. The text of these programs is read from the compiler's dump
    instead.
    """
    if topology.chip.name not in PLANNING_OPTIONS:
        with current_metadata():
            return lowered.compile()
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder})
        try:
            compiled.as_text()
        except jax.errors.JaxRuntimeError:
            dumps = Path(folder).glob("*.after_codegen.txt")
            largest = max(dumps, key=lambda path: path.stat().st_size)
            return _CompiledWithText(compiled, largest.read_text("utf-8"))
    return compiled
