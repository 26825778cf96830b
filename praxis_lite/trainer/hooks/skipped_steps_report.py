"""The hook that reports skipped steps, and ends training after too many skipped steps in a row."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.learner.optimizer_factories import MAX_LEARNING_RATE
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.pipeline_checks import non_finite_rows
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_history import why_skipped
from praxis_lite.trainer.job_on_mesh import JobOnMesh


class SkippedSteps(Hook):
    """Reports skipped steps and NaN in their batches; ends training after too many in a row."""

    every, waits = None, False

    def __init__(self, job: JobOnMesh):
        self._job = job

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop

    def add_metrics(self, metrics: StepMetrics) -> dict[str, Any]:
        _check_learning_rates(metrics.line)
        return {}

    def after_metrics(self, metrics: StepMetrics) -> None:
        step, in_a_row, hint = metrics.step, metrics.line["num_skipped_in_a_row"], ""
        limit = self._job.run.stopping.max_skipped_steps_in_a_row
        is_end = limit is not None and in_a_row >= limit
        # Report the 1st, 2nd, 4th, 8th, ... step in a row.
        if not in_a_row or (in_a_row & (in_a_row - 1) and not is_end):
            return
        train, batch_index = self._job.datasets[TRAIN], metrics.batch_index
        faults = [
            non_finite_rows(
                metrics.inputs, metrics.first_row, lambda row: train.example_of(batch_index, row)
            ),
            _without_weight(metrics),
        ]
        if text := "; ".join(filter(None, faults)):
            hint = f"datasets.train: batch {batch_index} (counted from 0) has {text}"
        elif not self._job.run.debug_nans and in_a_row == 1:
            hint = "Use --set run.debug_nans=true to find the layer that produces it"
        self._loop.note(
            f"step {step} skipped: its loss, gradient or learning rate is not finite, or its "
            f"gradient is too large ({metrics.line['num_skipped_steps']} skipped so far"
            + (f", {in_a_row} in a row" if in_a_row > 1 else "")
            + "); weights and slots are unchanged"
            + (f". {hint}" if hint else "")
        )
        if is_end:
            raise ConfigError(self._too_many_message(step, in_a_row, hint if text else ""))

    def _too_many_message(self, step: int, in_a_row: int, data_fault: str) -> str:
        last_good, checkpoints = step - in_a_row, self._loop.checkpoints
        good_steps = [saved for saved in checkpoints.all_steps() if saved <= last_good]
        checkpoint = (
            f"the newest checkpoint at or before that step is step {good_steps[-1]}, in "
            f"{checkpoints.directory}"
            if good_steps
            else "there is no checkpoint at or before that step"
        )
        if data_fault:
            advice = f"{data_fault}: fix the data"
        elif self._job.run.debug_nans:
            file = self._job.files.shown(self._job.files.non_finite_txt)
            advice = f"{file} identifies the layer (run.debug_nans)"
        else:
            advice = (
                "Look at grad_norm and learning_rate in metrics.jsonl, and find the layer with "
                "--set run.debug_nans=true. Lower the learning rate, clip gradients, or use "
                "bfloat16 instead of float16"
            )
        return (
            f"{why_skipped(step, in_a_row)} The last good step is {last_good}; {checkpoint}. "
            f"{advice}. "
            "To allow more skipped steps, raise run.stopping.max_skipped_steps_in_a_row, or set it "
            "to None."
        )


def _without_weight(metrics: StepMetrics) -> str | None:
    """Returns a message if all of this process's rows have weight 0, else None."""
    weights = metrics.inputs.get("weights") if isinstance(metrics.inputs, Mapping) else None
    if weights is None or not np.size(weights) or np.any(np.asarray(weights) != 0):
        return None
    return "only rows with weight 0, so the mean loss is undefined"


def _check_learning_rates(line: Mapping[str, Any]) -> None:
    """Checks that finite learning rates are in range; steps with non-finite rates were skipped."""
    for name, value in line.items():
        is_rate = name.startswith("learning_rate") and math.isfinite(value)
        if is_rate and not 0 <= value <= MAX_LEARNING_RATE:
            raise ConfigError(
                f"The {name} of step {line['step']} is {value:g}; expected a rate from 0 to "
                f"{MAX_LEARNING_RATE:g}. Fix the schedule."
            )


def num_skipped_in_a_row(state: TrainState) -> int:
    """Returns the number of consecutive skipped steps up to the state's step."""
    return int(jax.device_get(state.opt_states["num_skipped_in_a_row"]))
