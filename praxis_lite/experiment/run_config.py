"""How long a job runs, and how often it saves, evaluates and reports."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.steps.best_checkpoints import BestCheckpoints
from praxis_lite.errors import ConfigError
from praxis_lite.experiment.early_stopping import EarlyStopping


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a job runs, and how often it saves, evaluates and reports.

    Attributes:
        num_train_steps: updates from step 0 to the end of training; a resumed job counts on.
        seed: of the initial weights, dropout and sampling. The data has its own.
        checkpoint_every_steps: steps between checkpoints. None: one, at the end.
        eval_every_steps: steps between evaluations on every dataset but `train`. None: one, at the
            end.
        log_every_steps: steps between the lines printed where the output is no terminal. None:
            about 20 lines in a run. `metrics.jsonl` has every step whatever this says.
        max_checkpoints_to_keep: older checkpoints are deleted; 2 or more, for the newest may prove
            damaged.
        keep_checkpoint_every_steps: checkpoints of multiples of this many steps are kept besides.
        save_retries: how often a save that failed (a full disk) is tried again, a minute apart,
            before training ends. 0: it ends at once.
        save_non_finite: save a state although a weight or slot is not finite. False: an error.
        accept_changed_data: names in the fingerprint of the training data, such as "seed" or
            "corpus.sha256", that may differ from the checkpoint's.
        max_eval_batches: batches of each dataset that an evaluation reads. None: all, one pass.
        eval_use_ema_states: evaluate with the moving averages of `Learner.ema_decay`.
        decode_use_ema_states: decode with them.
        max_skipped_steps_in_a_row: training ends, with an error, after as many steps in a row whose
            loss or gradient was not finite or too large. None: never.
        debug_nans: run a step whose loss or gradient is not finite again, and name the first layer
            with a non-finite output. Each step is waited for.
        loss_spike_factor: a loss of more than this many times the median of the last 100, which is
            above 0, is a spike. Lines of metrics.jsonl then have `is_loss_spike` and
            `num_batches_left_out`. None: none is.
        on_loss_spike: "report" it, or "roll_back": go back to the newest checkpoint from before,
            or else to the start, and leave out the batch.
        time_limit_seconds: training stops, as on SIGTERM, after as long; set it below the
            scheduler's limit, and above what restoring and compiling take. None: never.
        watchdog_seconds: the stack traces of all threads are reported when no step ends for as
            long. None: never.
        watchdog_exits: end the process then.
        early_stopping: an `EarlyStopping`: training ends when a metric no longer gets better.
        best_checkpoints: a `BestCheckpoints`: those best by a metric are kept besides the newest.
        init_from_checkpoint_rules: `CheckpointLoadingRules` by the directory of a job, for weights
            that do not start at random; of two that name a weight, the first wins.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    num_train_steps: int
    seed: int = 0
    checkpoint_every_steps: int | None = None
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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = field.type in (int, int | None)
            if not is_number or (value is None and field.type is not int):
                continue
            least, most = _RANGES.get(field.name, (1, float("inf")))
            if type(value) is not int or not least <= value <= most:
                wanted = (
                    f"a whole number, {least} or more"
                    if most == float("inf")
                    else f"a whole number from {least} to {most}"
                )
                absent = "" if field.type is int else ", or None"
                raise ConfigError(
                    f"run.{field.name}: found {value!r}, wanted {wanted}{absent}. Change it in the "
                    f"experiment's run(), or with --set run.{field.name}=NUMBER."
                )
        factor = self.loss_spike_factor
        if factor is not None and not (isinstance(factor, int | float) and factor > 1):
            raise ConfigError(
                f"run.loss_spike_factor: found {self.loss_spike_factor!r}, wanted a number above "
                "1, or None. Change it in the experiment's run(), or with --set."
            )
        if self.on_loss_spike not in ("report", "roll_back"):
            raise ConfigError(
                f"run.on_loss_spike: found {self.on_loss_spike!r}, wanted 'report' or "
                "'roll_back'. Change it in the experiment's run(), or with --set."
            )
        if self.on_loss_spike == "roll_back" and factor is None:
            raise ConfigError(
                "run.on_loss_spike is 'roll_back', but run.loss_spike_factor is None, so no loss "
                "is a spike. Set it, for instance to 3.0."
            )
        if isinstance(self.accept_changed_data, str):
            raise ConfigError(
                f"run.accept_changed_data: found {self.accept_changed_data!r}, wanted names in "
                "brackets: put it in brackets."
            )


_RANGES = {
    # JAX keys take a seed of 32 bits where 64-bit types are off.
    "seed": (0, 2**32 - 1),
    # The state counts steps and updates in int32.
    "num_train_steps": (1, 2**31 - 1),
    "max_checkpoints_to_keep": (2, float("inf")),
    "save_retries": (0, float("inf")),
}
