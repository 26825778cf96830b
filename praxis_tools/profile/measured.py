"""Computes the measured and predicted seconds of a profiled step, by layer and collective."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import content_of
from praxis_lite.trainer.hooks.profile_facts import HLO_TXT, ProfileFacts, read_facts
from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_layers import layer_of
from praxis_tools.explain.hlo_text import Computation, Instruction, Program, parse
from praxis_tools.plan.chips import CHIPS
from praxis_tools.plan.costs import is_matmul
from praxis_tools.plan.predict import predicted_fields
from praxis_tools.plan.residuals import Residual
from praxis_tools.plan.schedule.schedule import schedule
from praxis_tools.plan.schedule.timeline import Timeline
from praxis_tools.plan.topology import (
    PhysicalMesh,
    Topology,
    attached_topology,
    physical_mesh,
)
from praxis_tools.profile.graphs import Schedule
from praxis_tools.profile.trace import Trace, read_trace

_CONTAINERS = ("while", "call", "conditional")
OUTSIDE = "outside of any layer"
NOT_NAMED = "kernels that the trace does not name"
# Maps the name of an instruction to the instruction and the computation that contains it.
_Instructions = Mapping[str, tuple[Instruction, Computation]]


@dataclasses.dataclass
class Row:
    """The time of a layer, or of a collective in a layer, per step and device.

    Attributes:
      count: Number of executed instructions, excluding the `-done` of asynchronous instructions.
      seconds: Measured seconds, averaged over devices and steps.
      predicted: Seconds in the plan, or None if there is no prediction.
    """

    count: float = 0.0
    seconds: float = 0.0
    predicted: float | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measured times of a step, averaged over the traced devices and steps.

    Attributes:
      facts: Metadata of the profile.
      num_devices: Number of traced devices.
      step_seconds: Time from the first to the last instruction of a step. If the trace does not
        distinguish steps, this is the time of all steps divided by the number of steps.
      idle_seconds: Time within the step during which none of its instructions ran.
      other_seconds: Maps the names of other programs, which run between steps, to their seconds.
      layers: Maps each layer, such as "encoder/ffn" or "gradient of encoder/ffn", to its time,
        excluding collectives.
      collectives: Maps (kind, axes, layer) to the time of these collectives, including the wait for
        other devices.
      predicted_seconds: Predicted seconds of the step, or None for unknown chips.
      topology: Devices used for the prediction, or None for unknown chips.
      flops_per_device: Matmul flops per step on each device.
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
        """The residual for later plans, or None if the step has no prediction."""
        if self.topology is None or self.predicted_seconds is None:
            return None
        return Residual(
            chip=self.topology.chip.name,
            step="train",
            axis_sizes=self.facts.axis_sizes,
            flops_per_device=self.flops_per_device,
            predicted_seconds=self.predicted_seconds,
            measured_seconds=self.step_seconds,
            source="profile",
        )


def measure(folder: Path) -> Measured:
    """Reads measured times from the files of a profile.

    Raises:
      ConfigError: A file is missing or damaged, or the trace does not contain the step.
    """
    facts, text = read_facts(folder), text_of_step(folder)
    program = parse(text)
    instructions = {
        name: (instruction, computation)
        for computation in program.computations.values()
        for name, instruction in computation.items()
    }
    containers = [
        name for name, (instruction, _) in instructions.items() if instruction.opcode in _CONTAINERS
    ]
    file = folder / "plugins/profile" / f"step_{facts.first_step}" / "process_0.xplane.pb"
    module = re.match(r"HloModule ([\w.\-]+)", program.header)
    assert module is not None, program.header
    trace = read_trace(file, module[1], containers, Schedule(program))
    timeline, predicted_seconds, topology = _predicted(facts, text)
    layers, collectives = _rows(trace, facts, program, instructions, timeline, bool(topology))
    steps = len(trace.devices) * facts.num_steps
    runs = trace.run_seconds
    step_seconds = sum(runs) / len(runs) if runs else trace.span_seconds / steps
    return Measured(
        facts,
        len(trace.devices),
        step_seconds,
        max(0.0, step_seconds - trace.busy_seconds / steps),
        {name: seconds / steps for name, seconds in trace.other_seconds.items()},
        layers,
        collectives,
        predicted_seconds,
        topology,
        timeline.flops,
    )


def text_of_step(folder: Path) -> str:
    """Returns the HLO text of the compiled step.

    Raises:
      ConfigError: The file is missing or damaged.
    """
    path = folder / HLO_TXT
    try:
        text = content_of(path).decode()
        parse(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Record another profile.") from None
    return text


def _predicted(facts: ProfileFacts, text: str) -> tuple[Timeline, float | None, Topology | None]:
    """Returns the timeline, predicted seconds and topology of the step.

    The predicted seconds and the topology are None for chips that are not in `CHIPS`.
    """
    topology = attached_topology(facts.devices)
    if topology is None:
        # The timeline is still needed to group collectives by layer, which works with any chip.
        mesh = PhysicalMesh(facts.axis_sizes, np.zeros(len(facts.devices), int))
        return schedule(text, CHIPS["cpu"], mesh), None, None
    mesh = physical_mesh(facts.axis_sizes, facts.devices, topology)
    plan = predicted_fields(text, topology, mesh, 1)
    return plan["timeline"], plan["step_seconds"], topology


def _rows(
    trace: Trace,
    facts: ProfileFacts,
    program: Program,
    instructions: _Instructions,
    timeline: Timeline,
    is_predicted: bool,
) -> tuple[dict[str, Row], dict[tuple[str, tuple[str, ...], str], Row]]:
    """Returns the rows for layers and the rows for collectives, in descending order of seconds."""
    on_gpu = facts.devices[0].platform in ("gpu", "cuda", "rocm")
    # Fusions of a matmul and a collective are treated as matmuls.
    transfers = {
        name: transfer
        for transfer in timeline.collectives.values()
        for name in transfer.instructions
        if not is_matmul(instructions[name][0], program)
    }
    layer_rows: dict[str, Row] = collections.defaultdict(Row)
    collective_rows: dict[tuple[str, tuple[str, ...], str], Row] = collections.defaultdict(Row)
    steps = len(trace.devices) * facts.num_steps
    for name, time in trace.ops.items():
        site = instructions.get(name)
        transfer = transfers.get(name)
        if transfer is not None:
            row = collective_rows[transfer.kind, transfer.axes, transfer.layer]
        elif site is None:
            row = layer_rows[NOT_NAMED]
        elif _kind(site[0]) in hlo.KINDS:
            # The collective is in a branch that the plan assumes not to be taken.
            row = collective_rows[_kind(site[0]), (), _layer(program, *site)]
        else:
            row = layer_rows[_layer(program, *site)]
        row.seconds += time.seconds / steps
        if site is None or not site[0].opcode.endswith("-done"):
            row.count += time.count / steps
    if is_predicted:
        for name, seconds in timeline.instruction_seconds.items():
            if name not in transfers:
                row = layer_rows[_layer(program, *instructions[name])]
                row.predicted = (row.predicted or 0.0) + seconds
        for transfer in timeline.collectives.values():
            # On GPU, collectives run in a separate stream, so the trace contains their total time.
            # On other devices, the trace only contains the time during which the device waits.
            row = collective_rows[transfer.kind, transfer.axes, transfer.layer]
            row.predicted = transfer.seconds if on_gpu else transfer.exposed_seconds
    return _sorted(layer_rows), _sorted(collective_rows)


def _layer(program: Program, instruction: Instruction, computation: Computation) -> str:
    return layer_of(program, instruction, computation) or OUTSIDE


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start").removesuffix("-done")


def _sorted(rows: Mapping[Any, Row]) -> dict[Any, Row]:
    return dict(sorted(rows.items(), key=lambda item: (-item[1].seconds, str(item[0]))))
