"""The plan of a step: its memory and seconds, and their JSON form."""

import dataclasses
import math
from typing import Any

import jax

from praxis_lite.layers.moe.exchange import SLACK
from praxis_tools.plan.decoding import Decoding
from praxis_tools.plan.memory import Memory
from praxis_tools.plan.schedule.timeline import Timeline, Transfer

EXPERT_LOAD = 2.0  # Default of --expert_load, an uneven load of experts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """A plan's seconds corrected by residuals.

    Attributes:
      seconds: corrected seconds of the step.
      ratio: the median of measured over predicted seconds, the factor of the correction.
      count: number of residuals.
      is_of_step: whether they are of this very step, or of other steps on the same kind of chip.
      chip, file: the residuals' chip, and where they are from.
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
    """The plan of a step on one device. What was not compiled is None.

    For a decoding step, all figures except `decoding` are of one iteration of the loop over tokens,
    which makes a token for each row.

    Attributes:
      step: "train", "eval" or "decode".
      topology, num_devices: the devices.
      fits: whether the step fits in the device's memory.
      peak_bytes_per_device, hbm_bytes_per_device: memory that the step needs, and that there is.
      parameters: of the model.
      compile_seconds: of this step, with lowering.
      memory: the parts of `peak_bytes_per_device`.
      step_seconds, step_seconds_low, step_seconds_high: the prediction and its range, in which four
        of five published runs were.
      compute_seconds, memory_seconds: in matmuls and kernels, and in all other instructions.
      network_seconds, exposed_seconds: of all collectives, and the part that is waited for.
      host_bytes, host_seconds, host_exposed_seconds: of copies to and from host memory: their
        bytes, their seconds, and the part that is waited for.
      flops_per_device, recomputed_flops: matmul flops, and the part that remat adds.
      mfu, hfu: shares of the device's peak, without and with the flops that remat adds.
      tokens_per_second: of one device, in units of `unit`.
      unit: "tokens", or "rows" for a task that does not count tokens.
      bubble_share: the share of a pipeline's ticks in which a stage idles; None: no pipeline. The
        matmuls of idle stages are in `compute_seconds`.
      timeline: collectives by kind, axes and layer, and seconds by instruction.
      decoding: figures of a step that decodes: the first token, and the limit set by memory.
      why_not: if the step does not fit, what to change.
      notes: what was modelled instead of compiled, and kernels of unknown cost.
      expert_turn_seconds: seconds of one round of the exchanges between experts; `step_seconds` has
        one round, which is enough for even loads. None: no such exchanges.
      expert_load: the uneven load for `uneven_seconds`: the most tokens that a device sends to
        another device's experts, over the number with even loads.
      correction: by residuals of steps that ran, if there are any.
      compiled: the compiled step.
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
        """Rounds of the exchanges between experts at `expert_load`."""
        return max(1, math.ceil(self.expert_load / SLACK))

    @property
    def uneven_seconds(self) -> float | None:
        """Upper bound for the seconds of a step at `expert_load`; None: no exchanges."""
        if self.expert_turn_seconds is None:
            return None
        return self.step_seconds + (self.expert_turns - 1) * self.expert_turn_seconds

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of --json. Fields may be added, never removed or renamed."""
        nested = ("memory", "decoding", "correction")
        record = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
            if field.name not in (*nested, "timeline", "compiled")
        }
        for name in nested:
            value = getattr(self, name)
            record[name] = value and dataclasses.asdict(value)
        timeline = self.timeline or Timeline()
        collectives = sorted(timeline.collectives.values(), key=lambda item: -item.seconds)
        copies = sorted(timeline.host_copies.values(), key=lambda item: -item.seconds)
        return record | {
            "uneven_seconds": self.uneven_seconds,
            "notes": list(self.notes),
            "collectives": [
                {
                    **_transfer_record(item), "axes": list(item.axes),
                    "crosses_slices": item.crosses,
                }
                for item in collectives
            ],
            "host_copies": [_transfer_record(item) for item in copies],
        }


def _transfer_record(transfer: Transfer) -> dict[str, Any]:
    names = ("kind", "layer", "count", "bytes", "seconds", "exposed_seconds")
    return {name: getattr(transfer, name) for name in names}
