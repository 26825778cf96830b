"""Pipeline schedules: which microbatch and repeat each stage processes in each tick.

The functions accept Python ints, NumPy arrays and traced arrays. With one repeat, the schedule is
GPipe (arXiv:1811.06965). With R repeats, a microbatch passes through all stages R times (the
circular schedule of arXiv:2104.04473 and Pax), and the bubbles shrink by a factor of about R.
"""

import dataclasses
from typing import Any, NamedTuple

__all__ = ("Schedule",)

# S stages, M microbatches, R repeats.


class Place(NamedTuple):
    """A stage, and the microbatch and repeat that it processes in a tick; arrays or indices."""

    stage: Any
    microbatch: Any
    repeat: Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The ticks of a pipeline with S stages, M microbatches and R repeats.

    At tick t, stage s processes the microbatch that stage s - 1 processed at tick t - 1. Once all
    microbatches have started a repeat, stage 0 continues with the outputs of the last stage.
    """

    num_stages: int
    num_microbatches: int
    circular_repeat: int = 1

    @property
    def period(self) -> int:
        """Number of ticks from a microbatch's entry into stage 0 to its next entry."""
        # With fewer microbatches than stages, stage 0 waits until the first microbatch returns.
        return max(self.num_microbatches, self.num_stages)

    @property
    def num_ticks(self) -> int:
        """Number of ticks until the last microbatch is done: R M + S - 1 if M >= S or R = 1."""
        last_start = (self.circular_repeat - 1) * self.period + self.num_microbatches - 1
        return last_start + self.num_stages

    @property
    def bubble_share(self) -> float:
        """Fraction of the stages' ticks that are idle.

        (S - 1) / (M + S - 1) for GPipe, (S - 1) / (R M + S - 1) for the circular schedule.
        """
        return 1.0 - self.circular_repeat * self.num_microbatches / self.num_ticks

    @property
    def num_weight_ticks(self) -> int:
        """Number of ticks in a split backward pass that compute weight gradients.

        The first S - 1 backward ticks compute none. If M >= S or R = 1, the number is R M, and no
        stage is idle in these ticks.
        """
        return self.num_ticks - (self.num_stages - 1)

    def split_bubble_share(
        self, forward: float = 1.0, input_grads: float = 1.0, weight_grads: float = 1.0
    ) -> float:
        """Returns the fraction of time in which a stage is idle if the backward pass is split.

        It is (S - 1) (F + I) / ((R M + S - 1) (F + I) + R M W) if M >= S or R = 1, and equals
        `bubble_share` for W = 0.

        Args:
          forward: F, the time of a stage's forward tick, including recomputation.
          input_grads: I, the time of its input gradients.
          weight_grads: W, the time of its weight gradients.
        """
        num_busy, with_bubbles = self.circular_repeat * self.num_microbatches, forward + input_grads
        time = self.num_ticks * with_bubbles + self.num_weight_ticks * weight_grads
        return 1.0 - num_busy * (with_bubbles + weight_grads) / time

    def work(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns (microbatch, repeat, is_valid) for `stage` at `tick`, as ints or arrays.

        For an idle stage, is_valid is False, and microbatch and repeat are arbitrary valid indices.
        """
        since = tick - stage
        repeat, microbatch = since // self.period, since % self.period
        is_valid = (since >= 0) & (repeat < self.circular_repeat)
        is_valid = is_valid & (microbatch < self.num_microbatches)
        repeat = repeat.clip(0, self.circular_repeat - 1)
        return microbatch % self.num_microbatches, repeat, is_valid


@dataclasses.dataclass(frozen=True)
class InterleavedSchedule:
    """The ticks of interleaved 1F1B (arXiv:2104.04473) with S stages, M microbatches, R repeats.

    A tick has up to three parts: the forward pass of one microbatch, the input gradients of a
    second, and the weight gradients of a third. All stages run the same parts in a tick. With
    several repeats, microbatches circulate in groups of S. Stages are idle for a fraction of
    (S - 1) / (R M + S - 1) of the time if M is divisible by S. With split_backward, no stage is
    idle while weight gradients are computed.

    Forward passes on a stage are numbered by slots; a slot is one repeat of one microbatch.
    Backward passes start with the last repeat.

    Attributes:
      num_stages: S.
      num_microbatches: M.
      circular_repeat: R.
      split_backward: Whether stage s computes weight gradients s ticks after input gradients.
    """

    num_stages: int
    num_microbatches: int
    circular_repeat: int = 1
    split_backward: bool = False

    @property
    def num_slots(self) -> int:
        """Number of slots: R M, plus idle slots if R > 1 and M is not a multiple of S."""
        if self.circular_repeat == 1:
            return self.num_microbatches
        group = self.num_stages * self.circular_repeat
        return -(-self.num_microbatches // self.num_stages) * group

    @property
    def num_ticks(self) -> int:
        """Number of ticks with forward passes; equal to the number with backward passes."""
        return self.num_slots + self.num_stages - 1

    @property
    def first_backward(self) -> int:
        """Tick of the first backward pass, in which a microbatch first leaves the last stage."""
        return self.circular_repeat * self.num_stages - 1

    @property
    def first_weights(self) -> int:
        """The first tick that computes weight gradients."""
        return self.first_backward + (self.num_stages - 1 if self.split_backward else 0)

    @property
    def num_saved_inputs(self) -> int:
        """Number of inputs that a stage stores: at most 2 R S - 1, regardless of M."""
        total_ticks = self.first_backward + self.num_ticks
        return min(2 * self.circular_repeat * self.num_stages - 1, total_ticks)

    @property
    def num_residuals(self) -> int:
        """Number of ticks whose residuals a stage stores for the weight gradients."""
        return self.num_stages if self.split_backward else 1

    @property
    def phases(self) -> list[tuple[range, bool, bool, bool]]:
        """Ranges of ticks, each with (has forward passes, input gradients, weight gradients)."""
        begins, end = self.first_backward, self.first_backward + self.num_ticks
        bounds = sorted({0, begins, min(self.first_weights, end), self.num_ticks, end})
        return [
            (range(a, b), a < self.num_ticks, a >= begins, a >= self.first_weights)
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]

    def forward(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns (microbatch, repeat, is_valid) for a stage's forward pass; see Schedule.work."""
        return self._at(tick - stage)

    def backward(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns (microbatch, repeat, is_valid) for a stage's input gradients."""
        microbatch, repeat, is_valid = self._at(self._slot_backward(tick, stage))
        return microbatch, self.circular_repeat - 1 - repeat, is_valid

    def weights(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns (microbatch, repeat, is_valid) for a stage's weight gradients.

        With split_backward, the three values are scalars, because all stages process the same
        microbatch.
        """
        if not self.split_backward:
            return self.backward(tick, stage)
        return self.backward(tick - (self.num_stages - 1), self.num_stages - 1)

    def tick_forward(self, tick: Any, stage: Any) -> Any:
        """Returns the tick of the forward pass whose backward pass a stage runs in `tick`."""
        slot = self._slot_backward(tick, stage)
        _, repeat, _ = self._at(slot)  # Counted from the last repeat.
        forward_slot = slot + (self.circular_repeat - 1 - 2 * repeat) * self.num_stages
        return forward_slot + stage

    def _slot_backward(self, tick: Any, stage: Any) -> Any:
        return tick - self.first_backward - (self.num_stages - 1 - stage)

    def _at(self, slot: Any) -> tuple[Any, Any, Any]:
        is_valid = (slot >= 0) & (slot < self.num_slots)
        slot = slot.clip(0, self.num_slots - 1)
        if self.circular_repeat == 1:
            return slot, 0 * slot, is_valid
        # S microbatches at a time run through all repeats.
        group, rest = slot // (self.num_stages * self.circular_repeat), slot % self.num_stages
        repeat = slot // self.num_stages % self.circular_repeat
        microbatch = group * self.num_stages + rest
        is_valid = is_valid & (microbatch < self.num_microbatches)
        return microbatch.clip(0, self.num_microbatches - 1), repeat, is_valid
