"""A plan: a compiled step's memory, traffic and seconds on each device of a topology."""

import math
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.lowered.mended_products import mended
from praxis_lite.run.checkpoints.init.kept_arrays import whole_layout
from praxis_lite.tools.explain import hlo
from praxis_lite.tools.explain.hlo_text import parse
from praxis_lite.tools.plan.costs import FITTED, Efficiencies
from praxis_lite.tools.plan.decoding import decoding_of, loop_over_tokens
from praxis_lite.tools.plan.memory import memory_of, out_of_memory, what_to_change
from praxis_lite.tools.plan.planned_job import PLANNING_OPTIONS
from praxis_lite.tools.plan.schedule.schedule import schedule
from praxis_lite.tools.plan.schedule.timeline import Mesh
from praxis_lite.tools.plan.search.formulas import bubble_share
from praxis_lite.tools.plan.step_plan import StepPlan
from praxis_lite.tools.plan.topology import Topology, mesh_of

PyTree = Any


def plan_step(
    partitioner: Partitioner, step: Step, element_spec: PyTree, topology: Topology,
    efficiencies: Efficiencies = FITTED,
) -> StepPlan:
    """Compiles a step and returns its plan; a step too large for the compiler has a plan, too.

    Args:
      step: of the partitioner.
      element_spec: shapes and types of a global batch.

    Raises:
      ConfigError: what a layer or the task refuses when it is traced, or XLA's text cannot be read.
    """
    chip, start = topology.chip, time.monotonic()
    lowered = mended(step.lower(element_spec), partitioner.mesh)
    try:
        compiled = compiled_readably(lowered, topology)
    except jax.errors.JaxRuntimeError as error:
        expected = out_of_memory(error)
        if expected is None:
            raise
        return StepPlan(
            **_common(partitioner, step, element_spec, topology), fits=False,
            peak_bytes_per_device=max(expected[0], chip.hbm_bytes + 1),
            compile_seconds=time.monotonic() - start, notes=(f"the compiler: {expected[1]}",),
            why_not=what_to_change(None, partitioner.layout, chip.hbm_bytes),
        )
    return plan_of_compiled(
        partitioner, step, element_spec, topology, compiled, time.monotonic() - start, efficiencies
    )


def plan_of_compiled(
    partitioner: Partitioner, step: Step, element_spec: PyTree, topology: Topology,
    compiled: jax.stages.Compiled, compile_seconds: float, efficiencies: Efficiencies = FITTED,
) -> StepPlan:
    """Returns the plan of a step that is compiled for the topology's devices; as `plan_step`."""
    layout, mesh, chip = partitioner.layout, partitioner.mesh, topology.chip
    planned = hlo.memory_per_device(compiled)
    if planned is None:
        raise ConfigError(f"The compiler for {topology.name} does not tell the memory of a step.")
    text = text_of(compiled, topology)
    memory = memory_of(layout, planned, text, step)
    fits = memory.peak <= chip.hbm_bytes
    places = mesh_of(dict(mesh.shape), list(mesh.devices.flat), topology)
    is_decoded = step is partitioner.decode_step and partitioner.task.decoder is not None
    loop = loop_over_tokens(parse(text)) if is_decoded else None
    fields = timed(text, topology, places, num_units(element_spec), efficiencies, loop)
    if loop is not None:
        first = schedule(text, chip, places, efficiencies, without=loop).seconds
        decoding = decoding_of(partitioner, element_spec, chip, fields["step_seconds"], first)
        per_device = decoding.tokens_per_second / mesh.size
        fields |= {"decoding": decoding, "tokens_per_second": per_device, "unit": "tokens"}
    return StepPlan(
        **_common(partitioner, step, element_spec, topology) | fields, fits=fits,
        peak_bytes_per_device=memory.peak, compile_seconds=compile_seconds, memory=memory,
        compiled=compiled, bubble_share=_bubbles(partitioner, step, element_spec),
        why_not="" if fits else what_to_change(memory, layout, chip.hbm_bytes),
    )


def _bubbles(partitioner: Partitioner, step: Step, element_spec: PyTree) -> float | None:
    rows = next(iter(jax.tree.leaves(element_spec))).shape[0]
    return None if step is partitioner.decode_step else bubble_share(partitioner.task.model, rows)


def _common(
    partitioner: Partitioner, step: Step, element_spec: PyTree, topology: Topology
) -> dict[str, Any]:
    unit = partitioner.task.weight_unit
    if unit == "examples" and len(getattr(_weights(element_spec), "shape", ())) > 1:
        unit = "tokens"  # A loss of one's own: a weight for each.
    return {
        "step": step.kind, "topology": topology.name, "num_devices": partitioner.mesh.size,
        "hbm_bytes_per_device": topology.chip.hbm_bytes,
        "parameters": num_parameters(partitioner.layout),
        "unit": "rows" if step is partitioner.decode_step else unit,
    }


