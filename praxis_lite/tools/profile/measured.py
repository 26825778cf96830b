"""Measured seconds of a step by layer and by collective, beside those that the plan predicts."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import content_of
from praxis_lite.run.trainer.hooks.profile_facts import HLO_TXT, ProfileFacts, read_facts
from praxis_lite.tools.explain import hlo
from praxis_lite.tools.explain.hlo_layers import layers_of, together
from praxis_lite.tools.explain.hlo_runs import Site
from praxis_lite.tools.explain.hlo_text import Instruction, Program, parse
from praxis_lite.tools.plan.chips import CHIPS
from praxis_lite.tools.plan.costs import is_matmul
from praxis_lite.tools.plan.measured.residuals import Residual
from praxis_lite.tools.plan.predict import timed
from praxis_lite.tools.plan.schedule.schedule import schedule
from praxis_lite.tools.plan.schedule.timeline import Mesh, Timeline
from praxis_lite.tools.plan.topology import Topology, attached_topology, mesh_of
from praxis_lite.tools.profile.graphs import Schedule
from praxis_lite.tools.profile.trace import Trace, read_trace

_CONTAINERS = ("while", "call", "conditional")
OUTSIDE = "outside of any layer"
NOT_NAMED = "kernels that the trace does not name"
# By name: an instruction, and the computation that it is in.
_Instructions = Mapping[str, tuple[Instruction, Mapping[str, Instruction]]]


@dataclasses.dataclass
class Row:
    """A layer, or a collective of a layer, in a step on a device.

    Attributes:
      count: executions of its instructions; of a collective's first ones alone.
      seconds: measured, the mean over devices and steps.
      predicted: seconds by the plan; None: it predicts nothing.
    """

    count: float = 0.0
    seconds: float = 0.0
    predicted: float | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measured time of a step, means over the traced devices and the steps of a profile.

    Attributes:
      facts: of the profile.
      num_devices: that were traced.
      step_seconds: from a step's first instruction to its last, or where the trace does not tell
        steps apart the time from the first instruction of all to the last, by step.
      idle_seconds: of these, in which no instruction of the step ran.
      other_seconds: of other programs, by name; they run between steps.
      layers: "encoder/ffn" or "gradient of encoder/ffn" -> its time, without collectives.
      collectives: (kind, axes, layer) -> its time, with what it waits for the other devices.
      predicted_seconds: of the step, by the plan; None: it has no figures of the devices.
      topology: that was predicted for; None as before.
      flops_per_device: of a step's matmuls.
    """

    facts: ProfileFacts
    num_devices: int
    step_seconds: float
    idle_seconds: float
    other_seconds: Mapping[str, float]
    layers: Mapping[str, Row]
    collectives: Mapping[tuple[str, tuple[str, ...], str], Row]
    predicted_seconds: float | None
    topology: Topology | None
    flops_per_device: int

    @property
    def residual(self) -> Residual | None:
        """The residual of the step's plan, or None where there is no plan."""
        if self.topology is None:
            return None
        return Residual(
            chip=self.topology.chip.name, step="train", axis_sizes=self.facts.axis_sizes,
            flops_per_device=self.flops_per_device, predicted_seconds=self.predicted_seconds,
            measured_seconds=self.step_seconds, source="profile",
        )


def measure(folder: Path) -> Measured:
    """Returns the measured times of a profile, from its files.

    Raises:
      ConfigError: a file is missing or damaged, or the trace lacks the step.
    """
    facts, text = read_facts(folder), text_of_step(folder)
    program = parse(text)
    instructions = {
        name: (instruction, computation) for computation in program.computations.values()
        for name, instruction in computation.items()
    }
    containers = [
        name for name, (item, _) in instructions.items() if item.opcode in _CONTAINERS
    ]
    file = folder / "plugins/profile" / f"step_{facts.first_step}" / "process_0.xplane.pb"
    trace = read_trace(file, _module(program), containers, Schedule(program))
    timeline, predicted_seconds, topology = _predicted(facts, text)
    layers, collectives = _rows(trace, facts, program, instructions, timeline, bool(topology))
    steps = len(trace.devices) * facts.num_steps
    runs = trace.run_seconds
    step_seconds = sum(runs) / len(runs) if runs else trace.span_seconds / steps
    return Measured(
        facts, len(trace.devices), step_seconds,
        max(0.0, step_seconds - trace.busy_seconds / steps),
        {name: seconds / steps for name, seconds in trace.other_seconds.items()},
        layers, collectives, predicted_seconds, topology, timeline.flops,
    )


