"""Which losses are spikes, and how often a run goes back to before one."""

import collections
import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from praxis_lite.errors import ConfigError

NUM_LOSSES = 100  # Those that a loss is compared with,
MIN_LOSSES = 10  # and before there are as many none is a spike.
MAX_ROLL_BACKS = 5


class LossSpike(Exception):
    """Ends a run that is to go on from before a spike, without the batch that made it.

    Attributes:
      step: the step of the spike.
      batch: the index of its batch.
    """

    def __init__(self, step: int, batch: int):
        super().__init__(f"the loss of step {step} is a spike")
        self.step, self.batch = step, batch


class SpikeDetector:
    """Compares each loss with the median of the last ones that were no spikes.

    Nothing but the losses decides, which are the same bits in every process and in a run that was
    resumed: all of them find the same spikes.

    Args:
      factor: a loss above this many times the median is a spike; None: none is. Where the median
        is not above 0 (a log-likelihood, say) none is either: no factor means anything there.
      before: the losses of the steps before, as `losses_of` returns them.
    """

    def __init__(self, factor: float | None, before: Iterable[float] = ()):
        self._factor = factor
        self._losses = collections.deque(before, maxlen=NUM_LOSSES)

    def median_below(self, loss: float) -> float | None:
        """Returns the median that `loss` is a spike above; None: it is none, and is kept.

        What is not finite is neither: such a step is skipped.
        """
        if self._factor is None or not math.isfinite(loss):
            return None
        if len(self._losses) >= MIN_LOSSES:
            middle = median(self._losses)
            if middle > 0 and loss > self._factor * middle:
                return middle
        self._losses.append(loss)
        return None


def losses_of(lines: Iterable[Mapping[str, Any]]) -> list[float]:
    """Returns the losses that the next one is compared with.

    Args:
      lines: of metrics.jsonl, in which `is_loss_spike` marks spikes.
    """
    losses = (line["loss"] for line in lines if not line.get("is_loss_spike"))
    return [loss for loss in losses if math.isfinite(loss)][-NUM_LOSSES:]


class RollBacks:
    """Counts how often a run went back without getting beyond a step."""

    def __init__(self):
        self._furthest, self._num = -1, 0

    def add(self, spike: LossSpike) -> None:
        """Takes note of one more.

        Raises:
          ConfigError: MAX_ROLL_BACKS did not help.
        """
        if spike.step > self._furthest:
            self._furthest, self._num = spike.step, 0
        self._num += 1
        if self._num > MAX_ROLL_BACKS:
            raise ConfigError(
                f"The run was rolled back {MAX_ROLL_BACKS} times, leaving out another batch each "
                f"time, and has not got beyond step {self._furthest} without a loss spike: the "
                "batches are not what makes it. Lower the learning rate or clip gradients, raise "
                "run.loss_spike_factor, or take run.on_loss_spike=report. To begin before the "
                "newest checkpoint, remove it."
            )
