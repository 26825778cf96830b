"""The plan of a step: its predicted memory and time, and their JSON format."""

import dataclasses
import math
from typing import Any

import jax

from praxis_lite.layers.moe.exchange import SLACK
from praxis_tools.plan.decoding import Decoding
from praxis_tools.plan.memory import Memory
from praxis_tools.plan.schedule.timeline import Timeline, Transfer

EXPERT_LOAD = 2.0  # Default of --expert_load: peak load relative to even expert loads.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """A step time corrected by residuals of earlier runs.

    Attributes:
      seconds: Corrected time of the step.
      ratio: Correction factor: the median ratio of measured to predicted time.
      count: Number of residuals in the median.
      is_of_step: Whether the residuals are from the same step; otherwise they are from other steps
        on the same kind of chip.
      chip: Name of the chip that the residuals are from.
      file: File that contains the residuals.
    """

    seconds: float
    ratio: float
    count: int
    is_of_step: bool
    chip: str
    file: str

    def __str__(self) -> str:
        steps = "this step took" if self.is_of_step else f"other steps on {self.chip} took"
        return f"{steps} {self.ratio:.3g} of the plan (median of {self.count} in {self.file})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of a step, per device. Fields are None if the step did not compile.

    For a decoding step, all fields except `decoding` describe one iteration of the loop over
    tokens, which generates one token per row.

    Attributes:
      step: "train", "eval" or "decode".
      topology: Name of the topology.
      num_devices: Number of devices in the mesh.
      fits: Whether the step fits in the memory of a device.
      peak_bytes_per_device: Memory that the step needs.
      hbm_bytes_per_device: Memory that a device has.
      parameters: Number of parameters of the model.
      compile_seconds: Time to lower and compile the step.
      memory: The parts of `peak_bytes_per_device`.
      step_seconds: Predicted time of the step.
      step_seconds_low: Lower end of the range that contained four out of five published runs.
      step_seconds_high: Upper end of that range.
      compute_seconds: Time in matmuls and kernels.
      memory_seconds: Time in all other instructions.
      network_seconds: Time of all collectives, including overlap with compute.
      exposed_seconds: The part of `network_seconds` during which the device waits.
      host_bytes: Bytes copied to and from host memory.
      host_seconds: Time of these copies, including overlap with compute.
      host_exposed_seconds: The part of `host_seconds` during which the device waits.
      flops_per_device: Matmul flops.
      recomputed_flops: The part of `flops_per_device` that remat adds.
      mfu: Model flops utilization, which leaves out `recomputed_flops`.
      hfu: Hardware flops utilization, which includes them.
      tokens_per_second: Number of tokens, or of other units (`unit`), per second and device.
      unit: "tokens", or "rows" for a task that does not count tokens.
      bubble_share: Fraction of a pipeline's ticks in which a stage is idle; None without a
        pipeline. `compute_seconds` includes the matmuls of idle stages.
      timeline: Collectives by kind, axes and layer, and the time of each instruction.
      decoding: Time to first token and memory-bound limit of a decoding step.
      why_not: What to change if the step does not fit, else "".
      notes: Sentences about parts that were modelled instead of compiled, and unknown kernels.
      expert_turn_seconds: Time of one round of exchanges between experts; None without exchanges.
        `step_seconds` includes one round, which is enough for even loads.
      expert_load: Load assumed by `uneven_seconds`: the maximum number of tokens that a device
        sends to another device's experts, divided by the number with even loads.
      correction: Correction by measured steps; None without residuals.
      compiled: The compiled step.
    """

    step: str
    topology: str
    num_devices: int
    fits: bool
    peak_bytes_per_device: int
    hbm_bytes_per_device: int
    parameters: int
    compile_seconds: float
    memory: Memory | None = None
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    compute_seconds: float | None = None
    memory_seconds: float | None = None
    network_seconds: float | None = None
    exposed_seconds: float | None = None
    host_bytes: int | None = None
    host_seconds: float | None = None
    host_exposed_seconds: float | None = None
    flops_per_device: int | None = None
    recomputed_flops: int | None = None
    mfu: float | None = None
    hfu: float | None = None
    tokens_per_second: float | None = None
    unit: str = "tokens"
    bubble_share: float | None = None
    timeline: Timeline | None = None
    decoding: Decoding | None = None
    why_not: str = ""
    notes: tuple[str, ...] = ()
    expert_turn_seconds: float | None = None
    expert_load: float = EXPERT_LOAD
    correction: Correction | None = None
    compiled: jax.stages.Compiled | None = None

    @property
    def expert_turns(self) -> int:
        """Number of rounds of exchanges between experts at `expert_load`."""
        return max(1, math.ceil(self.expert_load / SLACK))

    @property
    def uneven_seconds(self) -> float | None:
        """Upper bound of the step time at `expert_load`; None without exchanges."""
        if self.expert_turn_seconds is None:
            return None
        return self.step_seconds + (self.expert_turns - 1) * self.expert_turn_seconds

    def to_json(self) -> dict[str, Any]:
        """Returns the record that --json writes. Keys may be added but never removed or renamed."""
        nested = ("memory", "decoding", "correction")
        record = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
            if field.name not in (*nested, "timeline", "compiled")
        }
        for name in nested:
            value = getattr(self, name)
            record[name] = value and dataclasses.asdict(value)
        timeline = self.timeline or Timeline()
        collectives = sorted(timeline.collectives.values(), key=lambda x: -x.seconds)
        host_copies = sorted(timeline.host_copies.values(), key=lambda x: -x.seconds)
        return record | {
            "uneven_seconds": self.uneven_seconds,
            "notes": list(self.notes),
            "collectives": [
                {
                    **_transfer_record(collective), "axes": list(collective.axes),
                    "crosses_slices": collective.crosses,
                }
                for collective in collectives
            ],
            "host_copies": [_transfer_record(host_copy) for host_copy in host_copies],
        }


def _transfer_record(transfer: Transfer) -> dict[str, Any]:
    names = ("kind", "layer", "count", "bytes", "seconds", "exposed_seconds")
    return {name: getattr(transfer, name) for name in names}
