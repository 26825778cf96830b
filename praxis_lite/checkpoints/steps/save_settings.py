"""Settings for a job's saves: when to save, which checkpoints to retain, how often to retry."""

import dataclasses
import math

from praxis_lite.checkpoints.steps.retention import BestCheckpoints
from praxis_lite.config.integer_settings import check_integers

# The default interval, which limits how much training a killed job loses.
SECONDS_BETWEEN_CHECKPOINTS = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """When a job saves, and which checkpoints it retains (`run.checkpoints`).

    Attributes:
      every_steps: Number of steps between checkpoints. If None, checkpoints do not depend on the
        number of steps. The last step is always saved.
      every_seconds: Seconds of training between checkpoints, measured by the first process. If 0,
        checkpoints do not depend on time. None means 600 if every_steps is None, else 0.
      max_to_keep: Number of newest checkpoints to retain. At least 2, because the newest checkpoint
        may be damaged.
      keep_every_steps: If not None, also retain checkpoints at multiples of this number of steps.
      best: If not None, also retain the best checkpoints by a metric.
      retries: Number of times to retry failed saves, for example on a full disk, before training
        ends.
      retry_seconds: Seconds between two attempts.
      save_non_finite: Whether to save states with weights or slots that are not finite, instead of
        raising an error.

    Raises:
      ConfigError: A number has the wrong type or is out of range.
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
        check_integers(
            "run.checkpoints",
            self,
            {"retries": (0, math.inf), "every_seconds": (0, math.inf)},
        )

    @property
    def seconds_between(self) -> int | None:
        """Seconds between checkpoints, or None if checkpoints do not depend on time."""
        if self.every_seconds is not None:
            return self.every_seconds or None
        return None if self.every_steps else SECONDS_BETWEEN_CHECKPOINTS
