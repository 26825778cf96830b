"""Settings of a job's saves: when to save, what to retain, how often to retry."""

import dataclasses
import math

from praxis_lite.checkpoints.steps.retention import BestCheckpoints
from praxis_lite.config.whole_numbers import check_whole_numbers

# A job that is killed loses at most this much training, if its settings leave the interval open.
SECONDS_BETWEEN_CHECKPOINTS = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """When a job saves, and which checkpoints are retained (`run.checkpoints`).

    Attributes:
      every_steps: steps between checkpoints. There is one at the end in any case.
      every_seconds: seconds of training between checkpoints, by the first process's clock. None:
        600 if every_steps is None, else not by time; 0: not by time.
      max_to_keep: number of newest steps to retain, 2 or more: the newest may prove damaged.
      keep_every_steps: checkpoints at multiples of this many steps are retained too.
      best: the best by a metric are retained too.
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
