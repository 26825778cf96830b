"""Settings of a job's saves: the checkpoints that stay, and the response to a failed write."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.run.checkpoints.steps.best_checkpoints import BestCheckpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """What of a RunConfig concerns saving; see there.

    Attributes:
      max_to_keep: the newest steps that stay, 2 or more.
      keep_every_steps: its multiples stay too; None for no such rule.
      best: the best by a metric stay too; None for no such rule.
      retries: how often a failed save is tried again before it is an error.
      retry_seconds: between two tries.
      save_non_finite: save values that are not finite.
    """

    max_to_keep: int = 3
    keep_every_steps: int | None = None
    best: BestCheckpoints | None = None
    retries: int = 0
    retry_seconds: float = 60.0
    save_non_finite: bool = False

    @classmethod
    def of(cls, run: Any) -> "SaveSettings":
        """Returns the settings of a RunConfig."""
        return cls(
            max_to_keep=run.max_checkpoints_to_keep,
            keep_every_steps=run.keep_checkpoint_every_steps,
            best=run.best_checkpoints,
            retries=run.save_retries,
            save_non_finite=run.save_non_finite,
        )

    def kept(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns which of the steps stay; `metrics` are of each."""
        kept = set(sorted(steps)[-self.max_to_keep :])
        if self.keep_every_steps is not None:
            kept |= {step for step in steps if step % self.keep_every_steps == 0}
        if self.best is not None:
            known = {step: metrics.get(step, {}) for step in steps}
            kept |= set(self.best.ranked(known)[: self.best.max_to_keep])
        return kept
