"""How long a job runs, and how often it saves, evaluates and reports."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.config.whole_numbers import CHANGE, check_whole_numbers
from praxis_lite.core.errors import is_whole, require, require_choice
from praxis_lite.experiment.run_settings import (
    EvaluationSettings,
    LossSpikeSettings,
    ProfileSettings,
    StopSettings,
)
from praxis_lite.trackers.tensorboard import TensorBoard
from praxis_lite.trackers.tracker import Tracker


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a job runs, and how often it saves, evaluates and reports.

    Attributes:
        num_train_steps: Updates from step 0 to the end of training; a resumed job counts on.
        seed: Of the initial weights, dropout and sampling. The data has a separate seed.
        checkpoints: When it saves, and which checkpoints are kept.
        peer_save_every_steps: Steps between saves of the state into the memory of the job's hosts,
            one of which may die; for jobs with `--elastic`. None: such a job resumes from its
            newest checkpoint.
        evaluation: When it evaluates, on how much, and with which weights.
        stopping: Conditions that end training before its last step.
        loss_spikes: The size of a loss spike, and the action that follows.
        profile: The steps that are profiled, and by which processes.
        trackers: By name, services and files that show the run in addition to the job's files. None
            as a value: no tracker; `--set run.trackers.tensorboard=None` removes the default one.
        log_every_steps: Steps between printed lines if the output is not a terminal. None: about 20
            lines in a run. `metrics.jsonl` has every step in any case.
        accept_changed_data: Names in the fingerprint of the training data, such as "seed" or
            "corpus.sha256", that may differ from the checkpoint's.
        decode_use_ema_states: Decode with the moving averages of `Learner.ema_decay`.
        debug_nans: Rerun a step whose loss or gradient is not finite, and name the first layer with
            a non-finite output. The loop then waits for each step.
        certify_every_steps: Steps between certificates: the step is repeated on a few of its rows,
            with the devices permuted and on another mesh, its update is recomputed, and all copies
            of the state are compared (docs/check.md). 500 costs about 1.1 %. None: no certificates,
            as on one device.
        certify_action: After a difference, "stop" saves and ends the job with an error, "report"
            saves, prints a line and continues.
        init_from_checkpoint_rules: By the directory of a job, for weights that do not start at
            random; of two rules that name a weight, the first wins.
        init_from_huggingface: A directory with a Hugging Face model, which has all weights except
            those of adapters.
        frozen_may_be_new: A new job may freeze weights that were never trained, such as random
            features; without it that is an error, because adapters over noise learn nothing.

    Raises:
        ConfigError: A value has the wrong type or is out of range.
    """

    num_train_steps: int
    seed: int = 0
    checkpoints: SaveSettings = SaveSettings()
    peer_save_every_steps: int | None = None
    evaluation: EvaluationSettings = EvaluationSettings()
    stopping: StopSettings = StopSettings()
    loss_spikes: LossSpikeSettings = LossSpikeSettings()
    profile: ProfileSettings = ProfileSettings()
    trackers: Mapping[str, Tracker | None] = dataclasses.field(
        default_factory=lambda: {"tensorboard": TensorBoard()}
    )
    log_every_steps: int | None = None
    accept_changed_data: Sequence[str] = ()
    decode_use_ema_states: bool = False
    debug_nans: bool = False
    certify_every_steps: int | None = None
    certify_action: Literal["stop", "report"] = "stop"
    init_from_checkpoint_rules: Mapping[str, CheckpointLoadingRules] = dataclasses.field(
        default_factory=dict
    )
    init_from_huggingface: str | None = None
    frozen_may_be_new: bool = False

    def __post_init__(self) -> None:
        # JAX keys take a seed of 32 bits where 64-bit types are off; the state counts in int32.
        ranges = {"seed": (0, 2**32 - 1), "num_train_steps": (1, 2**31 - 1)}
        check_whole_numbers("run", self, ranges)
        require(
            isinstance(self.trackers, Mapping), "run.trackers", self.trackers,
            "trackers by name, such as {'wandb': fdl.Config(WeightsAndBiases)}", CHANGE,
        )
        for name, tracker in self.trackers.items():
            if tracker is None:
                continue
            require(
                isinstance(tracker, Tracker), f"run.trackers.{name}", tracker,
                "a Tracker, such as TensorBoard() or WeightsAndBiases(), or None", CHANGE,
            )
            require(
                tracker.every is None or is_whole(tracker.every), f"run.trackers.{name}.every",
                tracker.every, "a number of steps, 1 or more, or None", CHANGE,
            )
        require_choice("run.certify_action", self.certify_action, ("stop", "report"))
        require(
            self.checkpoints.max_to_keep >= 2, "run.checkpoints.max_to_keep",
            self.checkpoints.max_to_keep, "a whole number, 2 or more", CHANGE,
        )
        ranges = self.profile.ranges()
        require(
            not ranges or ranges[-1].stop - 1 <= self.num_train_steps, "run.profile.steps",
            self.profile.steps,
            f"steps to {self.num_train_steps}, run.num_train_steps, and so an END of "
            f"{self.num_train_steps + 1} at most", CHANGE,
        )
        require(
            self.init_from_huggingface is None or not self.init_from_checkpoint_rules,
            "run.init_from_huggingface", self.init_from_huggingface,
            "None with run.init_from_checkpoint_rules", CHANGE,
        )
        require(
            not isinstance(self.accept_changed_data, str), "run.accept_changed_data",
            self.accept_changed_data, "names in brackets",
        )

    @property
    def init_from(self) -> tuple[str, Any] | None:
        """The name and value of the setting that initial weights come from; None: random ones."""
        if self.init_from_huggingface is not None:
            return "init_from_huggingface", self.init_from_huggingface
        rules = self.init_from_checkpoint_rules
        return ("init_from_checkpoint_rules", rules) if rules else None