def timed(
    text: str, topology: Topology, mesh: Mesh, num_units: float,
    efficiencies: Efficiencies = FITTED, turn_of: str | None = None,
) -> dict[str, Any]:
    """Returns the fields of a StepPlan that follow from a program's text.

    Args:
      num_units: tokens, or rows, of a global batch.
      turn_of: the body of a loop, a turn of which is the step.
    """
    chip, num_devices = topology.chip, len(topology.devices)
    result = schedule(text, chip, mesh, efficiencies, turn_of=turn_of)
    low, middle, high = (efficiencies.step_seconds + result.seconds,) * 3
    notes = []
    if topology.compiled_for == "tpu":
        # A ring that turns both ways uses both links of an axis; the text does not tell which.
        low = efficiencies.step_seconds + schedule(
            text, chip, mesh, efficiencies, both_links=True, turn_of=turn_of
        ).seconds
        waits = 1 + efficiencies.waiting * math.log2(topology.num_slices)
        low, middle, high = low * waits, middle * waits, high * waits
    elif topology.compiled_for == "gpu":
        notes.append(
            "of GPUs no efficiency is fitted: 60% of the peak and 80% of the network are guesses"
        )
    elif chip.name != "cpu":
        work = result.compute + result.memory
        low, middle = max(work, result.wire), (max(work, result.wire) + result.seconds) / 2
        notes.append(
            f"modelled, not compiled: flops, bytes and collectives are those of the program that "
            f"XLA makes for {num_devices} CPU devices (reduce-scatters are all-reduces there, and "
            f"attention is no fused kernel); {chip.name} fills in the speeds. The range goes from "
            "all collectives overlapped to none. With JAX's plugin for CUDA installed it is "
            "compiled: pip install jax-cuda12-plugin jax-cuda12-pjrt, of jax's version"
        )
    notes += chip.notes_of_types(result.flops_by_type)
    if result.unknown_kernels:
        names = ", ".join(sorted(result.unknown_kernels)[:3])
        notes.append(f"kernels that the plan knows nothing of count as no time: {names}")
    spread, peak = efficiencies.spread, chip.peak()
    useful = result.flops - result.recomputed_flops
    return {
        "step_seconds": middle, "step_seconds_low": low / (1 + spread),
        "step_seconds_high": high * (1 + spread), "compute_seconds": result.compute,
        "memory_seconds": result.memory, "network_seconds": result.wire,
        "exposed_seconds": result.exposed, "host_seconds": result.host_link,
        "host_bytes": sum(copy.bytes for copy in result.host_copies.values()),
        "host_exposed_seconds": result.host_exposed, "flops_per_device": result.flops,
        "recomputed_flops": result.recomputed_flops, "mfu": useful / (middle * peak),
        "hfu": result.flops / (middle * peak), "timeline": result, "notes": tuple(notes),
        "tokens_per_second": num_units / num_devices / middle,
        "expert_turn_seconds": result.expert_turn_seconds or None,
    }


def num_parameters(layout: StateLayout) -> int:
    """Returns how many weights a model has, without padding."""
    leaves = whole_layout(layout).leaves()
    return sum(
        math.prod(leaf.shape) for leaf in leaves if leaf.path.startswith("mdl_vars/params")
    )


def num_units(element_spec: PyTree) -> int:
    """Returns how many tokens, or rows, a batch has: the elements of `weights`, if it has any."""
    weights = _weights(element_spec)
    if weights is not None:
        return math.prod(weights.shape)
    return next(iter(jax.tree.leaves(element_spec))).shape[0]


def _weights(element_spec: PyTree) -> Any:
    return element_spec.get("weights") if isinstance(element_spec, dict) else None


class _Readable:
    """A compiled step whose text the compiler wrote into a file."""

    def __init__(self, compiled: jax.stages.Compiled, text: str):
        self._compiled, self._text = compiled, text

    def as_text(self) -> str:
        return self._text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def compiled_readably(lowered: Any, topology: Topology) -> Any:
    """Returns the compiled step; `as_text` works also where XLA cannot read what it made.

    That is where SparseCores do collectives, as on TPU7x. The compiler's own files have the text.
    """
    if topology.chip.name not in PLANNING_OPTIONS:
        return lowered.compile()
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder})
        try:
            compiled.as_text()
        except jax.errors.JaxRuntimeError:
            texts = Path(folder).glob("*.after_codegen.txt")
            largest = max(texts, key=lambda path: path.stat().st_size)
            return _Readable(compiled, largest.read_text("utf-8"))
    return compiled


def text_of(compiled: jax.stages.Compiled, topology: Topology) -> str:
    """Returns a program's text; raises ConfigError where XLA cannot read its own (SparseCores)."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        first = re.sub(r"\s+", " ", str(error))[:200]
        raise ConfigError(
            f"XLA cannot write down the program that it made for {topology.name} ({first}). Turn "
            "off what it offloads to SparseCores, in mesh.compiler_options."
        ) from error
