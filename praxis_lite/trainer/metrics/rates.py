"""The speed of the last steps, and the time that is left: the numbers of a line of progress."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from praxis_lite.trainer.metrics.step_times import (
    EVALUATION_TIME,
    HFU,
    INPUT_TIME,
    MFU,
    SAVE_TIME,
    STEP_TIME,
)

_SPEED_STEPS = 50  # Speeds are means of this many steps: steady, yet up to date.


@dataclasses.dataclass(frozen=True)
class Pause:
    """A pause of the steps, now and then and after the last step: evaluations, or saves.

    Attributes:
      every_steps: it comes after each step that this divides; None: not by steps.
      every_seconds: seconds between two pauses; None: not by time.
    """

    every_steps: int | None = None
    every_seconds: float | None = None

    def num_left(self, step: int, num_steps: int, seconds: float) -> float:
        """Returns how often it is still to come, after `step` or later, in `seconds` of steps."""
        count = 0.0
        if self.every_steps is not None:
            count = (num_steps - 1) // self.every_steps - (step - 1) // self.every_steps
        if self.every_seconds:
            count = max(count, seconds / self.every_seconds)
        return max(0.0, count) + 1


class Rates:
    """Means of the last 50 steps, without the first of a launch, which pays for its start.

    The time left is that of the steps to come at this speed, and of as many evaluations and saves
    as are to come, each as long as those of this launch on average; none is known before the first.

    Args:
      num_steps: the job's last step.
      num_devices: of the mesh.
      pauses: evaluations and saves by their columns of metrics.jsonl.
    """

    def __init__(
        self, num_steps: int, num_devices: int = 1, pauses: Mapping[str, Pause] | None = None
    ):
        self._num_steps, self._num_devices = num_steps, num_devices
        self._pauses = {EVALUATION_TIME: Pause(), SAVE_TIME: Pause()} | dict(pauses or {})
        self._lines = collections.deque[Mapping[str, float]](maxlen=_SPEED_STEPS)
        self._paused = {name: (0.0, 0) for name in self._pauses}
        self._step, self._num_added = 0, 0
        self._weight = self._seconds = self._input_seconds = self._hook_seconds = 0.0

    def add(self, line: Mapping[str, Any], weight: float, loop_seconds: float) -> None:
        """Takes the newest line of metrics.jsonl.

        Args:
          line: with the times of the step.
          weight: how many tokens or examples it had.
          loop_seconds: of the loop, so far, without evaluations, saves and compiling.
        """
        for name, (seconds, count) in self._paused.items():
            if line[name] > 0:
                self._paused[name] = seconds + line[name], count + 1
        self._step, self._num_added = line["step"], self._num_added + 1
        if self._num_added == 1:
            self._began = loop_seconds
            return
        kept = {name: float(line[name]) for name in (STEP_TIME, INPUT_TIME, MFU, HFU)
                if name in line}
        self._lines.append(kept | {"weight": weight})
        self._weight += weight
        self._seconds += line[STEP_TIME]
        self._input_seconds += line[INPUT_TIME]
        self._hook_seconds = max(0.0, loop_seconds - self._began - self._seconds)

    @property
    def step_seconds(self) -> float | None:
        """The seconds of a step, or None if none was made after the first."""
        seconds = self._sum(STEP_TIME)
        return seconds / len(self._lines) if seconds > 0 else None

    @property
    def per_second_and_device(self) -> float:
        """Tokens, or examples, that a device learns from in a second."""
        return self._sum("weight") / self._sum(STEP_TIME) / self._num_devices

    @property
    def input_share(self) -> float:
        """The share of the steps' time in which the loop waited for a batch."""
        return self._sum(INPUT_TIME) / self._sum(STEP_TIME)

    def utilization(self, name: str) -> float | None:
        """Returns the mean of MFU or HFU over the time of the steps; None if it is not known."""
        if not self._lines or not all(name in line for line in self._lines):
            return None
        weighed = sum(line[name] * line[STEP_TIME] for line in self._lines)
        return weighed / self._sum(STEP_TIME)

    def seconds_left(self) -> float | None:
        """Returns the seconds to the end of the job, or None if no speed is known."""
        if (each := self.step_seconds) is None:
            return None
        steps = self._num_steps - self._step
        # Hooks that wait come as often as they came.
        seconds = steps * (each + self._hook_seconds / (self._num_added - 1))
        for name, (paused, count) in self._paused.items():
            if count:
                left = self._pauses[name].num_left(self._step, self._num_steps, seconds)
                seconds += paused / count * left
        return seconds

    def words_on_input(self, unit: str) -> str | None:
        """Returns a line on the input of all steps but the first, or None if it took no time."""
        if not (self._input_seconds and self._seconds):
            return None
        return (
            f"waiting for input took {100 * self._input_seconds / self._seconds:.2g}% of the "
            f"steps' time; the input alone could feed "
            f"{count_of(self._weight / self._input_seconds)} {unit}/s"
        )

    def _sum(self, name: str) -> float:
        return sum(line[name] for line in self._lines)


def count_of(number: float) -> str:
    """Returns three digits or so: 0.42, 12.3, 4,120, 25.2k, 1.3M."""
    if not math.isfinite(number):
        return str(number)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.1f}{unit}"
    # 99.95 and 99.9999 are 100 too, and so are written alike.
    digits = ",.0f" if number >= 99.95 else ".1f" if number >= 1 else ".2g"
    return format(number, digits)
