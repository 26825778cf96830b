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
        num_train_steps: updates from step 0 to the end of training; a resumed job counts on.
        seed: of the initial weights, dropout and sampling. The data has its own.
        checkpoints: when it saves, and which checkpoints stay.
        peer_save_every_steps: steps between saves of the state into the memory of the job's hosts,
            of which one may die; for jobs with `--elastic`. None: such a job goes on from its
            newest checkpoint.
        evaluation: when it evaluates, on how much, and with which weights.
        stopping: what ends training before its last step.
        loss_spikes: what is a loss spike, and what follows it.
        profile: which steps are profiled, and by which processes.
        trackers: by name, services and files that show the run besides the job's own. None: no
            tracker, so that `--set run.trackers.tensorboard=None` takes away that of every job.
        log_every_steps: steps between printed lines if the output is not a terminal. None: about 20
            lines in a run. `metrics.jsonl` has every step in any case.
        accept_changed_data: names in the fingerprint of the training data, such as "seed" or
            "corpus.sha256", that may differ from the checkpoint's.
        decode_use_ema_states: decode with the moving averages of `Learner.ema_decay`.
        debug_nans: run a step whose loss or gradient is not finite again, and name the first layer
            with a non-finite output. The loop then waits for each step.
        certify_every_steps: steps between certificates: the step is made again on a few of its
            rows, with the devices moved and on another mesh, its update is recomputed, and all
            copies of the state are compared (docs/check.md). 500 costs about 1.1 %. None: none are
            made, as on one device.
        certify_action: after a difference, "stop" saves and ends the job with an error, "report"
            saves, says it and goes on.
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
            require(
                tracker is None or isinstance(tracker, Tracker), f"run.trackers.{name}", tracker,
                "a Tracker, such as TensorBoard() or WeightsAndBiases(), or None", CHANGE,
            )
            require(
                tracker is None or tracker.every is None or is_whole(tracker.every),
                f"run.trackers.{name}.every", tracker and tracker.every,
                "a number of steps, 1 or more, or None", CHANGE,
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
            "None beside run.init_from_checkpoint_rules", CHANGE,
        )
        require(
            not isinstance(self.accept_changed_data, str), "run.accept_changed_data",
            self.accept_changed_data, "names in brackets",
        )

    @property
    def init_from(self) -> tuple[str, Any] | None:
        """The name and the value of the setting from which a new job takes its weights.

        None if they are drawn. Only one of the two settings may be given.
        """
        if self.init_from_huggingface is not None:
            return "init_from_huggingface", self.init_from_huggingface
        rules = self.init_from_checkpoint_rules
        return ("init_from_checkpoint_rules", rules) if rules else None
