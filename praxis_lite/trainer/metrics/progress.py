"""Shows a run's progress as a live line on a terminal, or as occasional lines elsewhere."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from typing import Any, TextIO

from praxis_lite.trainer.metrics.rates import Rates, count_of
from praxis_lite.trainer.metrics.step_times import HFU, MFU

__all__ = ("count_of", "metric_text")

_REDRAW_SECONDS = 0.2  # Looks smooth, and does not measurably slow down the loop.
LINES_PER_RUN = 20  # Number of lines if the output is not a terminal.
# The parts that are omitted on a narrow terminal, least important first.
_DROP_ORDER = ("hfu", "steps", "input", "mfu", "tokens", "loss")


class ProgressLine(contextlib.AbstractContextManager):
    """Shows a run's step, loss, speed and remaining time.

    On a terminal (`isatty()`), one line is redrawn in place at most five times a second. Less
    important numbers are omitted if the terminal is narrow. Otherwise, a line is printed every
    `log_every_steps` and at the last step.

    Args:
      num_steps: Last step of the run.
      stream: Stream to print to.
      log_every_steps: Number of steps between printed lines, at least 1. If None, about 20 lines
        are printed in total.
      first_step: Number of steps completed before this launch: 0, or the restored step.
      clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        num_steps: int,
        stream: TextIO,
        log_every_steps: int | None,
        first_step: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_steps = num_steps
        self._stream = stream
        self._is_live = stream.isatty()
        if log_every_steps is None:
            log_every_steps = max(1, math.ceil((num_steps - first_step) / LINES_PER_RUN))
        self._every = log_every_steps
        self._clock = clock
        self._next_redraw = -math.inf
        self._newest: tuple[int, Any, Rates | None, bool] | None = None  # Arguments of `update`.
        self._is_shown = True  # Whether the output shows `_newest`.
        self._drawn_width = 0  # Width of the live line on the screen, in columns.
        self._is_closed = False

    def update(
        self, step: int, loss: Any = None, rates: Rates | None = None, *, has_tokens: bool = False
    ) -> None:
        """Sets the newest state, and shows it if a redraw or a line is due.

        Args:
          step: The newest step.
          loss: The loss of the step, or None to omit it.
          rates: The rates over the last steps, including this step.
          has_tokens: Whether `rates` counts tokens instead of examples.
        """
        self._newest, self._is_shown = (step, loss, rates, has_tokens), False
        is_last = step >= self._num_steps
        if self._is_live:
            now = self._clock()
            if is_last or now >= self._next_redraw:
                self._next_redraw = now + _REDRAW_SECONDS
                self._draw()
        elif is_last or step % self._every == 0:
            self._print_line()

    def note(self, message: str) -> None:
        """Prints a message above the live line."""
        if self._drawn_width:
            self._stream.write("\r" + " " * self._drawn_width + "\r")
            self._drawn_width = 0
        self._stream.write(message + "\n")
        if self._is_live and self._newest and not self._is_closed:
            self._draw()
        self._stream.flush()

    def close(self) -> None:
        """Prints the final state as a complete line. Later calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_live and self._newest:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()
            self._drawn_width = 0
        elif not self._is_shown:
            self._print_line()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _parts(self, step: int, loss: Any, rates: Rates | None, has_tokens: bool) -> dict[str, str]:
        """Returns the parts of the line, keyed by name."""
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
        seconds_left = rates.seconds_left()
        if step < self._num_steps and seconds_left is not None:
            parts["left"] = f"{_duration(seconds_left)} left"
        return parts

    def _text(self, width: float = math.inf) -> str:
        """Formats the newest state as a line of at most `width` columns."""
        assert self._newest is not None
        parts = self._parts(*self._newest)
        for name in _DROP_ORDER:
            if len("  ".join(parts.values())) <= width:
                break
            parts.pop(name, None)
        text = "  ".join(parts.values())
        return text if len(text) <= width else text[: int(width)]

    def _draw(self) -> None:
        # A line of the terminal's full width would wrap, and '\r' would return to its second half.
        text = self._text(max(1, shutil.get_terminal_size().columns - 1))
        # Overwrite the rest of a longer line with spaces, which work on every terminal.
        self._stream.write("\r" + text.ljust(self._drawn_width))
        self._stream.flush()
        self._drawn_width = len(text)
        self._is_shown = True

    def _print_line(self) -> None:
        self._stream.write(self._text() + "\n")
        self._stream.flush()
        self._is_shown = True


def metric_text(value: float) -> str:
    """Formats a loss or a metric as "2.3456", or as "5.5874e+23" if it is 1e6 or more."""
    return f"{value:.4f}" if abs(value) < 1e6 or not math.isfinite(value) else f"{value:.4e}"


def _duration(seconds: float) -> str:
    """Formats a duration as "42s", "3m05s" or "2h07m"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
