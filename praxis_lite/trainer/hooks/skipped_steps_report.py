"""Steps that were skipped because a number was not finite: reported, and too many are an error."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.learner.optimizer_factories import MAX_LEARNING_RATE
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.batches import non_finite_rows
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.job_on_mesh import JobOnMesh


class SkippedSteps(Hook):
    """Reports skipped steps and NaN in their data; too many in a row end training."""

    every, waits = None, False

    def __init__(self, job: JobOnMesh):
        self._job = job

    def before_training(self, loop: Loop, state: TrainState) -> None:
        self._loop = loop

    def add_metrics(self, metrics: StepMetrics) -> dict[str, Any]:
        _check_rates(metrics.line)
        return {}

    def after_metrics(self, metrics: StepMetrics) -> None:
        step, in_a_row, data = metrics.step, metrics.line["num_skipped_in_a_row"], ""
        most = self._job.run.stopping.max_skipped_steps_in_a_row
        is_end = most is not None and in_a_row >= most
        # Of a long stretch the steps 1, 2, 4, 8, ... are reported.
        if not in_a_row or (in_a_row & (in_a_row - 1) and not is_end):
            return
        train, batch = self._job.datasets[TRAIN], metrics.batch
        faults = [
            non_finite_rows(
                metrics.inputs, metrics.first_row, lambda row: train.example_of(batch, row)
            ),
            _without_weight(metrics),
        ]
        if words := "; ".join(filter(None, faults)):
            data = f"datasets.train: batch {batch} (counted from 0) has {words}"
        elif not self._job.run.debug_nans and in_a_row == 1:
            data = "--set run.debug_nans=true names the layer where the number arises"
        self._loop.note(
            f"step {step} skipped: its loss, gradient or learning rate is not finite, or its "
            f"gradient too large ({metrics.line['num_skipped_steps']} skipped so far"
            + (f", {in_a_row} in a row" if in_a_row > 1 else "")
            + "); weights and slots stay" + (f". {data}" if data else "")
        )
        if is_end:
            raise ConfigError(self._too_many(step, in_a_row, data if words else ""))

    def _too_many(self, step: int, in_a_row: int, data: str) -> str:
        last_good, checkpoints = step - in_a_row, self._loop.checkpoints
        kept = [saved for saved in checkpoints.all_steps() if saved <= last_good]
        checkpoint = (
            f"The newest checkpoint from before is of step {kept[-1]}, in {checkpoints.directory}"
            if kept
            else "There is no checkpoint from before"
        )
        if data:
            advice = f"{data}: fix the data"
        elif self._job.run.debug_nans:
            advice = f"run.debug_nans found where it was made: {self._job.files.non_finite_txt}"
        else:
            advice = (
                "Look at grad_norm and learning_rate in metrics.jsonl; --set run.debug_nans=true "
                "names the layer. Lower the learning rate, clip, or take bfloat16 in place of "
                "float16"
            )
        return (
            f"The last {in_a_row} steps, to step {step}, were skipped, because their loss, "
            "gradient or learning rate was not finite, or their gradient too large; step "
            f"{last_good} was the last good one. {checkpoint}. {advice}; to go on skipping, raise "
            "run.stopping.max_skipped_steps_in_a_row (None: no limit)."
        )


def _without_weight(metrics: StepMetrics) -> str | None:
    """Returns a message if all weights of this process's rows are 0, else None."""
    weights = metrics.inputs.get("weights") if isinstance(metrics.inputs, Mapping) else None
    if weights is None or not np.size(weights) or np.any(np.asarray(weights) != 0):
        return None
    return "only weights of 0, so there is nothing to learn and no mean to take"


def _check_rates(line: Mapping[str, Any]) -> None:
    """Checks the rates that schedules gave; a step whose rate is not finite was skipped."""
    for name, value in line.items():
        is_rate = name.startswith("learning_rate") and math.isfinite(value)
        if is_rate and not 0 <= value <= MAX_LEARNING_RATE:
            raise ConfigError(
                f"The {name} of step {line['step']} is {value:g}; expected a rate from 0 to "
                f"{MAX_LEARNING_RATE:g}. A model learns nothing at this rate: fix the schedule."
            )


def num_skipped_in_a_row(state: TrainState) -> int:
    """Returns the number of steps skipped in a row, up to the last step made."""
    return int(jax.device_get(state.opt_states["num_skipped_in_a_row"]))
