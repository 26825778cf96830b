"""The progress of a run: a live line on a terminal, a few complete lines anywhere else."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from typing import Any, TextIO

from praxis_lite.trainer.metrics.rates import Rates, count_of
from praxis_lite.trainer.metrics.step_times import HFU, MFU

__all__ = ("count_of", "metric_text")

_REDRAW_SECONDS = 0.2  # Five redraws a second: smooth to the eye, free to the loop.
LINES_PER_RUN = 20  # Where nobody watches.
# A terminal that is too narrow for all of the line lacks these first.
_LEAVES_OUT = ("hfu", "steps", "input", "mfu", "tokens", "loss")


class ProgressLine(contextlib.AbstractContextManager):
    """Shows step, loss, speed and time left as a run goes.

    On a terminal (`isatty()`) a single line is redrawn in place, at most five times a second; of a
    line that is too long the less important numbers are left out. Elsewhere a whole line is printed
    every `log_every_steps` and at the last step.

    Args:
      num_steps: the run's last step.
      log_every_steps: at least 1. None: about 20 lines for the run, however long.
      first_step: the step that this process starts from: 0, or the one it restored.
      clock: seconds that never go back.
    """

    def __init__(self, num_steps: int, stream: TextIO, log_every_steps: int | None, first_step: int,
                 *, clock: Callable[[], float] = time.monotonic):
        self._num_steps = num_steps
        self._stream = stream
        self._is_live = stream.isatty()
        if log_every_steps is None:
            log_every_steps = max(1, math.ceil((num_steps - first_step) / LINES_PER_RUN))
        self._every = log_every_steps
        self._clock = clock
        self._next_redraw = -math.inf
        self._newest: tuple[int, Any, Rates | None, bool] | None = None  # As of `update`,
        self._is_shown = True  # and whether the output has it.
        self._drawn_width = 0  # Columns of the live line on the screen.
        self._is_closed = False

    def update(
        self, step: int, loss: Any = None, rates: Rates | None = None, *, has_tokens: bool = False
    ) -> None:
        """Takes the newest state and shows it if its turn has come.

        Args:
          loss: None: left out.
          rates: with the step added.
          has_tokens: the rates count tokens, and not examples.
        """
        self._newest, self._is_shown = (step, loss, rates, has_tokens), False
        is_last = step >= self._num_steps
        if self._is_live:
            now = self._clock()
            if is_last or now >= self._next_redraw:
                self._next_redraw = now + _REDRAW_SECONDS
                self._draw()
        elif is_last or step % self._every == 0:
            self._print_whole()

    def note(self, message: str) -> None:
        """Prints `message` as whole lines; the live line moves below it."""
        if self._drawn_width:
            self._stream.write("\r" + " " * self._drawn_width + "\r")
            self._drawn_width = 0
        self._stream.write(message + "\n")
        if self._is_live and self._newest and not self._is_closed:
            self._draw()
        self._stream.flush()

    def close(self) -> None:
        """Leaves the last state as a complete line; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_live and self._newest:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()
            self._drawn_width = 0
        elif not self._is_shown:
            self._print_whole()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _described(
        self, step: int, loss: Any, rates: Rates | None, has_tokens: bool
    ) -> dict[str, str]:
        width = len(str(self._num_steps))
        parts = {"step": f"step {step:{width}d}/{self._num_steps}"}
        if loss is not None:
            parts["loss"] = f"loss {metric_text(float(loss))}"
        if rates is None or rates.step_seconds is None:
            return parts
        parts["steps"] = f"{count_of(1 / rates.step_seconds)} steps/s"
        if has_tokens:
            parts["tokens"] = f"{count_of(rates.per_second_and_device)} tokens/s/device"
        for name in (MFU, HFU):
            if (share := rates.utilization(name)) is not None:
                parts[name] = f"{name.upper()} {share:.1%}"
        parts["input"] = f"waits for input {100 * rates.input_share:.2g}%"
        if step < self._num_steps:
            parts["left"] = f"{_duration(rates.seconds_left())} left"
        return parts

    def _text(self, width: float = math.inf) -> str:
        """Returns the newest state as a line of at most `width` columns."""
        parts = self._described(*self._newest)
        for name in _LEAVES_OUT:
            if len("  ".join(parts.values())) <= width:
                break
            parts.pop(name, None)
        text = "  ".join(parts.values())
        return text if len(text) <= width else text[:int(width)]

    def _draw(self) -> None:
        # A line as wide as the terminal wraps, and '\r' would come back to its second half.
        text = self._text(max(1, shutil.get_terminal_size().columns - 1))
        # Every terminal knows blanks: they, not an escape code, cover what a longer line left.
        self._stream.write("\r" + text.ljust(self._drawn_width))
        self._stream.flush()
        self._drawn_width = len(text)
        self._is_shown = True

    def _print_whole(self) -> None:
        self._stream.write(self._text() + "\n")
        self._stream.flush()
        self._is_shown = True


def metric_text(value: float) -> str:
    """Returns a loss or a metric: 2.3456, and 5.5874e+23 where digits would say nothing."""
    return f"{value:.4f}" if abs(value) < 1e6 or not math.isfinite(value) else f"{value:.4e}"


def _duration(seconds: float) -> str:
    """Returns 42s, 3m05s or 2h07m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
