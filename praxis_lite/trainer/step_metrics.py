"""Reads the metrics and times of a step while the next step runs.

The devices therefore never wait for the host. `metrics/step_times.py` defines the times.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from praxis_lite.job.events import EVALUATION, ON_DEVICES, SAVE, events
from praxis_lite.trainer.hooks.hook import StepMetrics, overrides
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.metrics.device_clock import DeviceSpan
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
class HostBatch:
    """This process's rows in a batch, on the host.

    Attributes:
      index: Index of the batch in the training data.
      inputs: The rows, as NumPy arrays.
      first_row: Index of the first of these rows in the batch.
      input_time: Seconds that the loop waited for the batch.
    """

    index: int
    inputs: Any
    first_row: int
    input_time: float


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A dispatched step whose outputs are still on the devices.

    Attributes:
      step: The step's number.
      batch: The step's batch.
      outputs: The step's outputs, packed for one transfer per dtype.
      dispatch_time: Duration of the call to the compiled step, in seconds.
      device_span: The time span during which the step runs on the devices.
    """

    step: int
    batch: HostBatch
    outputs: Packed
    dispatch_time: float
    device_span: DeviceSpan


class LateMetrics:
    """Reads the pending step's outputs, adds the step's times, and passes both to the hooks.

    Attributes:
      pending: The step to read next, or None.
      last_time: Value of `time.perf_counter()` when the previous step was read.
    """

    def __init__(self, loop: LoopState):
        self._loop, self._weight_unit = loop, loop.job.partitioner.task.weight_unit
        self._add_hooks = [hook for hook in loop.hooks if overrides(hook, "add_metrics")]
        self._after_hooks = [hook for hook in loop.hooks if overrides(hook, "after_metrics")]
        self._phase_seconds = events.seconds()
        self.pending: PendingStep | None = None
        self.last_time = time.perf_counter()

    def read(self) -> LossSpike | None:
        """Waits for the pending step, if any, and calls the hooks with its metrics.

        Returns:
          The loss spike to roll back from, or None. If there is one, the remaining hooks are not
          called.
        """
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        with events.phase(ON_DEVICES):
            outputs = pending.outputs.to_host()
        now = time.perf_counter()
        events.report(made=pending.step)
        previous, self._phase_seconds = self._phase_seconds, events.seconds()
        weight = float(outputs["metrics"]["loss"][1])
        line = _line(pending, outputs)
        line |= {
            STEP_TIME: now - self.last_time,
            INPUT_TIME: pending.batch.input_time,
            DISPATCH_TIME: pending.dispatch_time,
            DEVICE_TIME: pending.device_span.seconds(),
            EVALUATION_TIME: self._phase_seconds[EVALUATION] - previous[EVALUATION],
            SAVE_TIME: self._phase_seconds[SAVE] - previous[SAVE],
        }
        line[f"{self._weight_unit}_per_second"] = weight / line[STEP_TIME]
        self.last_time = now
        # `metrics` contains this dict, so hooks see the values that earlier hooks add.
        batch = pending.batch
        metrics = StepMetrics(
            pending.step, line, weight, batch.index, batch.inputs, batch.first_row
        )
        for hook in self._add_hooks:
            line.update(hook.add_metrics(metrics))
        for hook in self._after_hooks:
            hook.after_metrics(metrics)
            if self._loop.spike is not None:
                return self._loop.spike
        return None


def _line(pending: PendingStep, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a step's line for metrics.jsonl, without the step's times."""
    metrics = {name: float(value) for name, (value, _) in outputs["metrics"].items()}
    learner = {name: value.item() for name, value in outputs["learner"].items()}
    return {"step": pending.step, **metrics, **learner}
