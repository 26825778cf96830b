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


@dataclasses.dataclass(frozen=True)
class InterleavedSchedule:
    """The ticks of interleaved 1F1B (arXiv:2104.04473), in which all stages do the same in a tick.

    A tick has up to three parts: the forward pass of one microbatch, the gradient of the inputs of
    another, the gradients of the weights of a third. With several repeats microbatches go round in
    groups of S. A stage's places are numbered in its order: a repeat of a microbatch each, backward
    from the last repeat on. Attributes are S, M, R.
    """

    num_stages: int
    num_microbatches: int
    circular_repeat: int = 1
    split_backward: bool = False  # Stage s makes gradients of weights s ticks after its inputs'.

    @property
    def num_places(self) -> int:
        """R M, where S divides M or R is 1; else the last group has idle places."""
        if self.circular_repeat == 1:
            return self.num_microbatches
        group = self.num_stages * self.circular_repeat
        return -(-self.num_microbatches // self.num_stages) * group

    @property
    def num_ticks(self) -> int:
        """Ticks in which a stage works forward, and as many backward."""
        return self.num_places + self.num_stages - 1

    @property
    def first_backward(self) -> int:
        """The tick in which the last stage begins backward: that of its first result."""
        return self.circular_repeat * self.num_stages - 1

    @property
    def first_weights(self) -> int:
        """The tick from which on gradients of weights are made."""
        return self.first_backward + (self.num_stages - 1 if self.split_backward else 0)

    @property
    def num_kept(self) -> int:
        """Inputs that a stage keeps: of the microbatches on their way, 2 R S - 1 whatever M is."""
        in_all = self.first_backward + self.num_ticks
        return min(2 * self.circular_repeat * self.num_stages - 1, in_all)

    @property
    def num_residuals(self) -> int:
        """Ticks of which a stage keeps what gradients of weights are made of."""
        return self.num_stages if self.split_backward else 1

    @property
    def phases(self) -> list[tuple[range, bool, bool, bool]]:
        """Runs of ticks, each with three bools: forward, gradients of inputs, and of weights."""
        begins, end = self.first_backward, self.first_backward + self.num_ticks
        bounds = sorted({0, begins, min(self.first_weights, end), self.num_ticks, end})
        return [
            (range(a, b), a < self.num_ticks, a >= begins, a >= self.first_weights)
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]

    def bubble_share(
        self, forward: float = 1.0, by_inputs: float = 2.0, by_weights: float = 1.0
    ) -> float:
        """The share of a step's time in which a stage is idle, by the phases' ticks.

        (S - 1) / (R M + S - 1) where S divides M; with split_backward the gradients of weights
        have no bubbles.

        Args:
          forward: F, the time of a stage's forward tick.
          by_inputs: that of the gradient of its inputs, with the F computed again.
          by_weights: that of the gradients of its weights.
        """
        times = forward, by_inputs, by_weights
        time = sum(
            len(ticks) * sum(t for t, is_done in zip(times, parts, strict=True) if is_done)
            for ticks, *parts in self.phases
        )
        return 1.0 - self.circular_repeat * self.num_microbatches * sum(times) / time

    def forward(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns (microbatch, repeat, is_valid) of a stage's forward pass, as Schedule.work."""
        return self._at(tick - stage)

    def backward(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns (microbatch, repeat, is_valid) of its gradient of inputs."""
        microbatch, repeat, is_valid = self._at(self._place_backward(tick, stage))
        return microbatch, self.circular_repeat - 1 - repeat, is_valid

    def weights(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Returns (microbatch, repeat, is_valid) of its gradients of weights.

        With split_backward they are the same of all stages: those of one, and not arrays.
        """
        if not self.split_backward:
            return self.backward(tick, stage)
        return self.backward(tick - (self.num_stages - 1), self.num_stages - 1)

    def tick_forward(self, tick: Any, stage: Any) -> Any:
        """Returns the tick in which the stage did forward what it does backward now."""
        place = self._place_backward(tick, stage)
        _, repeat, _ = self._at(place)  # Counted from the last.
        there = place + (self.circular_repeat - 1 - 2 * repeat) * self.num_stages
        return there + stage

    def _place_backward(self, tick: Any, stage: Any) -> Any:
        return tick - self.first_backward - (self.num_stages - 1 - stage)

    def _at(self, place: Any) -> tuple[Any, Any, Any]:
        is_valid = (place >= 0) & (place < self.num_places)
        place = place.clip(0, self.num_places - 1)
        if self.circular_repeat == 1:
            return place, 0 * place, is_valid
        group, rest = place // (self.num_stages * self.circular_repeat), place % self.num_stages
        repeat = place // self.num_stages % self.circular_repeat
        microbatch = group * self.num_stages + rest
        is_valid = is_valid & (microbatch < self.num_microbatches)
        return microbatch.clip(0, self.num_microbatches - 1), repeat, is_valid
