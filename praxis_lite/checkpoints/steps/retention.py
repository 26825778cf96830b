"""Which checkpoints are retained: the newest, every so many steps, and the best by a metric."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from praxis_lite.core.errors import is_whole, require


def retained_steps(
    steps: Sequence[int],
    metrics: Mapping[int, Mapping[str, float]],
    max_to_keep: int,
    keep_every_steps: int | None,
    best: "BestCheckpoints | None",
) -> set[int]:
    """Returns the steps that are not deleted.

    Args:
      steps: all of them, in order.
      metrics: of each step.
      max_to_keep, keep_every_steps, best: as in `SaveSettings`.
    """
    retained = set(steps[-max_to_keep:])
    if keep_every_steps is not None:
        retained |= {step for step in steps if step % keep_every_steps == 0}
    if best is not None:
        retained |= set(best.ranked(metrics)[: best.max_to_keep])
    return retained


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestCheckpoints:
    """The number of best checkpoints to keep, and the metric that orders them.

    Attributes:
      metric: name of one of the metrics that are saved with a state, such as "heldout/loss".
      mode: "min" or "max": which values of it are better. NaN never is; of equal ones the earlier.
      max_to_keep: how many are retained.

    Raises:
      ConfigError: the metric lacks its dataset, the mode is another, or max_to_keep is below 1.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    max_to_keep: int = 3

    def __post_init__(self) -> None:
        check_watched_metric("best_checkpoints", self.metric, self.mode)
        require(
            is_whole(self.max_to_keep), "BestCheckpoints.max_to_keep", self.max_to_keep,
            "a whole number, 1 or more",
        )

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Returns the steps whose `metrics` have the metric, the best first."""
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
