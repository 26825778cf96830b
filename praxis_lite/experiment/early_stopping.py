"""Early stopping: ends training when a metric no longer improves."""

import dataclasses
import math
from collections.abc import Mapping

from praxis_lite.checkpoints.steps.retention import check_watched_metric
from praxis_lite.core.errors import ConfigError, is_positive_int, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends training when a metric has not improved for several evaluations.

    Attributes:
        metric: Name of the dataset and the metric, such as `heldout/loss`.
        mode: "min" if lower values are better, "max" if higher values are better.
        patience: Number of consecutive evaluations without improvement after which training ends.
        min_delta: Minimum difference from the best value that is treated as an improvement.

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
        require(is_positive_int(self.patience), "early_stopping.patience", self.patience, expected)
        require(
            self.min_delta >= 0,
            "early_stopping.min_delta",
            self.min_delta,
            "0 or more",
            "To change whether lower or higher values are better, set early_stopping.mode.",
        )

    def watched_in(self, values: Mapping[str, float], step: int) -> float:
        """Returns the value of the metric in an evaluation.

        Args:
          values: Metrics of the evaluation, keyed by name.
          step: The evaluated step, for the error message.

        Raises:
          ConfigError: The evaluation does not include the metric.
        """
        if self.metric not in values:
            raise ConfigError(
                f"run.stopping.early watches {self.metric}, but the evaluation at step {step} did "
                f"not compute it: all rows of datasets.{self.metric.partition('/')[0]} have weight "
                "0. Add rows with positive weights, raise run.evaluation.max_batches, watch a "
                "different metric, or set run.stopping.early=None."
            )
        return values[self.metric]

    def reason_to_stop(self, values: Mapping[int, float]) -> str | None:
        """Returns the reason why training must end now, or None if training continues.

        Args:
          values: Values of the metric in all evaluations so far, keyed by step. NaN is not an
            improvement.
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
        history = (
            "was never a number"
            if best_step is None
            else f"was best at step {best_step} ({sign * best:.4f})"
        )
        noun = "evaluation" if num_since == 1 else "evaluations"
        return f"{self.metric} {history} and has not improved in {num_since} {noun}"
