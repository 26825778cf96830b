"""Ends training before its last step, when a metric no longer improves."""

import dataclasses
import math
from collections.abc import Mapping

from praxis_lite.checkpoints.steps.retention import check_watched_metric
from praxis_lite.core.errors import ConfigError, is_whole, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends training when a metric has not improved for several evaluations.

    Attributes:
        metric: The dataset and the metric, as evaluations are printed: `heldout/loss`.
        mode: "min" or "max", the better direction.
        patience: Training ends after this many evaluations in a row without an improvement.
        min_delta: By how much an improvement must beat the best value so far.

    Raises:
        ConfigError: A setting is out of range.
    """

    metric: str
    mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_watched_metric("early_stopping", self.metric, self.mode)
        expected = "a number of evaluations, 1 or more"
        require(is_whole(self.patience), "early_stopping.patience", self.patience, expected)
        require(
            self.min_delta >= 0, "early_stopping.min_delta", self.min_delta, "0 or more",
            "early_stopping.mode sets the better direction.",
        )

    def watched_in(self, values: Mapping[str, float], step: int) -> float:
        """Returns the metric's value among those of the evaluation of `step`.

        Raises:
          ConfigError: it is not among them.
        """
        if self.metric not in values:
            raise ConfigError(
                f"run.stopping.early watches {self.metric}, which the evaluation of step {step} "
                f"lacks: no row of datasets.{self.metric.partition('/')[0]} weighs anything. Give "
                "it rows with weights above 0, raise run.evaluation.max_batches, watch another "
                "metric, or set run.stopping.early=None."
            )
        return values[self.metric]

    def reason_to_stop(self, values: Mapping[int, float]) -> str | None:
        """Returns why training ends now, or None if it continues.

        Args:
          values: of the metric by step, of all evaluations so far. NaN counts as no improvement.
        """
        sign = 1.0 if self.mode == "min" else -1.0
        best, best_step, num_since = math.inf, None, 0
        for step, value in sorted(values.items()):
            if sign * value < best - self.min_delta:
                best, best_step, num_since = sign * value, step, 0
            else:
                num_since += 1
        if num_since < self.patience:
            return None
        result = (
            "was never a number"
            if best_step is None
            else f"was best at step {best_step} ({sign * best:.4f})"
        )
        times = "evaluation" if num_since == 1 else "evaluations"
        return f"{self.metric} {result} and has not got better in {num_since} {times}"
