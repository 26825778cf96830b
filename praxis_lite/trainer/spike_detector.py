"""Spikes among losses, and the number of times that a run is rolled back to before a spike."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from praxis_lite.core.errors import ConfigError

NUM_LOSSES = 100  # A loss is compared with at most this many before it,
MIN_LOSSES = 10  # and is not a spike if there are fewer than this.
MAX_ROLL_BACKS = 5


@dataclasses.dataclass(frozen=True)
class LossSpike:
    """A spike for which a run goes back to before its step, and leaves its batch out.

    Attributes:
      step: whose loss it is.
      batch: the index of the step's batch.
    """

    step: int
    batch: int


class SpikeDetector:
    """Compares each loss with the median of the last losses without spikes.

    Only the losses decide. They are the same bits in every process and in a run that was resumed,
    so all of them find the same spikes.

    Args:
      factor: a loss above this many times the median is a spike; None: there are no spikes. Nor
        are there any while the median is not above 0, as of a log-likelihood.
      before: the losses of the steps before, as `losses_of_newest` returns them.
    """

    def __init__(self, factor: float | None, before: Iterable[float] = ()):
        self._factor = factor
        self._losses = collections.deque(before, maxlen=NUM_LOSSES)

    def median_below(self, loss: float) -> float | None:
        """Returns the median if `loss` is a spike above it, or None.

        A loss that is no spike is kept for the next median. One that is not finite is not: its step
        was skipped.
        """
        if self._factor is None or not math.isfinite(loss):
            return None
        if len(self._losses) >= MIN_LOSSES:
            middle = median(self._losses)
            if middle > 0 and loss > self._factor * middle:
                return middle
        self._losses.append(loss)
        return None


def losses_of_newest(lines: Iterable[Mapping[str, Any]]) -> list[float]:
    """Returns the losses that the next loss is compared with, the oldest first.

    Args:
      lines: of metrics.jsonl, the newest first; only as many are read as are needed.
    """
    losses = (line["loss"] for line in lines if not line.get("is_loss_spike"))
    return list(itertools.islice(filter(math.isfinite, losses), NUM_LOSSES))[::-1]


class RollBacks:
    """Counts how often a run was rolled back without getting beyond a step."""

    def __init__(self):
        self._furthest, self._num = -1, 0

    def add(self, spike: LossSpike) -> None:
        """Counts another spike; raises ConfigError if MAX_ROLL_BACKS did not help."""
        if spike.step > self._furthest:
            self._furthest, self._num = spike.step, 0
        self._num += 1
        if self._num > MAX_ROLL_BACKS:
            raise ConfigError(
                f"The run was rolled back {MAX_ROLL_BACKS} times, leaving out another batch each "
                f"time, and has not got beyond step {self._furthest} without a loss spike: the "
                "batches are not what makes it. Lower the learning rate or clip gradients, raise "
                "run.loss_spikes.factor, or take run.loss_spikes.action=report. To begin before "
                "the newest checkpoint, remove it."
            )
