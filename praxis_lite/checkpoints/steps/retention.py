"""Selects the checkpoints to retain: the newest, the best, and one every N steps."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from praxis_lite.core.errors import is_positive_int, require


def retained_steps(
    steps: Sequence[int],
    metrics: Mapping[int, Mapping[str, float]],
    max_to_keep: int,
    keep_every_steps: int | None,
    best: "BestCheckpoints | None",
) -> set[int]:
    """Returns the steps to retain. All other steps may be deleted.

    Args:
      steps: All steps, in order.
      metrics: Metrics of each step.
      max_to_keep: Number of newest steps to retain.
      keep_every_steps: If not None, steps at multiples of this number are retained.
      best: If not None, settings of the best steps to retain.
    """
    retained = set(steps[-max_to_keep:])
    if keep_every_steps is not None:
        retained |= {step for step in steps if step % keep_every_steps == 0}
    if best is not None:
        retained |= set(best.ranked(metrics)[: best.max_to_keep])
    return retained


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestCheckpoints:
    """The number of best checkpoints to retain, and the metric by which they are ranked.

    Attributes:
      metric: Name of a metric that is saved with the state, such as "heldout/loss".
      mode: "min" if lower values are better, "max" if higher values are better. NaN ranks last. If
        values are equal, the earlier step ranks first.
      max_to_keep: Number of best checkpoints to retain.

    Raises:
      ConfigError: The metric has no dataset in its name, the mode is unknown, or max_to_keep is
        below 1.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    max_to_keep: int = 3

    def __post_init__(self) -> None:
        check_watched_metric("best_checkpoints", self.metric, self.mode)
        require(
            is_positive_int(self.max_to_keep),
            "BestCheckpoints.max_to_keep",
            self.max_to_keep,
            "a whole number, 1 or more",
        )

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Returns the steps that have the metric, best first."""
        values = {step: metric.get(self.metric, math.nan) for step, metric in metrics.items()}
        sign = 1 if self.mode == "min" else -1
        steps = [step for step, value in values.items() if not math.isnan(value)]
        return sorted(steps, key=lambda step: (sign * values[step], step))


def check_watched_metric(setting: str, metric: str, mode: str) -> None:
    """Checks the metric and mode of a setting that uses an evaluation metric.

    Raises:
      ConfigError: The metric has no dataset in its name, or the mode is not "min" or "max".
    """
    expected = "the names of a dataset and a metric, for instance 'heldout/loss'"
    require(isinstance(metric, str) and "/" in metric, f"{setting}.metric", metric, expected)
    require(mode in ("min", "max"), f"{setting}.mode", mode, "'min' (lower is better) or 'max'")
