"""Shows a run's progress as a live line on a terminal or in a notebook, and as lines of the log."""

import importlib
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from praxis_lite.trainer.metrics.rates import Rates, count_of
from praxis_lite.trainer.metrics.step_times import HFU, MFU

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

__all__ = ("count_of", "metric_text")

_REDRAW_SECONDS = 0.5  # Frequent enough to look alive; a redraw takes 1 ms.
LINES_PER_RUN = 20  # Number of lines in the log.
_BAR_WIDTH = 20
_MIN_WIDTH_WITH_BAR = 60
# The parts that are omitted on a narrow terminal, least important first.
_DROP_ORDER = ("hfu", "steps", "input", "mfu", "tokens", "loss")


class LiveLine(Protocol):
    """A line on a screen that is replaced by each call of `show`."""

    def show(self, share: float, text: Callable[[float], str]) -> None:
        """Replaces the line.

        Args:
          share: Completed share of the run, from 0 to 1.
          text: Function that returns the line's text for a maximum number of columns.
        """

    def close(self) -> None:
        """Leaves the latest line on the screen; the next output starts below it."""


class TerminalLine:
    """A progress bar and a text at the bottom of a terminal.

    Everything else that is printed meanwhile appears above the line.
    """

    def __init__(self) -> None:
        from rich.live import Live

        # Do not wrap the other lines: a path must remain a single word.
        console = _console(file=sys.stdout, soft_wrap=True)
        # Redraw only in `show`, because a thread that redraws would compete with the loop.
        self._live = Live(self, console=console, auto_refresh=False)
        self._share, self._text = 0.0, lambda width: ""

    def show(self, share: float, text: Callable[[float], str]) -> None:
        self._share, self._text = share, text
        if not self._live.is_started:
            self._live.start()
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "list[Text]":
        from rich.text import Text

        width, line = options.max_width - 1, Text(end="", no_wrap=True)
        if width >= _MIN_WIDTH_WITH_BAR:
            num_done = round(_BAR_WIDTH * min(self._share, 1.0))
            bar = ("=" if options.ascii_only else "━") * num_done
            rest = (" " if options.ascii_only else "━") * (_BAR_WIDTH - num_done)
            line.append(bar, "green").append(rest, "bright_black").append("  ")
            width -= _BAR_WIDTH + 2
        return [line.append(self._text(max(1, width)))]


class NotebookLine:
    """A line in the output of a notebook's cell."""

    def __init__(self) -> None:
        self._output = importlib.import_module("IPython.display").DisplayHandle()
        self._is_shown = False

    def show(self, share: float, text: Callable[[float], str]) -> None:
        data = {"text/plain": text(math.inf)}
        if self._is_shown:
            self._output.update(data, raw=True)
        else:
            self._output.display(data, raw=True)
            self._is_shown = True

    def close(self) -> None:
        pass


def live_line() -> LiveLine | None:
    """Returns a live line on the terminal or in the notebook, or None if there is neither."""
    if sys.stdout.isatty():
        return TerminalLine()
    if "IPython" in sys.modules and _console().is_jupyter:
        return NotebookLine()
    return None


def _console(**settings: Any) -> "Console":
    from rich.console import Console

    class ConsoleWithCursor(Console):
        """A console that never hides the cursor, because a killed process could not restore it."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    return ConsoleWithCursor(**settings)


class ProgressLine:
    """Shows a run's step, loss, speed and remaining time.

    A line is logged every `log_every_steps` and at the last step. The live line is redrawn at most
    twice a second; less important numbers are omitted on a narrow terminal.

    Args:
      num_steps: Last step of the run.
      live: The live line, or None to only log lines.
      log_every_steps: Number of steps between lines in the log, at least 1. If None, about 20 lines
        are logged in total.
      first_step: Number of steps completed before this launch: 0, or the restored step.
    """

    def __init__(
        self,
        num_steps: int,
        live: LiveLine | None,
        log_every_steps: int | None,
        first_step: int,
    ):
        self._num_steps, self._live = num_steps, live
        if log_every_steps is None:
            log_every_steps = max(1, math.ceil((num_steps - first_step) / LINES_PER_RUN))
        self._every = log_every_steps
        self._next_redraw = -math.inf
        self._newest: tuple[int, float, Rates, bool] | None = None  # Arguments of `update`.
        self._is_logged = True  # Whether the log contains `_newest`.

    def update(self, step: int, loss: float, rates: Rates, *, has_tokens: bool) -> None:
        """Sets the newest state, and shows it if a redraw or a line is due.

        Args:
          step: The newest step.
          loss: The loss of the step.
          rates: The rates over the last steps, including this step.
          has_tokens: Whether `rates` counts tokens instead of examples.
        """
        self._newest, self._is_logged = (step, loss, rates, has_tokens), False
        is_last = step >= self._num_steps
        if self._live is not None:
            now = time.monotonic()
            if is_last or now >= self._next_redraw:
                self._next_redraw = now + _REDRAW_SECONDS
                self._draw(self._live)
        if is_last or step % self._every == 0:
            self._log_line()

    def close(self) -> None:
        """Shows and logs the final state."""
        if self._live is not None and self._newest is not None:
            self._draw(self._live)
            self._live.close()
        if not self._is_logged:
            self._log_line()

    def _parts(self, step: int, loss: float, rates: Rates, has_tokens: bool) -> dict[str, str]:
        """Returns the parts of the line, keyed by name."""
        width = len(str(self._num_steps))
        parts = {
            "step": f"step {step:{width}d}/{self._num_steps}",
            "loss": f"loss {metric_text(loss)}",
        }
        if rates.step_seconds is None:
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

    def _draw(self, live: LiveLine) -> None:
        assert self._newest is not None
        live.show(self._newest[0] / self._num_steps, self._text)

    def _log_line(self) -> None:
        # A command's output does not repeat what the live line shows.
        _log.info("%s", self._text(), extra={"is_on_screen": self._live is not None})
        self._is_logged = True


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


_log = logging.getLogger(__name__)
