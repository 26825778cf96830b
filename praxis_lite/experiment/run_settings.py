"""The settings in RunConfig for evaluation, samples, stopping, loss spikes and profiles."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from praxis_lite.checkpoints.steps.retention import check_watched_metric
from praxis_lite.config.integer_settings import CHANGE, check_integers
from praxis_lite.core.errors import ConfigError, is_positive_int, require, require_choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When a job evaluates, on how much data, and with which weights (`run.evaluation`).

    Attributes:
        every_steps: Number of steps between evaluations on all datasets except `train`. None for a
            single evaluation at the end.
        at_start: Whether to also evaluate the initial weights of a new job, as step 0.
        max_batches: Maximum number of batches to evaluate per dataset, or None for one pass over
            the dataset.
        use_ema_states: Whether to evaluate with the moving averages of `Learner.ema_decay`.
        by_follower: Whether the job's checkpoints are evaluated by a separate process, `praxis eval
            JOB --follow`, instead of by the job. The job uses the results for `run.stopping.early`
            and `run.checkpoints.best`.

    Raises:
        ConfigError: A number has the wrong type or is out of range, or by_follower is combined with
            every_steps or at_start.
    """

    every_steps: int | None = None
    at_start: bool = False
    max_batches: int | None = None
    use_ema_states: bool = False
    by_follower: bool = False

    def __post_init__(self) -> None:
        check_integers("run.evaluation", self)
        if self.by_follower and (self.every_steps is not None or self.at_start):
            raise ConfigError(
                "run.evaluation.every_steps and run.evaluation.at_start cannot be combined with "
                "run.evaluation.by_follower=True, which evaluates in a different process. Set "
                "every_steps to None and at_start to False, or by_follower to False."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Prompts that a language model continues while it trains (`run.samples`).

    Attributes:
        every_steps: Number of steps between continuations with the current weights, which are
            printed, sent to the trackers and written to decode/samples. None for no continuations.
        prompts: The prompts.

    Raises:
        ConfigError: The number is out of range, or there are no prompts.
    """

    every_steps: int | None = None
    prompts: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_integers("run.samples", self)
        is_sequence = not isinstance(self.prompts, str)
        require(
            is_sequence and all(isinstance(prompt, str) for prompt in self.prompts),
            "run.samples.prompts",
            self.prompts,
            "a list of strings, such as ['import', 'def main(']",
            CHANGE,
        )
        require(
            self.every_steps is None or len(self.prompts) > 0,
            "run.samples.prompts",
            self.prompts,
            "at least one prompt, because run.samples.every_steps is set",
            CHANGE,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends training when a metric has not improved for several evaluations.

    Attributes:
        metric: Name of the dataset and the metric, such as `heldout/loss`.
        mode: "min" if lower values are better, "max" if higher values are better.
        patience: Number of consecutive evaluations without improvement after which training ends.
        min_delta: Minimum difference from the best value that is treated as an improvement.

    Raises:
        ConfigError: A setting is out of range.
    """

    metric: str
    mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_watched_metric("early_stopping", self.metric, self.mode)
        expected = "a number of evaluations, 1 or more"
        require(is_positive_int(self.patience), "early_stopping.patience", self.patience, expected)
        require(
            self.min_delta >= 0,
            "early_stopping.min_delta",
            self.min_delta,
            "0 or more",
            "To change whether lower or higher values are better, set early_stopping.mode.",
        )

    def watched_in(self, values: Mapping[str, float], step: int) -> float:
        """Returns the value of the metric in an evaluation.

        Args:
          values: Metrics of the evaluation, keyed by name.
          step: The evaluated step, for the error message.

        Raises:
          ConfigError: The evaluation does not include the metric.
        """
        if self.metric not in values:
            raise ConfigError(
                f"run.stopping.early watches {self.metric}, but the evaluation at step {step} did "
                f"not compute it: all rows of datasets.{self.metric.partition('/')[0]} have weight "
                "0. Add rows with positive weights, raise run.evaluation.max_batches, watch a "
                "different metric, or set run.stopping.early=None."
            )
        return values[self.metric]

    def reason_to_stop(self, values: Mapping[int, float]) -> str | None:
        """Returns the reason why training must end now, or None if training continues.

        Args:
          values: Values of the metric in all evaluations so far, keyed by step. NaN is not an
            improvement.
        """
        sign = 1.0 if self.mode == "min" else -1.0
        best, best_step, num_since = math.inf, None, 0
        for step, value in sorted(values.items()):
            if sign * value < best - self.min_delta:
                best, best_step, num_since = sign * value, step, 0
            else:
                num_since += 1
        if num_since < self.patience:
            return None
        history = (
            "was never a number"
            if best_step is None
            else f"was best at step {best_step} ({sign * best:.4f})"
        )
        noun = "evaluation" if num_since == 1 else "evaluations"
        return f"{self.metric} {history} and has not improved in {num_since} {noun}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopSettings:
    """Conditions that end training before its last step (`run.stopping`).

    Attributes:
        early: Settings for early stopping when a metric no longer improves, or None.
        max_skipped_steps_in_a_row: Number of consecutive skipped steps after which training ends
            with an error, or None for no limit. A step is skipped if its loss or gradient is not
            finite or too large.
        time_limit_seconds: Time after which training stops as on SIGTERM, or None for no limit. Set
            it below the scheduler's limit, and above the time needed for restoring and compiling.
        watchdog_seconds: If no step completes within this time, the stacks of all threads are
            reported. None for no reports.
        watchdog_exits: Whether the process exits after such a report.

    Raises:
        ConfigError: A number has the wrong type or is out of range.
    """

    early: EarlyStopping | None = None
    max_skipped_steps_in_a_row: int | None = 100
    time_limit_seconds: int | None = None
    watchdog_seconds: int | None = 600
    watchdog_exits: bool = False

    def __post_init__(self) -> None:
        check_integers("run.stopping", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpikeSettings:
    """Definition of a loss spike, and the action after a spike (`run.loss_spikes`).

    Attributes:
        factor: A loss above this multiple of the median of the last 100 losses is a spike, if the
            median is positive. None disables detection. If detection is enabled, lines in
            metrics.jsonl contain `is_loss_spike` and `num_skipped_batches`.
        action: "report" prints a line. "roll_back" restores the newest checkpoint before the spike,
            or the initial state, and skips the batch.

    Raises:
        ConfigError: A setting is out of range.
    """

    factor: float | None = None
    action: Literal["report", "roll_back"] = "report"

    def __post_init__(self) -> None:
        factor = self.factor
        require(
            factor is None or (isinstance(factor, int | float) and factor > 1),
            "run.loss_spikes.factor",
            factor,
            "a number above 1, or None",
            CHANGE,
        )
        require_choice("run.loss_spikes.action", self.action, ("report", "roll_back"))
        require(
            self.action == "report" or factor is not None,
            "run.loss_spikes.factor",
            factor,
            "a number such as 3.0, because run.loss_spikes.action is 'roll_back'",
            CHANGE,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Steps to trace with JAX's profiler, and the processes that are traced (`run.profile`).

    While a job runs, SIGUSR1 or a file `profile.request` in the job directory requests a profile.

    Attributes:
        steps: Steps to profile, counted from 1, such as "100:103" for steps 100, 101 and 102, or
            "100:103,500:502" for two profiles in ascending order. If None, profiles are only
            recorded on request.
        processes: "first" if only the first process traces its devices, "all" if every process
            traces its devices.

    Raises:
        ConfigError: A setting has the wrong format, or ranges are empty, overlapping or not in
            ascending order.
    """

    steps: str | None = None
    processes: Literal["first", "all"] = "first"

    def __post_init__(self) -> None:
        require_choice("run.profile.processes", self.processes, ("first", "all"))
        require(
            self.steps is None
            or (isinstance(self.steps, str) and _RANGES.fullmatch(self.steps) is not None),
            "run.profile.steps",
            self.steps,
            "FIRST:END, such as '100:103' for steps 100 to 102, separated by commas, or None",
            CHANGE,
        )
        end = 1
        for steps in self.ranges():
            require(
                end <= steps.start < steps.stop,
                "run.profile.steps",
                self.steps,
                "ranges in ascending order, with each FIRST at least 1 and below its END",
                CHANGE,
            )
            end = steps.stop

    def ranges(self) -> list[range]:
        """Returns the steps of each profile."""
        return [range(*map(int, text.split(":"))) for text in (self.steps or "").split(",") if text]


_RANGES = re.compile(r"\d{1,10}:\d{1,10}(,\d{1,10}:\d{1,10})*", re.ASCII)
