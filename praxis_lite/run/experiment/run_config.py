"""How long a job runs, and how often it saves, evaluates and reports."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from praxis_lite.core.errors import require
from praxis_lite.run.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.run.checkpoints.steps.best_checkpoints import BestCheckpoints
from praxis_lite.run.experiment.early_stopping import EarlyStopping


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a job runs, and how often it saves, evaluates and reports.

    Attributes:
        num_train_steps: updates from step 0 to the end of training; a resumed job counts on.
        seed: of the initial weights, dropout and sampling. The data has its own.
        checkpoint_every_steps: steps between checkpoints. There is one at the end in any case.
        checkpoint_every_seconds: seconds of training between checkpoints, by the first process's
            clock. None: 600 if checkpoint_every_steps is None, else not by time; 0: not by time.
        eval_every_steps: steps between evaluations on every dataset but `train`. None: one, at the
            end.
        log_every_steps: steps between printed lines if the output is not a terminal. None: about 20
            lines in a run. `metrics.jsonl` has every step in any case.
        max_checkpoints_to_keep: older checkpoints are deleted; 2 or more, for the newest may prove
            damaged.
        keep_checkpoint_every_steps: checkpoints of multiples of this many steps are kept besides.
        save_retries: how often a failed save (a full disk) is tried again, a minute apart, before
            training ends.
        save_non_finite: save a state with a weight or slot that is not finite. False: an error.
        accept_changed_data: names in the fingerprint of the training data, such as "seed" or
            "corpus.sha256", that may differ from the checkpoint's.
        max_eval_batches: batches of each dataset that an evaluation reads. None: all, one pass.
        eval_use_ema_states: evaluate with the moving averages of `Learner.ema_decay`.
        decode_use_ema_states: decode with them.
        max_skipped_steps_in_a_row: training ends with an error after this many steps in a row whose
            loss or gradient was not finite or too large. None: never.
        debug_nans: run a step whose loss or gradient is not finite again, and name the first layer
            with a non-finite output. The loop then waits for each step.
        loss_spike_factor: a loss above this many times the median of the last 100, if that is
            positive, is a spike. Lines of metrics.jsonl then have `is_loss_spike` and
            `num_batches_left_out`. None: nothing is a spike.
        on_loss_spike: "report" it, or "roll_back": go back to the newest checkpoint before it, or
            to the start, and leave out the batch.
        time_limit_seconds: training stops after so long, as on SIGTERM; set it below the
            scheduler's limit, and above what restoring and compiling take. None: never.
        watchdog_seconds: the stack traces of all threads are reported when no step ends for so
            long. None: never.
        watchdog_exits: then also end the process.
        early_stopping: ends training when a metric no longer gets better.
        best_checkpoints: keeps those best by a metric besides the newest.
        init_from_checkpoint_rules: by the directory of a job, for weights that do not start at
            random; of two rules that name a weight, the first wins.
        init_from_huggingface: a directory with a model of Hugging Face, which has all weights but
            those of adapters.
        frozen_may_be_new: a new job may freeze weights that nothing has trained, such as random
            features; without it that is an error, for adapters over noise learn nothing.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    num_train_steps: int
    seed: int = 0
    checkpoint_every_steps: int | None = None
    checkpoint_every_seconds: int | None = None
    eval_every_steps: int | None = None
    log_every_steps: int | None = None
    max_checkpoints_to_keep: int = 3
    keep_checkpoint_every_steps: int | None = None
    save_retries: int = 0
    save_non_finite: bool = False
    accept_changed_data: Sequence[str] = ()
    max_eval_batches: int | None = None
    eval_use_ema_states: bool = False
    decode_use_ema_states: bool = False
    max_skipped_steps_in_a_row: int | None = 100
    debug_nans: bool = False
    loss_spike_factor: float | None = None
    on_loss_spike: Literal["report", "roll_back"] = "report"
    time_limit_seconds: int | None = None
    watchdog_seconds: int | None = 600
    watchdog_exits: bool = False
    early_stopping: EarlyStopping | None = None
    best_checkpoints: BestCheckpoints | None = None
    init_from_checkpoint_rules: Mapping[str, CheckpointLoadingRules] = dataclasses.field(
        default_factory=dict
    )
    init_from_huggingface: str | None = None
    frozen_may_be_new: bool = False

    def __post_init__(self) -> None:
        change = "Change it in the experiment's run(), or with --set."
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type not in (int, int | None) or (value is None and field.type is not int):
                continue
            least, most = _RANGES.get(field.name, (1, math.inf))
            wanted = f"{least} or more" if most == math.inf else f"from {least} to {most}"
            absent = "" if field.type is int else ", or None"
            require(
                type(value) is int and least <= value <= most, f"run.{field.name}", value,
                f"a whole number, {wanted}{absent}", change,
            )
        factor = self.loss_spike_factor
        require(
            factor is None or (isinstance(factor, int | float) and factor > 1),
            "run.loss_spike_factor", factor, "a number above 1, or None", change,
        )
        require(
            self.on_loss_spike in ("report", "roll_back"), "run.on_loss_spike", self.on_loss_spike,
            "'report' or 'roll_back'", change,
        )
        require(
            self.on_loss_spike == "report" or factor is not None, "run.loss_spike_factor", factor,
            "a number, such as 3.0, where run.on_loss_spike is 'roll_back'", change,
        )
        require(
            self.init_from_huggingface is None or not self.init_from_checkpoint_rules,
            "run.init_from_huggingface", self.init_from_huggingface,
            "None beside run.init_from_checkpoint_rules", change,
        )
        require(
            not isinstance(self.accept_changed_data, str), "run.accept_changed_data",
            self.accept_changed_data, "names in brackets",
        )


    @property
    def init_from(self) -> tuple[str, Any] | None:
        """The setting that names the initial state of a new job, and its value; None: it is drawn.

        Of both settings only one may be given.
        """
        if self.init_from_huggingface is not None:
            return "init_from_huggingface", self.init_from_huggingface
        rules = self.init_from_checkpoint_rules
        return ("init_from_checkpoint_rules", rules) if rules else None

    @property
    def seconds_between_checkpoints(self) -> int | None:
        """The seconds after which a checkpoint is due, or None if none is by time."""
        if self.checkpoint_every_seconds is not None:
            return self.checkpoint_every_seconds or None
        return None if self.checkpoint_every_steps else SECONDS_BETWEEN_CHECKPOINTS


# A job that is killed has this much to make again, if it says nothing of its checkpoints.
SECONDS_BETWEEN_CHECKPOINTS = 600

_RANGES = {
    # JAX keys take a seed of 32 bits where 64-bit types are off.
    "seed": (0, 2**32 - 1),
    # The state counts steps and updates in int32.
    "num_train_steps": (1, 2**31 - 1),
    "max_checkpoints_to_keep": (2, math.inf),
    "save_retries": (0, math.inf),
    "checkpoint_every_seconds": (0, math.inf),
}
