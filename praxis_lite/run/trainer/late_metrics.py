"""The numbers of a step, read while the next step runs: the devices never wait for the host."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.run.trainer.hooks.hook import Hook, StepMetrics, overrides


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A step whose outputs are still on the devices, and this process's rows of its batch.

    Attributes:
      batch: the index of the batch.
      inputs: its rows from `first_row` on, on the host.
      input_time: the seconds that the loop waited for them.
    """

    step: int
    batch: int
    outputs: Any
    inputs: Any
    first_row: int
    input_time: float


class LateMetrics:
    """Reads the outputs of a step and gives them to the hooks.

    Attributes:
      pending: the step to be read next, or None.
      last_time: when the step before it was read, in seconds of time.perf_counter.
    """

    def __init__(self, hooks: Sequence[Hook], weight_unit: str):
        self._adding = [hook for hook in hooks if overrides(hook, "add_metrics")]
        self._told = [hook for hook in hooks if overrides(hook, "after_metrics")]
        self._weight_unit = weight_unit
        self.pending: PendingStep | None = None
        self.last_time = time.perf_counter()

    def read(self) -> None:
        """Waits for the pending step, if any, and tells the hooks its numbers."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        outputs = jax.device_get(pending.outputs)
        now = time.perf_counter()
        weight = float(outputs["metrics"]["loss"][1])
        line = _line(pending, outputs, now - self.last_time)
        line[f"{self._weight_unit}_per_second"] = weight / line["step_time"]
        self.last_time = now
        metrics = StepMetrics(
            pending.step, line, weight, pending.batch, pending.inputs, pending.first_row
        )
        for hook in self._adding:
            line.update(hook.add_metrics(metrics))
        for hook in self._told:
            hook.after_metrics(metrics)


def _line(pending: PendingStep, outputs: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    metrics = {name: float(value) for name, (value, _) in outputs["metrics"].items()}
    learner = {name: np.asarray(value).item() for name, value in outputs["learner"].items()}
    return {
        "step": pending.step, **metrics, **learner, "step_time": seconds,
        "input_time": pending.input_time,
    }
