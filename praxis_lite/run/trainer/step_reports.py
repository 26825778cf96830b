"""Per-step reports: metrics.jsonl, TensorBoard, progress line, warnings."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.learner.optimizer_factories import MAX_LEARNING_RATE
from praxis_lite.inputs.batches import non_finite_rows
from praxis_lite.run.checkpoints.checkpoints import Checkpoints
from praxis_lite.run.job import processes
from praxis_lite.run.trainer.job_history import losses_before
from praxis_lite.run.trainer.job_on_mesh import JobOnMesh
from praxis_lite.run.trainer.loss_spikes import LossSpike, SpikeDetector
from praxis_lite.run.trainer.metrics.json_lines import JsonLinesWriter
from praxis_lite.run.trainer.metrics.progress import ProgressLine, count_of, metric_text
from praxis_lite.run.trainer.metrics.tensorboard import TensorBoardWriter


@dataclasses.dataclass
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


class StepReports:
    """Reads the outputs of a step while the next step runs, and reports them.

    Args:
      first_step: the number of steps that were made before; later lines of metrics.jsonl go.
      num_left_out: how many batches were left out after loss spikes.

    Attributes:
      pending: the step to be read next.
      last_time: when the step before it was read, in seconds of time.perf_counter.
    """

    def __init__(
        self,
        job: JobOnMesh,
        first_step: int,
        num_left_out: int,
        checkpoints: Checkpoints,
        board: TensorBoardWriter,
        progress: ProgressLine,
    ):
        self._run, self._weight_unit = job.run, job.partitioner.task.weight_unit
        self._board, self._progress, self._checkpoints = board, progress, checkpoints
        self._non_finite_txt = job.files.non_finite_txt
        self._writer = JsonLinesWriter(job.files.metrics_jsonl, first_step)
        if processes.is_first() and (lost := self._writer.lost_steps):
            progress.note(
                f"steps {lost[0]} to {lost[-1]} were made before, but not saved, and are made "
                f"again; their lines are in {self._writer.lost_path.name} now"
            )
        if processes.is_first() and (kept := self._writer.num_kept) < first_step:
            progress.note(f"note: {job.files.metrics_jsonl} has lines of {kept} of {first_step} "
                          "steps; the others are lost, and the loss curve lacks them")
        self._spikes = SpikeDetector(job.run.loss_spike_factor, losses_before(job.run, job.files))
        self._num_left_out = num_left_out
        self._board_every = job.run.log_every_steps or max(1, job.run.num_train_steps // 200)
        self.pending: PendingStep | None = None
        self.last_time = time.perf_counter()
        # Of all steps but the first, which waits for workers to start, and for the compiler.
        self._is_first, self._time, self._input_time, self._weight = True, 0.0, 0.0, 0.0

    def close(self) -> None:
        self._writer.close()

    def report(self) -> None:
        """Reads and reports the pending step, if any."""
        if self.pending is None:
            return
        pending, step, run = self.pending, self.pending.step, self._run
        outputs = jax.device_get(pending.outputs)
        self.pending = None
        now = time.perf_counter()
        line = _metrics_line(step, outputs, now - self.last_time, self._weight_unit)
        line["input_time"] = pending.input_time
        self.last_time = now
        if not self._is_first:
            self._time += line["step_time"]
            self._input_time += pending.input_time
            self._weight += float(outputs["metrics"]["loss"][1])
        self._is_first = False
        _check_rates(line)
        median = self._spikes.median_below(line["loss"])
        if run.loss_spike_factor is not None:
            line["is_loss_spike"] = int(median is not None)
            line["num_batches_left_out"] = self._num_left_out
        self._writer.write(line)
        if step % self._board_every == 0 or step == run.num_train_steps:
            self._board.scalars(step, {n: v for n, v in line.items() if n != "step"})
        has_tokens = self._weight_unit == "tokens"
        num_tokens = float(outputs["metrics"]["loss"][1]) if has_tokens else None
        self._progress.update(
            step, step_time=line["step_time"], loss=line["loss"], num_tokens=num_tokens,
            input_time=pending.input_time,
        )
        if median is not None:
            self._progress.note(
                f"step {step}: loss spike: {metric_text(line['loss'])} is "
                f"{line['loss'] / median:.1f} times {metric_text(median)}, the median of the "
                f"losses before (run.loss_spike_factor is {run.loss_spike_factor})"
            )
            if run.on_loss_spike == "roll_back":
                raise LossSpike(step, pending.batch)
        if line["num_skipped_in_a_row"]:
            self._report_skipped(pending, line)

    def report_input(self) -> None:
        """Says how long the loop waited for batches, of all steps that were reported."""
        if self._input_time and self._time:
            self._progress.note(
                f"waiting for input took {100 * self._input_time / self._time:.2g}% of the steps' "
                f"time; the input alone could feed "
                f"{count_of(self._weight / self._input_time)} {self._weight_unit}/s"
            )

    def _report_skipped(self, pending: PendingStep, line: Mapping[str, Any]) -> None:
        step, data = pending.step, ""
        faults = [non_finite_rows(pending.inputs, pending.first_row), _without_weight(pending)]
        if words := "; ".join(filter(None, faults)):
            data = f"datasets.train: batch {pending.batch} (counted from 0) has {words}"
        self._progress.note(
            f"step {step} skipped: its loss, gradient or learning rate is not finite, or its "
            f"gradient too large ({line['num_skipped_steps']} skipped so far); weights and slots "
            "stay" + (f". {data}" if data else "")
        )
        run, in_a_row = self._run, line["num_skipped_in_a_row"]
        most = run.max_skipped_steps_in_a_row
        if most is None or in_a_row < most:
            return
        last_good = step - in_a_row
        kept = [saved for saved in self._checkpoints.all_steps() if saved <= last_good]
        checkpoint = (
            f"The newest checkpoint from before is of step {kept[-1]}, in "
            f"{self._checkpoints.directory}"
            if kept
            else "There is no checkpoint from before"
        )
        if data:
            advice = f"{data}: mend the data"
        elif run.debug_nans:
            advice = f"run.debug_nans found where it was made: {self._non_finite_txt}"
        else:
            advice = (
                "Look at grad_norm and learning_rate in metrics.jsonl; --set run.debug_nans=true "
                "names the layer. Lower the learning rate, clip, or take bfloat16 in place of "
                "float16"
            )
        raise ConfigError(
            f"The last {in_a_row} steps, to step {step}, were skipped, because their loss, "
            "gradient or learning rate was not finite, or their gradient too large; step "
            f"{last_good} was the last good one. {checkpoint}. {advice}; to go on skipping, raise "
            "run.max_skipped_steps_in_a_row (None: no limit)."
        )


def _without_weight(pending: PendingStep) -> str | None:
    """Returns words if no row that this process has of a batch weighs anything, or None."""
    weights = pending.inputs.get("weights") if isinstance(pending.inputs, Mapping) else None
    if weights is None or not np.size(weights) or np.any(np.asarray(weights) != 0):
        return None
    return "only weights of 0, so there is nothing to learn and no mean to take"


def _check_rates(line: Mapping[str, Any]) -> None:
    """Checks the rates that schedules gave; a step whose rate is not finite was skipped."""
    for name, value in line.items():
        is_rate = name.startswith("learning_rate") and math.isfinite(value)
        if is_rate and not 0 <= value <= MAX_LEARNING_RATE:
            raise ConfigError(
                f"The {name} of step {line['step']} is {value:g}; wanted is a rate from 0 to "
                f"{MAX_LEARNING_RATE:g}. A model learns nothing at this one: mend the schedule."
            )


def _metrics_line(
    step: int, outputs: Mapping[str, Any], seconds: float, weight_unit: str
) -> dict[str, Any]:
    metrics = {name: float(value) for name, (value, _) in outputs["metrics"].items()}
    learner = {name: np.asarray(value).item() for name, value in outputs["learner"].items()}
    weight = float(outputs["metrics"]["loss"][1])
    return {
        "step": step,
        **metrics,
        **learner,
        "step_time": seconds,
        f"{weight_unit}_per_second": weight / seconds,
    }
