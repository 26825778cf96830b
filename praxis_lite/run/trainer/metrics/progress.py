"""The progress of a run: a live line on a terminal, a few whole lines anywhere else."""

import collections
import contextlib
import math
import shutil
import time
from collections.abc import Callable
from typing import Any, TextIO

_REDRAW_SECONDS = 0.2  # Five redraws a second: smooth to the eye, free to the loop.
LINES_PER_RUN = 20  # Where nobody watches.
_SPEED_STEPS = 50  # Speed and time left are of this many steps: steady, yet up to date.


class ProgressLine(contextlib.AbstractContextManager):
    """Shows step, loss, speed and time left as a run goes.

    On a terminal (`isatty()`) one line is redrawn in place, at most five times a second. Elsewhere
    a whole line is printed every `log_every_steps` and at the last step.

    Args:
      num_steps: the run's last step.
      log_every_steps: at least 1. None: about 20 lines for the run, whatever its length.
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
        # (seconds, tokens, seconds waited for input) of each of the last steps but the first.
        self._steps = collections.deque[tuple[float, float, float]](maxlen=_SPEED_STEPS)
        self._first: tuple[int, float] | None = None  # Its number, and when it ended.
        self._step_seconds = 0.0  # Of all steps after the first.
        self._next_redraw = -math.inf
        self._text = ""  # The newest state,
        self._is_shown = True  # and whether the output has it.
        self._drawn_width = 0  # Columns of the live line on the screen.
        self._is_closed = False

    def update(
        self, step: int, *, step_time: float, loss: Any = None, num_tokens: Any = None,
        input_time: float | None = None,
    ) -> None:
        """Takes the newest state and shows it if its turn has come.

        The first step counts for nothing, for it waits for the compiler. Evaluations and saves,
        which pass between two calls, count for the time left and not for the speed.

        Args:
          step_time: seconds of the step, without what passed since the step before.
          loss: None: left out.
          num_tokens: of the step; None: the speed in tokens is left out.
          input_time: seconds that the step waited for its batch; None: their share is left out.
        """
        now = self._clock()
        if self._first is None:
            self._first = step, now
        else:
            self._step_seconds += step_time
            self._steps.append((step_time, float(num_tokens or 0.0), input_time or 0.0))
        # Formatting waits for nothing on the device: the caller's values are on the host.
        self._text = self._describe(
            step, now, loss, has_tokens=num_tokens is not None, has_input=input_time is not None
        )
        self._is_shown = False
        is_last = step >= self._num_steps
        if self._is_live:
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
        if self._is_live and self._text and not self._is_closed:
            self._draw()
        self._stream.flush()

    def close(self) -> None:
        """Leaves the last state standing as a whole line; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_live and self._text:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()
            self._drawn_width = 0
        elif not self._is_shown:
            self._print_whole()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _describe(
        self, step: int, now: float, loss: Any, *, has_tokens: bool, has_input: bool
    ) -> str:
        width = len(str(self._num_steps))
        parts = [f"step {step:{width}d}/{self._num_steps}"]
        if loss is not None:
            parts.append(f"loss {metric_text(float(loss))}")
        seconds, tokens, input_time = (sum(item[i] for item in self._steps) for i in range(3))
        if seconds > 0:
            parts.append(f"{count_of(len(self._steps) / seconds)} steps/s")
            if has_tokens:
                parts.append(f"{count_of(tokens / seconds)} tokens/s")
            if has_input:
                parts.append(f"waits for input {100 * input_time / seconds:.2g}%")
            if step < self._num_steps:
                first_step, first_end = self._first
                between = max(0.0, now - first_end - self._step_seconds)
                per_step = seconds / len(self._steps) + between / (step - first_step)
                parts.append(f"{_duration((self._num_steps - step) * per_step)} left")
        return "  ".join(parts)

    def _draw(self) -> None:
        # A line as wide as the terminal wraps, and '\r' would come back to its second half.
        text = self._text[:max(1, shutil.get_terminal_size().columns - 1)]
        # Every terminal knows blanks: they, not an escape code, cover what a longer line left.
        self._stream.write("\r" + text.ljust(self._drawn_width))
        self._stream.flush()
        self._drawn_width = len(text)
        self._is_shown = True

    def _print_whole(self) -> None:
        self._stream.write(self._text + "\n")
        self._stream.flush()
        self._is_shown = True


def metric_text(value: float) -> str:
    """Returns a loss or a metric: 2.3456, and 5.5874e+23 where digits would say nothing."""
    return f"{value:.4f}" if abs(value) < 1e6 or not math.isfinite(value) else f"{value:.4e}"


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


def _duration(seconds: float) -> str:
    """Returns 42s, 3m05s or 2h07m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
