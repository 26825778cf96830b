"""The progress line on a simulated terminal, and in a file."""

import io
import math
import re

import pytest

from praxis_lite.run.trainer.metrics.progress import ProgressLine, metric_text


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and can say what stands on its screen."""

    def isatty(self):
        return True

    def screen(self):
        """Returns the lines as a terminal shows them: after '\\r' text covers what was there."""
        rows = []
        for written in self.getvalue().split("\n"):
            row = ""
            for part in written.split("\r"):
                row = part + row[len(part):]
            rows.append(row.rstrip())
        return rows


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def run(stream, num_steps, log_every_steps=None, first_step=0, step_seconds=0.01):
    clock = Clock()
    with ProgressLine(num_steps, stream, log_every_steps, first_step, clock=clock) as progress:
        for step in range(first_step + 1, num_steps + 1):
            clock.seconds += step_seconds
            # Seven of eight steps have few tokens: their mean is 252.3.
            progress.update(
                step, step_time=step_seconds, loss=5.0 / step,
                num_tokens=504.6 * 4 if step % 8 == 0 else 0.0,
            )
    return stream


@pytest.mark.parametrize(("num_steps", "first_step"), [(200, 0), (7, 0), (20_011, 0), (1013, 513)])
def test_a_file_gets_about_twenty_lines_whatever_the_length(num_steps, first_step):
    lines = run(io.StringIO(), num_steps, first_step=first_step).getvalue().splitlines()
    assert len(lines) <= 22
    assert len(lines) >= min(19, num_steps)
    assert all(re.match(r"step +\d+/\d+  loss \d", line) for line in lines)
    assert lines[-1].startswith(f"step {num_steps}/{num_steps}")


def test_a_file_gets_a_line_every_log_every_steps_and_the_last():
    lines = run(io.StringIO(), 37, log_every_steps=13).getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["13/37", "26/37", "37/37"]


def test_a_file_holds_no_control_characters():
    text = run(io.StringIO(), 200).getvalue()
    assert "\r" not in text and "\x1b" not in text


def test_the_last_step_waits_for_no_close():
    stream = io.StringIO()
    ProgressLine(37, stream, 13, 0, clock=Clock()).update(37, step_time=0.5, loss=1.0)
    assert stream.getvalue() == "step 37/37  loss 1.0000\n"


@pytest.mark.parametrize("stream_class", [io.StringIO, Terminal])
def test_a_run_that_stops_early_shows_its_last_step_once(stream_class):
    stream = stream_class()
    progress = ProgressLine(200, stream, None, 0, clock=Clock())
    for step in range(1, 138):
        progress.update(step, step_time=0.0, loss=1.0)
    progress.close()
    progress.close()
    lines = stream.screen() if stream.isatty() else stream.getvalue().split("\n")
    assert lines[-2:] == [next(line for line in lines if line.startswith("step 137/200")), ""]
    assert sum(line.startswith("step 137/200") for line in lines) == 1


def test_a_terminal_shows_one_line_redrawn_at_most_five_times_a_second():
    terminal = run(Terminal(), 1000)       # ten seconds
    assert 40 <= terminal.getvalue().count("\r") <= 55
    # Both speeds are of the last 50 steps of 10 ms: seven of them with tokens.
    num_tokens = 7 * 504.6 * 4 / 0.5
    assert f"{num_tokens / 1e3:.1f}k" == "28.3k"
    assert terminal.screen() == ["step 1000/1000  loss 0.0050  100 steps/s  28.3k tokens/s", ""]


def test_time_left_follows_the_speed_from_where_the_run_resumed():
    terminal, clock = Terminal(), Clock()
    progress = ProgressLine(1000, terminal, None, 400, clock=clock)
    for step in range(401, 411):
        clock.seconds += 0.5
        progress.update(step, step_time=0.5, loss=1.0)
    # 590 steps at 2 a second.
    assert terminal.screen()[-1].endswith("2.0 steps/s  4m55s left")


def test_a_note_stands_whole_above_the_live_line():
    terminal = Terminal()
    progress = ProgressLine(200, terminal, None, 0, clock=Clock())
    progress.note("before")
    progress.update(7, step_time=1.0, loss=2.0)
    progress.note("saved")
    assert terminal.screen() == ["before", "saved", "step   7/200  loss 2.0000"]
    progress.close()
    progress.note("after")
    assert terminal.screen()[2:] == ["step   7/200  loss 2.0000", "after", ""]


def test_a_note_in_a_file_is_a_plain_line():
    stream = io.StringIO()
    progress = ProgressLine(200, stream, None, 0, clock=Clock())
    progress.update(7, step_time=1.0, loss=2.0)
    progress.note("saved")
    assert stream.getvalue() == "saved\n"


def test_a_shorter_line_leaves_nothing_of_a_longer_one():
    terminal, clock = Terminal(), Clock()
    progress = ProgressLine(200, terminal, None, 0, clock=clock)
    progress.update(1, step_time=3.0, loss=123456.0, num_tokens=7.0)
    clock.seconds += 1
    progress.update(2, step_time=1.0)
    assert terminal.screen() == ["step   2/200  1.0 steps/s  3m18s left"]


def test_the_live_line_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    terminal = run(Terminal(), 200)
    assert max(map(len, terminal.screen())) == 29


def test_closing_an_unused_line_prints_nothing():
    for stream in (io.StringIO(), Terminal()):
        ProgressLine(200, stream, None, 0).close()
        assert stream.getvalue() == ""


def test_the_share_of_a_step_that_waits_for_input_is_of_the_steps_shown():
    stream, clock = io.StringIO(), Clock()
    with ProgressLine(120, stream, 60, 0, clock=clock) as progress:
        for step in range(1, 121):
            clock.seconds += 0.25
            # The last 50 steps wait a fifth of their time, those before half.
            progress.update(step, step_time=0.25, input_time=0.05 if step > 70 else 0.125)
    assert re.findall(r"waits for input (\S+)", stream.getvalue()) == ["50%", "20%"]


def test_speed_is_that_of_the_steps_and_time_left_counts_what_passes_between_them():
    stream, clock = io.StringIO(), Clock()
    with ProgressLine(100, stream, 1, 0, clock=clock) as progress:
        for step in range(1, 61):
            # The first step waits a minute for the compiler, every tenth for an evaluation.
            clock.seconds += 60.0 if step == 1 else 0.5
            progress.update(
                step, step_time=60.0 if step == 1 else 0.5, num_tokens=100.0, input_time=0.05
            )
            if step % 10 == 0:
                clock.seconds += 20.0
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step   1/100"
    speeds = "2.0 steps/s  200 tokens/s  waits for input 10%"
    assert {line.partition("/100  ")[2].rpartition("  ")[0] for line in lines[1:]} == {speeds}
    # Before the first evaluation: 92 steps of 0.5 s.
    assert lines[7].endswith("  46s left")
    # At step 11 one was made in 10 steps: 89 x 2.5 s. At step 51 five in 50: 49 x 2.5 s.
    assert lines[10].endswith("  3m42s left") and lines[50].endswith("  2m02s left")


@pytest.mark.parametrize(
    ("loss", "text"),
    [(2.34567, "2.3457"), (558740361714736954343424.0, "5.5874e+23"), (math.nan, "nan"),
     (-math.inf, "-inf"), (123456.0, "123456.0000")],
)
def test_a_number_is_as_long_as_it_says_something(loss, text):
    assert metric_text(loss) == text
