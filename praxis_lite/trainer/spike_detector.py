"""Detects loss spikes, and limits how often a run is rolled back because of them."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from praxis_lite.core.errors import ConfigError

NUM_LOSSES = 100  # A loss is compared with the median of at most this number of previous losses.
MIN_LOSSES = 10  # Spikes are only detected after this number of losses.
MAX_ROLL_BACKS = 5


@dataclasses.dataclass(frozen=True)
class LossSpike:
    """A loss spike. The run is rolled back to an earlier step, and the spike's batch is skipped.

    Attributes:
      step: The step with the spike.
      batch_index: Index of that step's batch in the training data.
    """

    step: int
    batch_index: int


class SpikeDetector:
    """Detects spikes by comparing each loss with the median of the previous losses.

    The result depends only on the losses, which are bitwise equal in all processes and in a resumed
    run. All processes therefore find the same spikes. Spikes are excluded from the median.

    Args:
      factor: A loss above this multiple of the median is a spike. If the median is not positive, as
        for a log-likelihood, no spikes are detected.
      previous_losses: Losses of the steps so far, oldest first, as from `recent_losses`.
    """

    def __init__(self, factor: float, previous_losses: Iterable[float] = ()):
        self._factor = factor
        self._losses = collections.deque(previous_losses, maxlen=NUM_LOSSES)

    def median_below(self, loss: float) -> float | None:
        """Returns the median of the previous losses if `loss` is a spike, else None.

        A finite loss that is not a spike is added to the previous losses. A loss that is not finite
        is ignored, because its step was skipped.
        """
        if not math.isfinite(loss):
            return None
        if len(self._losses) >= MIN_LOSSES:
            median_loss = median(self._losses)
            if median_loss > 0 and loss > self._factor * median_loss:
                return median_loss
        self._losses.append(loss)
        return None


def recent_losses(lines: Iterable[Mapping[str, Any]]) -> list[float]:
    """Returns the losses with which to compare the next loss, oldest first.

    Args:
      lines: Lines of metrics.jsonl, newest first. Only as many lines as needed are consumed.
    """
    losses = (line["loss"] for line in lines if not line.get("is_loss_spike"))
    return list(itertools.islice(filter(math.isfinite, losses), NUM_LOSSES))[::-1]


class RollBacks:
    """Counts roll-backs since the run last passed the step of an earlier spike."""

    def __init__(self):
        self._furthest, self._num = -1, 0

    def add(self, spike: LossSpike) -> None:
        """Counts a roll-back; raises ConfigError after MAX_ROLL_BACKS without progress."""
        if spike.step > self._furthest:
            self._furthest, self._num = spike.step, 0
        self._num += 1
        if self._num > MAX_ROLL_BACKS:
            raise ConfigError(
                f"The run was rolled back {MAX_ROLL_BACKS} times and skipped an additional batch "
                f"each time, but the loss still spikes at or before step {self._furthest}. Lower "
                "the learning rate, clip gradients, raise run.loss_spikes.factor, or set "
                "run.loss_spikes.action=report. To start from an earlier checkpoint, remove the "
                "newest checkpoint."
            )
