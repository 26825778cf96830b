"""The settings of a run, such as its length and how often it saves and evaluates."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.config.integer_settings import CHANGE, check_integers
from praxis_lite.core.errors import ConfigError, is_positive_int, require, require_choice
from praxis_lite.experiment.run_settings import (
    EvaluationSettings,
    LossSpikeSettings,
    ProfileSettings,
    SampleSettings,
    StopSettings,
)
from praxis_lite.trackers.tensorboard import TensorBoard
from praxis_lite.trackers.tracker import Tracker


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings for the length of a run and for how it saves, evaluates and reports.

    Attributes:
        num_train_steps: Total number of training steps, including steps before the job was resumed.
        seed: Seed for initial weights, dropout and sampling. The data has a separate seed.
        checkpoints: When the job saves, and which checkpoints it retains.
        peer_save_every_steps: Number of steps between saves of the state to the memory of the job's
            hosts, for jobs with `--elastic`. The state survives the loss of any single host. If
            None, there are no such saves.
        evaluation: When the job evaluates, on how much data, and with which weights.
        samples: Prompts that a language model continues while it trains.
        stopping: Conditions that end training before its last step.
        loss_spikes: Size of a loss spike, and the action that follows.
        profile: Steps to profile, and the processes that record profiles.
        trackers: Trackers, keyed by name, that record the run in addition to the job's files. The
            value None removes a tracker, as in `--set run.trackers.tensorboard=None`.
        log_every_steps: Number of steps between printed lines if the output is not a terminal. None
            for about 20 lines per run. `metrics.jsonl` always contains every step.
        histograms_every_steps: Number of steps between histograms of the weights and of their
            gradients, which are sent to the trackers. Computing them takes about as long as a step.
            None for no histograms.
        accept_changed_data: Names in the fingerprint of the training data, such as "seed" or
            "corpus.sha256", whose values may differ from the checkpoint's values.
        decode_use_ema_states: Whether to decode with the moving averages of `Learner.ema_decay`.
        debug_nans: Whether to rerun steps whose loss or gradient is not finite, and report the
            first layer with an output that is not finite. With this setting, the loop waits for
            each step.
        certify_every_steps: Number of steps between certificates. For a certificate, a step is
            repeated on some of its rows with permuted devices and on a different mesh, its update
            is recomputed, and all copies of the state are compared (docs/check.md). An interval of
            500 costs about 1.1 %. None for no certificates.
        certify_action: Action after a difference is found: "stop" saves and ends the job with an
            error, "report" saves, prints a line and continues.
        init_from_checkpoint_rules: Rules that load initial weights from other checkpoints, keyed by
            job directory. If several rules match a weight, the first rule is used.
        init_from_huggingface: Directory of a Hugging Face model, or hf://org/name[@revision], from
            which to load all weights except adapters.
        frozen_may_be_new: Whether a new job may freeze weights that were never trained, such as
            random features. If False, this is an error, because adapters over random weights learn
            nothing.

    Raises:
        ConfigError: A value has the wrong type or is out of range.
    """

    num_train_steps: int
    seed: int = 0
    checkpoints: SaveSettings = SaveSettings()
    peer_save_every_steps: int | None = None
    evaluation: EvaluationSettings = EvaluationSettings()
    samples: SampleSettings = SampleSettings()
    stopping: StopSettings = StopSettings()
    loss_spikes: LossSpikeSettings = LossSpikeSettings()
    profile: ProfileSettings = ProfileSettings()
    trackers: Mapping[str, Tracker | None] = dataclasses.field(
        default_factory=lambda: {"tensorboard": TensorBoard()}
    )
    log_every_steps: int | None = None
    histograms_every_steps: int | None = None
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
        # Seeds of JAX keys have 32 bits unless 64-bit types are enabled. The step counter is int32.
        ranges = {"seed": (0, 2**32 - 1), "num_train_steps": (1, 2**31 - 1)}
        check_integers("run", self, ranges)
        require(
            isinstance(self.trackers, Mapping),
            "run.trackers",
            self.trackers,
            "a mapping from names to trackers, such as {'wandb': fdl.Config(WeightsAndBiases)}",
            CHANGE,
        )
        for name, tracker in self.trackers.items():
            if tracker is None:
                continue
            require(
                isinstance(tracker, Tracker),
                f"run.trackers.{name}",
                tracker,
                "a Tracker, such as TensorBoard() or WeightsAndBiases(), or None",
                CHANGE,
            )
            require(
                tracker.every is None or is_positive_int(tracker.every),
                f"run.trackers.{name}.every",
                tracker.every,
                "a number of steps, 1 or more, or None",
                CHANGE,
            )
        require_choice("run.certify_action", self.certify_action, ("stop", "report"))
        require(
            self.checkpoints.max_to_keep >= 2,
            "run.checkpoints.max_to_keep",
            self.checkpoints.max_to_keep,
            "a whole number, 2 or more",
            CHANGE,
        )
        profiles = self.profile.ranges()
        require(
            not profiles or profiles[-1].stop - 1 <= self.num_train_steps,
            "run.profile.steps",
            self.profile.steps,
            f"an END of at most {self.num_train_steps + 1}, because run.num_train_steps is "
            f"{self.num_train_steps}",
            CHANGE,
        )
        if self.init_from_huggingface is not None and self.init_from_checkpoint_rules:
            raise ConfigError(
                "run.init_from_huggingface cannot be combined with "
                "run.init_from_checkpoint_rules. Remove one of them from the experiment's run()."
            )
        require(
            not isinstance(self.accept_changed_data, str),
            "run.accept_changed_data",
            self.accept_changed_data,
            "a list of names, such as ['seed']",
        )

    @property
    def init_from(self) -> tuple[str, Any] | None:
        """The (name, value) of the setting for initial weights, or None for random weights."""
        if self.init_from_huggingface is not None:
            return "init_from_huggingface", self.init_from_huggingface
        rules = self.init_from_checkpoint_rules
        return ("init_from_checkpoint_rules", rules) if rules else None
