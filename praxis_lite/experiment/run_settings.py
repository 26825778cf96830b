"""The parts of a RunConfig: evaluation, stopping, loss spikes and profiles."""

import dataclasses
import re
from typing import Literal

from praxis_lite.config.whole_numbers import CHANGE, check_whole_numbers
from praxis_lite.core.errors import require, require_choice
from praxis_lite.experiment.early_stopping import EarlyStopping


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When a job evaluates, on how much, and with which weights (`run.evaluation`).

    Attributes:
        every_steps: Steps between evaluations on every dataset but `train`. None: one, at the end.
        max_batches: Batches of each dataset that an evaluation reads. None: all, one pass.
        use_ema_states: Evaluate with the moving averages of `Learner.ema_decay`.
        by_follower: The job does not evaluate: `--mode=eval --follow`, in a separate process,
            evaluates its checkpoints, and the job uses the values for `run.stopping.early` and
            `run.checkpoints.best`.

    Raises:
        ConfigError: A number of the wrong type or out of range, or every_steps with by_follower.
    """

    every_steps: int | None = None
    max_batches: int | None = None
    use_ema_states: bool = False
    by_follower: bool = False

    def __post_init__(self) -> None:
        check_whole_numbers("run.evaluation", self)
        require(
            not self.by_follower or self.every_steps is None, "run.evaluation.every_steps",
            self.every_steps, "None with run.evaluation.by_follower=True", CHANGE,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopSettings:
    """What ends training before its last step (`run.stopping`).

    Attributes:
        early: Ends training when a metric no longer improves.
        max_skipped_steps_in_a_row: Training ends with an error after this many steps in a row whose
            loss or gradient was not finite or too large. None: never.
        time_limit_seconds: Training stops after this time, as on SIGTERM; set it below the
            scheduler's limit, and above the time for restoring and compiling. None: never.
        watchdog_seconds: The stack traces of all threads are reported when no step ends for this
            long. None: never.
        watchdog_exits: Then also end the process.

    Raises:
        ConfigError: A number of the wrong type or out of range.
    """

    early: EarlyStopping | None = None
    max_skipped_steps_in_a_row: int | None = 100
    time_limit_seconds: int | None = None
    watchdog_seconds: int | None = 600
    watchdog_exits: bool = False

    def __post_init__(self) -> None:
        check_whole_numbers("run.stopping", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpikeSettings:
    """The size of a loss that is a spike, and the action that follows (`run.loss_spikes`).

    Attributes:
        factor: A loss above this many times the median of the last 100, if that is positive, is a
            spike. Lines of metrics.jsonl then have `is_loss_spike` and `num_batches_left_out`.
            None: nothing is a spike.
        action: "report" it, or "roll_back": return to the newest checkpoint before it, or to the
            start, and skip the batch.

    Raises:
        ConfigError: A setting is out of range.
    """

    factor: float | None = None
    action: Literal["report", "roll_back"] = "report"

    def __post_init__(self) -> None:
        factor = self.factor
        require(
            factor is None or (isinstance(factor, int | float) and factor > 1),
            "run.loss_spikes.factor", factor, "a number above 1, or None", CHANGE,
        )
        require_choice("run.loss_spikes.action", self.action, ("report", "roll_back"))
        require(
            self.action == "report" or factor is not None, "run.loss_spikes.factor", factor,
            "a number, such as 3.0, where run.loss_spikes.action is 'roll_back'", CHANGE,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Steps that JAX's profiler traces, and the processes that do it (`run.profile`).

    While a job runs, SIGUSR1 or a file `profile.request` in its directory asks for a profile.

    Attributes:
        steps: "100:103" for steps 100, 101 and 102, counted from 1; "100:103,500:502" for two
            profiles, in ascending order. None: only on request.
        processes: "first": the first process traces its devices; "all": every process does.

    Raises:
        ConfigError: A setting of the wrong form, or ranges that are empty, overlap or go backwards.
    """

    steps: str | None = None
    processes: Literal["first", "all"] = "first"

    def __post_init__(self) -> None:
        require_choice("run.profile.processes", self.processes, ("first", "all"))
        require(
            self.steps is None or (isinstance(self.steps, str) and _RANGES.fullmatch(self.steps)),
            "run.profile.steps", self.steps,
            "FIRST:END, such as '100:103' for steps 100 to 102, separated by commas, or None",
            CHANGE,
        )
        end = 1
        for steps in self.ranges():
            require(
                end <= steps.start < steps.stop, "run.profile.steps", self.steps,
                "ranges from step 1 on, in ascending order, each with its END above its FIRST",
                CHANGE,
            )
            end = steps.stop

    def ranges(self) -> list[range]:
        """Returns the steps of each profile."""
        return [
            range(*map(int, text.split(":"))) for text in (self.steps or "").split(",") if text
        ]


_RANGES = re.compile(r"\d{1,10}:\d{1,10}(,\d{1,10}:\d{1,10})*", re.ASCII)