def text_of_step(folder: Path) -> str:
    """Returns the text of the compiled step; raises ConfigError if it is missing or damaged."""
    path = folder / HLO_TXT
    try:
        text = content_of(path).decode()
        parse(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Make another profile.") from None
    return text


def _module(program: Program) -> str:
    return re.match(r"HloModule ([\w.\-]+)", program.header)[1]


def _predicted(facts: ProfileFacts, text: str) -> tuple[Timeline, float | None, Topology | None]:
    """Returns the plan of the step; its seconds and topology are None where it has no figures."""
    topology = attached_topology(facts.devices)
    if topology is None:
        # Its collectives are grouped all the same; for that any chip does.
        mesh = Mesh(facts.axis_sizes, np.zeros(len(facts.devices), int))
        return schedule(text, CHIPS["cpu"], mesh), None, None
    plan = timed(text, topology, mesh_of(facts.axis_sizes, facts.devices, topology), 1)
    return plan["timeline"], plan["step_seconds"], topology


def _rows(
    trace: Trace, facts: ProfileFacts, program: Program, instructions: _Instructions,
    timeline: Timeline, is_predicted: bool,
) -> tuple[dict[str, Row], dict[tuple[str, tuple[str, ...], str], Row]]:
    """Returns the rows of layers and those of collectives, most seconds first."""
    on_gpu = facts.devices[0].platform in ("gpu", "cuda", "rocm")
    on_wire = {
        name: entry for entry in timeline.collectives.values() for name in entry.instructions
        if not is_matmul(instructions[name][0], program)
    }
    layers: dict[str, Row] = collections.defaultdict(Row)
    on_wires: dict[tuple[str, tuple[str, ...], str], Row] = collections.defaultdict(Row)
    steps = len(trace.devices) * facts.num_steps
    for name, ran in trace.ops.items():
        instruction, computation = instructions.get(name, (None, None))
        entry = on_wire.get(name)
        if entry is not None:
            row = on_wires[entry.kind, entry.axes, entry.layer]
        elif instruction is not None and _kind(instruction) in hlo.KINDS:
            # Of a branch that the plan does not take.
            row = on_wires[_kind(instruction), (), _layer(program, instruction, computation)]
        else:
            row = layers[_layer(program, instruction, computation)]
        row.seconds += ran.seconds / steps
        if instruction is None or not instruction.opcode.endswith("-done"):
            row.count += ran.count / steps
    if is_predicted:
        for name, seconds in timeline.of.items():
            if name not in on_wire:
                row = layers[_layer(program, *instructions[name])]
                row.predicted = (row.predicted or 0.0) + seconds
        for entry in timeline.collectives.values():
            # A GPU sends in a stream of its own, and the trace has all of it; on other devices the
            # trace has what a device waits.
            row = on_wires[entry.kind, entry.axes, entry.layer]
            row.predicted = entry.seconds if on_gpu else entry.exposed_seconds
    return _sorted(layers), _sorted(on_wires)


def _layer(
    program: Program, instruction: Instruction | None, computation: Mapping[str, Instruction] | None
) -> str:
    if instruction is None:
        return NOT_NAMED
    site = Site(instruction, computation, 1, False, False, (), False)
    return together(layers_of(program, site)) or OUTSIDE


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start").removesuffix("-done")


def _sorted(rows: Mapping[Any, Row]) -> dict[Any, Row]:
    return dict(sorted(rows.items(), key=lambda item: (-item[1].seconds, str(item[0]))))
