"""The plan of a step: its predicted memory and time, and the plan's JSON format."""

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
    """A step time corrected with the residuals from earlier runs.

    Attributes:
      seconds: Corrected time of the step.
      ratio: Correction factor: the median ratio of measured to predicted time.
      count: Number of residuals in the median.
      is_of_step: Whether the residuals are from the same step; otherwise they are from other steps
        on the same kind of chip.
      chip: Name of the chip on which the steps were measured.
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
        return (
            f"{steps} {self.ratio:.3g} times the planned time (median of {self.count} in "
            f"{self.file})"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of a step, per device.

    The fields for times and flops are None if the step did not compile. For a decoding step, all
    fields except `decoding` describe one iteration of the decoding loop, which generates one token
    per row.

    Attributes:
      step: "train", "eval" or "decode".
      topology: Name of the topology.
      num_devices: Number of devices in the mesh.
      fits: Whether the step fits in the memory of a device.
      peak_bytes_per_device: Peak memory of the step, in bytes.
      hbm_bytes_per_device: Memory available on a device.
      parameters: Number of parameters of the model.
      compile_seconds: Time to lower and compile the step.
      memory: Breakdown of `peak_bytes_per_device`.
      step_seconds: Predicted time of the step.
      step_seconds_low: Lower end of the range that contained four out of five published runs.
      step_seconds_high: Upper end of that range.
      compute_seconds: Time in matmuls and kernels.
      memory_seconds: Time in all other instructions.
      network_seconds: Time of all collectives, including overlap with compute.
      exposed_seconds: Time during which the device waits for collectives.
      host_bytes: Bytes copied to and from host memory.
      host_seconds: Time of copies to and from host memory, including overlap with compute.
      host_exposed_seconds: Time during which the device waits for copies to and from host memory.
      flops_per_device: Matmul flops.
      recomputed_flops: Matmul flops added by remat, included in `flops_per_device`.
      mfu: Model flops utilization, which excludes `recomputed_flops`.
      hfu: Hardware flops utilization, which includes `recomputed_flops`.
      tokens_per_second: Number of tokens (or rows, see `unit`) per second and device.
      unit: "tokens", or "rows" for a task that does not count tokens.
      bubble_share: Fraction of a pipeline's ticks in which a stage is idle; None without a
        pipeline. `compute_seconds` includes the matmuls of idle stages.
      timeline: Collectives by kind, axes and layer, and the time of each instruction.
      decoding: Time to first token and memory-bound limit of a decoding step.
      why_not: Advice if the step does not fit in memory, else "".
      notes: Messages about unknown kernels and about costs that were modeled instead of compiled.
      expert_round_seconds: Time of one round of all-to-alls between experts; None if the step has
        no such rounds. `step_seconds` includes one round, which is sufficient for even loads.
      expert_load: Load assumed by `uneven_seconds`: the maximum number of tokens that a device
        sends to another device's experts, divided by the number that it would send under even
        loads.
      correction: Correction based on measured steps, or None if there are no residuals.
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
    expert_round_seconds: float | None = None
    expert_load: float = EXPERT_LOAD
    correction: Correction | None = None
    compiled: jax.stages.Compiled | None = None

    @property
    def num_expert_rounds(self) -> int:
        """Number of rounds of all-to-alls between experts at `expert_load`."""
        return max(1, math.ceil(self.expert_load / SLACK))

    @property
    def uneven_seconds(self) -> float | None:
        """Upper bound of the step time at `expert_load`; None if there are no rounds."""
        if self.expert_round_seconds is None or self.step_seconds is None:
            return None
        return self.step_seconds + (self.num_expert_rounds - 1) * self.expert_round_seconds

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON record that --json writes.

        Future versions may add keys, but will never remove or rename existing keys.
        """
        nested = ("memory", "decoding", "correction")
        record = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
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
                    **_transfer_record(collective),
                    "axes": list(collective.axes),
                    "crosses_slices": collective.crosses,
                }
                for collective in collectives
            ],
            "host_copies": [_transfer_record(host_copy) for host_copy in host_copies],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedStepPlan(StepPlan):
    """The plan of a step that compiled, so that its times and flops are known."""

    # `field()` removes the default None of the base class.
    step_seconds: float = dataclasses.field()
    step_seconds_low: float = dataclasses.field()
    step_seconds_high: float = dataclasses.field()
    compute_seconds: float = dataclasses.field()
    memory_seconds: float = dataclasses.field()
    network_seconds: float = dataclasses.field()
    exposed_seconds: float = dataclasses.field()
    host_bytes: int = 0
    host_seconds: float = 0.0
    host_exposed_seconds: float = 0.0
    flops_per_device: int = dataclasses.field()
    recomputed_flops: int = dataclasses.field()
    mfu: float = dataclasses.field()
    hfu: float = dataclasses.field()
    tokens_per_second: float = dataclasses.field()


def _transfer_record(transfer: Transfer) -> dict[str, Any]:
    names = ("kind", "layer", "count", "bytes", "seconds", "exposed_seconds")
    return {name: getattr(transfer, name) for name in names}
