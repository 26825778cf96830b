"""Computes the current speed and the remaining time for the progress line."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from praxis_lite.trainer.metrics.step_times import (
    HFU,
    INPUT_TIME,
    MFU,
    STEP_TIME,
)

_WINDOW_STEPS = 50  # Speeds are means over this many steps.


@dataclasses.dataclass(frozen=True)
class Pause:
    """The schedule of an operation that interrupts the steps, such as an evaluation or a save.

    A pause always follows the last step.

    Attributes:
      every_steps: A pause follows every multiple of this number of steps. If None, pauses do not
        depend on the number of steps.
      every_seconds: Seconds between two pauses. If None, pauses do not depend on time.
    """

    every_steps: int | None = None
    every_seconds: float | None = None

    def num_left(self, step: int, num_steps: int, seconds: float) -> float:
        """Returns the number of remaining pauses.

        Args:
          step: The newest step; its pause, if any, is included in the result.
          num_steps: Last step of the job.
          seconds: Estimated duration of the remaining steps.
        """
        count = 0.0
        if self.every_steps is not None:
            count = (num_steps - 1) // self.every_steps - (step - 1) // self.every_steps
        if self.every_seconds:
            count = max(count, seconds / self.every_seconds)
        # Add the pause after the last step.
        return max(0.0, count) + 1


class Rates:
    """Computes mean rates over the last 50 steps, and the remaining time.

    The first step of a launch is excluded, because it includes one-time costs. The remaining time
    consists of the remaining steps at this rate, and the remaining evaluations and saves at their
    mean duration in this launch. Evaluations are included once this launch has run its first
    evaluation, and saves once it has completed its first save.

    Args:
      num_steps: Last step of the job.
      num_devices: Number of devices in the mesh.
      pauses: Schedules of evaluations and saves, keyed by the name of the corresponding time in
        metrics.jsonl.
    """

    def __init__(self, num_steps: int, num_devices: int, pauses: Mapping[str, Pause]):
        self._num_steps, self._num_devices, self._pauses = num_steps, num_devices, pauses
        self._lines = collections.deque[Mapping[str, float]](maxlen=_WINDOW_STEPS)
        self._paused = {name: (0.0, 0) for name in pauses}
        self._step, self._num_added = 0, 0
        self._weight = self._seconds = self._input_seconds = self._hook_seconds = 0.0

    def add(self, line: Mapping[str, Any], weight: float, loop_seconds: float) -> None:
        """Adds a step.

        Args:
          line: The step's line of metrics.jsonl, with its times.
          weight: Number of tokens or examples in the step's batch.
          loop_seconds: Seconds spent in the loop so far, excluding evaluations, saves and
            compilation.
        """
        for name, (seconds, count) in self._paused.items():
            if line[name] > 0:
                self._paused[name] = seconds + line[name], count + 1
        self._step, self._num_added = line["step"], self._num_added + 1
        if self._num_added == 1:
            self._began = loop_seconds
            return
        values = {
            name: float(line[name]) for name in (STEP_TIME, INPUT_TIME, MFU, HFU) if name in line
        }
        self._lines.append(values | {"weight": weight})
        self._weight += weight
        self._seconds += line[STEP_TIME]
        self._input_seconds += line[INPUT_TIME]
        # The rest of the loop's time was spent in hooks that wait.
        self._hook_seconds = max(0.0, loop_seconds - self._began - self._seconds)

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds per step, or None before the second step."""
        seconds = self._sum(STEP_TIME)
        return seconds / len(self._lines) if seconds > 0 else None

    @property
    def per_second_and_device(self) -> float:
        """Tokens or examples per second per device."""
        return self._sum("weight") / self._sum(STEP_TIME) / self._num_devices

    @property
    def input_share(self) -> float:
        """Fraction of the step time during which the loop waited for batches."""
        return self._sum(INPUT_TIME) / self._sum(STEP_TIME)

    def utilization(self, name: str) -> float | None:
        """Returns the mean MFU or HFU, weighted by step time, or None if unknown."""
        if not self._lines or not all(name in line for line in self._lines):
            return None
        weighted_sum = sum(line[name] * line[STEP_TIME] for line in self._lines)
        return weighted_sum / self._sum(STEP_TIME)

    def seconds_left(self) -> float | None:
        """Returns the estimated seconds until the job ends, or None before the second step."""
        if (each := self.step_seconds) is None:
            return None
        steps = self._num_steps - self._step
        # Assume that the time per step spent in hooks that wait does not change.
        seconds = steps * (each + self._hook_seconds / (self._num_added - 1))
        for name, (paused, count) in self._paused.items():
            if count:
                left = self._pauses[name].num_left(self._step, self._num_steps, seconds)
                seconds += paused / count * left
        return seconds

    def input_summary(self, unit: str) -> str | None:
        """Returns a line about the time spent waiting for input, or None if there was no wait."""
        if not (self._input_seconds and self._seconds):
            return None
        return (
            f"waiting for input took {100 * self._input_seconds / self._seconds:.2g}% of the step "
            f"time; the input pipeline could provide up to "
            f"{count_of(self._weight / self._input_seconds)} {unit}/s"
        )

    def _sum(self, name: str) -> float:
        return sum(line[name] for line in self._lines)


def count_of(number: float) -> str:
    """Formats a number with about three digits: "0.42", "12.3", "4,120", "25.2k", "1.3M"."""
    if not math.isfinite(number):
        return str(number)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.1f}{unit}"
    # Numbers of 99.95 or more round to 100, so they are written without decimals.
    digits = ",.0f" if number >= 99.95 else ".1f" if number >= 1 else ".2g"
    return format(number, digits)
