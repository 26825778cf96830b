"""Checkpoints worth keeping besides the newest: the best by a metric."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from praxis_lite.core.errors import is_whole, require


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
