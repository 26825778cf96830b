"""Settings of a job's saves: when, which checkpoints stay, and what follows a failed write."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from praxis_lite.config.whole_numbers import check_whole_numbers
from praxis_lite.core.errors import is_whole, require

# A job that is killed has this much to make again, if it says nothing of its checkpoints.
SECONDS_BETWEEN_CHECKPOINTS = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestCheckpoints:
    """The number of best checkpoints to keep, and the metric that orders them.

    Attributes:
      metric: name of one of the metrics that are saved with a state, such as "heldout/loss".
      mode: "min" or "max": which values of it are better. NaN never is; of equal ones the earlier.
      max_to_keep: how many are kept.

    Raises:
      ConfigError: the metric lacks its dataset, the mode is another, or max_to_keep is below 1.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    max_to_keep: int = 3

    def __post_init__(self) -> None:
        check_watched_metric("best_checkpoints", self.metric, self.mode)
        number = self.max_to_keep
        setting = "BestCheckpoints.max_to_keep"
        require(is_whole(number), setting, number, "a whole number, 1 or more")

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Returns the steps that have the metric, the best first.

        Args:
          metrics: of each step.
        """
        values = {step: metric.get(self.metric, math.nan) for step, metric in metrics.items()}
        sign = 1 if self.mode == "min" else -1
        steps = [step for step, value in values.items() if not math.isnan(value)]
        return sorted(steps, key=lambda step: (sign * values[step], step))


def check_watched_metric(setting: str, metric: str, mode: str) -> None:
    """Checks how a setting names the metric that it watches.

    Raises:
      ConfigError: the metric lacks its dataset, or the mode is neither "min" nor "max".
    """
    expected = "the name of a dataset and of a metric, for instance 'heldout/loss'"
    require(isinstance(metric, str) and "/" in metric, f"{setting}.metric", metric, expected)
    require(mode in ("min", "max"), f"{setting}.mode", mode, "'min' (less is better) or 'max'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """When a job saves, and which checkpoints stay (`run.checkpoints`).

    Attributes:
      every_steps: steps between checkpoints. There is one at the end in any case.
      every_seconds: seconds of training between checkpoints, by the first process's clock. None:
        600 if every_steps is None, else not by time; 0: not by time.
      max_to_keep: the newest steps that stay, 2 or more, for the newest may prove damaged.
      keep_every_steps: checkpoints of multiples of this many steps stay besides.
      best: the best by a metric stay besides.
      retries: how often a failed save (a full disk) is tried again before training ends.
      retry_seconds: between two tries.
      save_non_finite: save a state with a weight or slot that is not finite. False: an error.

    Raises:
      ConfigError: a number of the wrong type or out of range.
    """

    every_steps: int | None = None
    every_seconds: int | None = None
    max_to_keep: int = 3
    keep_every_steps: int | None = None
    best: BestCheckpoints | None = None
    retries: int = 0
    retry_seconds: float = 60.0
    save_non_finite: bool = False

    def __post_init__(self) -> None:
        check_whole_numbers(
            "run.checkpoints", self,
            {"retries": (0, math.inf), "every_seconds": (0, math.inf)},
        )

    @property
    def seconds_between(self) -> int | None:
        """The seconds after which a checkpoint is due, or None if none is by time."""
        if self.every_seconds is not None:
            return self.every_seconds or None
        return None if self.every_steps else SECONDS_BETWEEN_CHECKPOINTS

    def kept(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns the steps that stay; `metrics` are of each."""
        kept = set(sorted(steps)[-self.max_to_keep :])
        if self.keep_every_steps is not None:
            kept |= {step for step in steps if step % self.keep_every_steps == 0}
        if self.best is not None:
            known = {step: metrics.get(step, {}) for step in steps}
            kept |= set(self.best.ranked(known)[: self.best.max_to_keep])
        return kept
