"""Measures the times of a step and reads its metrics, while the next step runs.

So the devices never wait for the host. `metrics/step_times.py` defines each time.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from praxis_lite.job.events import EVALUATION, ON_DEVICES, SAVE, events
from praxis_lite.trainer.hooks.hook import StepMetrics, overrides
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.metrics.device_clock import OnDevices
from praxis_lite.trainer.metrics.packed import Packed
from praxis_lite.trainer.metrics.step_times import (
    DEVICE_TIME,
    DISPATCH_TIME,
    EVALUATION_TIME,
    INPUT_TIME,
    SAVE_TIME,
    STEP_TIME,
)
from praxis_lite.trainer.spike_detector import LossSpike


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A step whose outputs are still on the devices, and this process's rows of its batch.

    Attributes:
      outputs: of the step, packed.
      batch: the index of the batch.
      inputs: its rows from `first_row` on, on the host.
      input_time: the seconds that the loop waited for them.
      dispatch_time: the seconds that the call of the step took.
      on_devices: when the step began and ended on the devices.
    """

    step: int
    batch: int
    outputs: Packed
    inputs: Any
    first_row: int
    input_time: float
    dispatch_time: float
    on_devices: OnDevices


class LateMetrics:
    """Reads the outputs of a step, adds its times (`step_times`), and gives them to the hooks.

    Attributes:
      pending: the step to be read next, or None.
      last_time: when the step before it was read, in seconds of time.perf_counter.
    """

    def __init__(self, loop: Loop):
        self._loop, self._weight_unit = loop, loop.job.partitioner.task.weight_unit
        self._adding = [hook for hook in loop.hooks if overrides(hook, "add_metrics")]
        self._told = [hook for hook in loop.hooks if overrides(hook, "after_metrics")]
        self._spent = events.seconds()
        self.pending: PendingStep | None = None
        self.last_time = time.perf_counter()

    def read(self) -> LossSpike | None:
        """Waits for the pending step, if any, and tells the hooks its numbers.

        Returns:
          The loss spike for which the run is to go back: no other hook hears of the step then.
        """
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        with events.phase(ON_DEVICES):
            outputs = pending.outputs.on_host()
        now = time.perf_counter()
        events.report(made=pending.step)
        before, self._spent = self._spent, events.seconds()
        weight = float(outputs["metrics"]["loss"][1])
        line = _line(pending, outputs)
        line |= {
            STEP_TIME: now - self.last_time,
            INPUT_TIME: pending.input_time,
            DISPATCH_TIME: pending.dispatch_time,
            DEVICE_TIME: pending.on_devices.seconds(),
            EVALUATION_TIME: self._spent[EVALUATION] - before[EVALUATION],
            SAVE_TIME: self._spent[SAVE] - before[SAVE],
        }
        line[f"{self._weight_unit}_per_second"] = weight / line[STEP_TIME]
        self.last_time = now
        metrics = StepMetrics(
            pending.step, line, weight, pending.batch, pending.inputs, pending.first_row
        )
        for hook in self._adding:
            line.update(hook.add_metrics(metrics))
        for hook in self._told:
            hook.after_metrics(metrics)
            if self._loop.spike is not None:
                return self._loop.spike
        return None


def _line(pending: PendingStep, outputs: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {name: float(value) for name, (value, _) in outputs["metrics"].items()}
    learner = {name: value.item() for name, value in outputs["learner"].items()}
    return {"step": pending.step, **metrics, **learner}
