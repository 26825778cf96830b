"""Which microbatch and which of its layers each stage of a pipeline works on at each tick.

Pure arithmetic on Python ints, NumPy or traced arrays. GPipe (arXiv:1811.06965) is the schedule of
one repeat; with more, a microbatch goes round all stages once per repeat (the circular schedule of
arXiv:2104.04473 and of Pax), which divides the bubbles' share by about the repeats.
"""

import dataclasses
from typing import Any

# S stages, M microbatches, R repeats.


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The ticks of a pipeline.

    At tick t, stage s continues what stage s - 1 did at tick t - 1, stage 0 what came out of the
    last stage, once all microbatches have begun their repeat. Attributes are S, M and R.
    """

    num_stages: int
    num_microbatches: int
    circular_repeat: int = 1

    @property
    def period(self) -> int:
        """Ticks from a microbatch's entry into stage 0 to its next entry there."""
        # With fewer microbatches than stages stage 0 waits for the first to come round.
        return max(self.num_microbatches, self.num_stages)

    @property
    def num_ticks(self) -> int:
        """Ticks until the last microbatch is through: R M + S - 1 where M >= S or R = 1."""
        last_start = (self.circular_repeat - 1) * self.period + self.num_microbatches - 1
        return last_start + self.num_stages

    @property
    def bubble_share(self) -> float:
        """The share of the stages' ticks that are idle.

        (S - 1) / (M + S - 1) of GPipe, (S - 1) / (R M + S - 1) of the circular schedule.
        """
        return 1.0 - self.circular_repeat * self.num_microbatches / self.num_ticks

    @property
    def num_weight_ticks(self) -> int:
        """Backward ticks of a split backward pass in which gradients of weights are made too.

        Those before, S - 1, have none. R M where M >= S or R = 1: no stage is idle in them.
        """
        return self.num_ticks - (self.num_stages - 1)

    def split_bubble_share(
        self, forward: float = 1.0, by_inputs: float = 1.0, by_weights: float = 1.0
    ) -> float:
        """The share of a step's time in which a stage is idle if the backward pass is split.

        (S - 1) (F + I) / ((R M + S - 1) (F + I) + R M W) where M >= S or R = 1; as `bubble_share`
        with W = 0.

        Args:
          forward: F, the time of a stage's forward tick, what is computed again included.
          by_inputs: I, that of the gradient of its inputs.
          by_weights: W, that of the gradients of its weights.
        """
        num_busy, with_bubbles = self.circular_repeat * self.num_microbatches, forward + by_inputs
        time = self.num_ticks * with_bubbles + self.num_weight_ticks * by_weights
        return 1.0 - num_busy * (with_bubbles + by_weights) / time

    def work(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns (microbatch, repeat, is_valid) of `stage` at `tick`, ints or arrays of them.

        For an idle stage is_valid is False, and microbatch and repeat are still within range.
        """
        since = tick - stage
        repeat, microbatch = since // self.period, since % self.period
        is_valid = (since >= 0) & (repeat < self.circular_repeat)
        is_valid = is_valid & (microbatch < self.num_microbatches)
        repeat = repeat.clip(0, self.circular_repeat - 1)
        return microbatch % self.num_microbatches, repeat, is_valid
