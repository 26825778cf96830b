"""The plan of a step: its memory and its seconds, as they are printed and kept."""

import dataclasses
import math
from typing import Any

import jax

from praxis_lite.layers.moe.exchange import SLACK
from praxis_lite.tools.plan.decoding import Decoding
from praxis_lite.tools.plan.memory import Memory
from praxis_lite.tools.plan.schedule.timeline import Timeline

EXPERT_LOAD = 2.0  # A load that is uneven, of which plans tell the seconds unless told another.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """A plan's seconds corrected by residuals.

    Attributes:
      seconds: of the step, corrected.
      ratio: the median of measured over predicted, which the plan's seconds are multiplied by.
      count: of the residuals.
      is_of_step: they are of this very step; False: of other steps on the same kind of chip.
      chip, file: of the residuals.
    """

    seconds: float
    ratio: float
    count: int
    is_of_step: bool
    chip: str
    file: str

    def __str__(self) -> str:
        whose = "this step took" if self.is_of_step else f"other steps on {self.chip} took"
        return f"{whose} {self.ratio:.3g} of the plan (median of {self.count} in {self.file})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of a step on a device. Seconds and bytes; None where it does not compile.

    Attributes:
      step: "train", "eval" or "decode".
      fits: the step's memory is no more than the device's.
      peak_bytes_per_device, hbm_bytes_per_device: what the step holds, what the device has.
      memory: `peak_bytes_per_device` in parts.
      step_seconds, step_seconds_low, step_seconds_high: predicted; four of five published runs lay
        between the last two. Of decoding these and all below, but for `decoding`, are of a turn of
        the loop over tokens: a token for each row.
      compute_seconds, memory_seconds: in matmuls and kernels; in all else.
      network_seconds, exposed_seconds: of collectives, alone; and what is waited for.
      host_bytes, host_seconds, host_exposed_seconds: of copies to and from the host's memory:
        alone, and what is waited for.
      flops_per_device, recomputed_flops: of matmuls; what of these remat adds.
      mfu, hfu: the share of the device's peak, without and with what remat adds.
      tokens_per_second: of one device; of a task that counts no tokens, rows.
      unit: "tokens" or "rows".
      bubble_share: of a pipeline's ticks, those in which a stage idles; None: there is no pipeline.
        What idle stages compute is among the seconds of matmuls.
      decoding: of a step that decodes by a loop: the first token, and the memory's limit.
      timeline: collectives by kind, axes and layer, and the costliest operations.
      parameters: of the model.
      compile_seconds: of this step, lowering included.
      why_not: for a step that does not fit, what to change.
      notes: what was modelled rather than compiled, and kernels that count as nothing.
      expert_turn_seconds: of a turn of the exchanges of tokens between experts' devices, of which
        even loads take one, as `step_seconds` has it; None: there are none.
      expert_load: the uneven load that the text tells the seconds of: the most tokens that a device
        sends to another one's experts, over those where loads are even.
      correction: by residuals of steps that ran, where there are any.
      compiled: the step, where it was.
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
        """Turns that the exchanges take at `expert_load`."""
        return max(1, math.ceil(self.expert_load / SLACK))

    @property
    def uneven_seconds(self) -> float | None:
        """Seconds of a step at `expert_load`, at most; None: there are no exchanges."""
        if self.expert_turn_seconds is None:
            return None
        return self.step_seconds + (self.expert_turns - 1) * self.expert_turn_seconds

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of --json, a contract that only grows."""
        fields = {
            name: getattr(self, name)
            for name in (
                "fits", "peak_bytes_per_device", "hbm_bytes_per_device", "step_seconds",
                "step_seconds_low", "step_seconds_high", "flops_per_device", "mfu", "parameters",
                "compile_seconds", "topology", "num_devices", "step", "hfu", "recomputed_flops",
                "compute_seconds", "memory_seconds", "network_seconds", "exposed_seconds",
                "tokens_per_second", "unit", "bubble_share", "why_not", "host_bytes",
                "host_seconds", "host_exposed_seconds", "expert_turn_seconds", "expert_load",
                "uneven_seconds",
            )
        }
        result = self.timeline.collectives.values() if self.timeline else ()
        copies = self.timeline.host_copies.values() if self.timeline else ()
        return fields | {
            "host_copies": [
                {name: getattr(item, name) for name in (
                    "kind", "layer", "count", "bytes", "seconds", "exposed_seconds"
                )} for item in sorted(copies, key=lambda element: -element.seconds)
            ],
            "memory": self.memory and dataclasses.asdict(self.memory),
            "decoding": self.decoding and dataclasses.asdict(self.decoding),
            "correction": self.correction and dataclasses.asdict(self.correction),
            "notes": list(self.notes),
            "collectives": [
                {
                    "kind": item.kind, "axes": list(item.axes), "layer": item.layer,
                    "count": item.count, "bytes": item.bytes, "seconds": item.seconds,
                    "exposed_seconds": item.exposed_seconds, "crosses_slices": item.crosses,
                }
                for item in sorted(result, key=lambda element: -element.seconds)
            ],
        }
