"""The progress line on a simulated terminal, in a notebook, and in the log."""

import builtins
import io
import math
import re
import sys
import types

import pytest

from praxis_lite.trainer.metrics import progress
from praxis_lite.trainer.metrics.progress import ProgressLine, live_line, metric_text
from praxis_lite.trainer.metrics.rates import Pause, Rates
from praxis_lite.trainer.metrics.step_times import EVALUATION_TIME, SAVE_TIME


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and can say what stands on its screen."""

    def isatty(self):
        return True

    def screen(self):
        """Returns the lines as a terminal shows them, without the bar."""
        rows = []
        for written in self.getvalue().split("\n"):
            row, at = "", 0
            for part in re.split(r"(\r|\x1b\[[0-9;?]*[a-zA-Z])", written):
                if part in ("\r", "\x1b[2K"):
                    row, at = ("" if part == "\x1b[2K" else row), 0
                elif not part.startswith("\x1b"):
                    row, at = row[:at] + part + row[at + len(part) :], at + len(part)
            rows.append(row.removeprefix(f"{'━' * 20}  ").rstrip())
        return rows


def terminal_of(monkeypatch):
    """Makes standard output a terminal with 200 columns, until the test ends."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    return sys.stdout


@pytest.fixture
def log(monkeypatch):
    """Returns the list of logged messages. The progress line reads the time from CLOCK."""
    messages = []
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: CLOCK.seconds))
    monkeypatch.setattr(progress._log, "info", lambda *args, extra: messages.append(args[1]))
    return messages


CLOCK = types.SimpleNamespace(seconds=100.0)


class Run:
    """A run that shows its steps, each of which takes as long as it is told."""

    def __init__(self, num_steps, log_every_steps=None, first_step=0, num_devices=1, **pauses):
        pauses = {EVALUATION_TIME: Pause(), SAVE_TIME: Pause(), **pauses}
        self.rates, live = Rates(num_steps, num_devices, pauses), live_line()
        self.line = ProgressLine(num_steps, live, log_every_steps, first_step)
        self.loop_seconds, self.paused = 0.0, {EVALUATION_TIME: 0.0, SAVE_TIME: 0.0}

    def step(self, step, seconds=0.0, weight=None, loss=1.0, input_time=0.0, hook=0.0, **more):
        """Makes a step; then comes a hook that waits."""
        CLOCK.seconds += seconds
        self.loop_seconds += seconds
        line = {"step": step, "step_time": seconds, "input_time": input_time, **self.paused, **more}
        self.paused = dict.fromkeys(self.paused, 0.0)
        self.rates.add(line, weight or 0.0, self.loop_seconds)
        self.line.update(step, loss, self.rates, has_tokens=weight is not None)
        self.loop_seconds += hook

    def pauses(self, name, seconds):
        CLOCK.seconds += seconds
        self.paused[name] = seconds


def run(num_steps, log_every_steps=None, first_step=0, step_seconds=0.01):
    showing = Run(num_steps, log_every_steps, first_step)
    for step in range(first_step + 1, num_steps + 1):
        # Seven of eight steps have few tokens: their mean is 252.3.
        weight = 504.6 * 4 if step % 8 == 0 else 0.0
        showing.step(step, step_seconds, weight, loss=5.0 / step)
    showing.line.close()


@pytest.mark.parametrize(("num_steps", "first_step"), [(200, 0), (7, 0), (20_011, 0), (1013, 513)])
def test_the_log_gets_about_twenty_lines_whatever_the_length(num_steps, first_step, log):
    run(num_steps, first_step=first_step)
    assert len(log) <= 22
    assert len(log) >= min(19, num_steps)
    assert all(re.match(r"step +\d+/\d+  loss \d", line) for line in log)
    assert log[-1].startswith(f"step {num_steps}/{num_steps}")


def test_the_log_gets_a_line_every_log_every_steps_and_the_last(log):
    run(37, log_every_steps=13)
    assert [line.split()[1] for line in log] == ["13/37", "26/37", "37/37"]


def test_the_last_step_waits_for_no_close(log):
    Run(37, 13).step(37, 0.5)
    assert log == ["step 37/37  loss 1.0000"]


def test_a_run_that_stops_early_shows_its_last_step_once(log, monkeypatch):
    terminal = terminal_of(monkeypatch)
    showing = Run(200)
    for step in range(1, 138):
        showing.step(step)
    showing.line.close()
    for lines in (terminal.screen(), [*log, ""]):
        assert lines[-2:] == [next(line for line in lines if line.startswith("step 137/200")), ""]
        assert sum(line.startswith("step 137/200") for line in lines) == 1


def test_a_terminal_shows_one_line_redrawn_at_most_twice_a_second(log, monkeypatch):
    terminal = terminal_of(monkeypatch)
    run(1000)  # ten seconds
    assert 18 <= terminal.getvalue().count("\r") <= 25
    # Both speeds are of the last 50 steps of 10 ms: seven of them with tokens.
    num_tokens = 7 * 504.6 * 4 / 0.5
    assert f"{num_tokens / 1e3:.1f}k" == "28.3k"
    assert terminal.screen() == [
        "step 1000/1000  loss 0.0050  100 steps/s  28.3k tokens/s/device  waits for input 0%",
        "",
    ]


def test_a_notebook_shows_one_line_that_is_updated(monkeypatch, log):
    shown = []

    class DisplayHandle:
        def display(self, data, raw):
            shown.append(data["text/plain"])

        def update(self, data, raw):
            shown[-1] = data["text/plain"]

    display = types.SimpleNamespace(DisplayHandle=DisplayHandle)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    run(200)
    assert len(shown) == 1 and shown[0].startswith("step 200/200  loss 0.0250")


def test_time_left_follows_the_speed_from_where_the_run_resumed(log):
    showing = Run(1000, 1, first_step=400)
    for step in range(401, 411):
        showing.step(step, 0.5)
    # 590 steps at 2 a second.
    assert log[-1].endswith("2.0 steps/s  waits for input 0%  4m55s left")


def test_what_is_printed_stands_whole_above_the_live_line(log, monkeypatch):
    terminal = terminal_of(monkeypatch)
    showing = Run(200)
    print("before")
    showing.step(7, loss=2.0)
    print("a" * 250, "b/c")  # A long path must not be wrapped.
    assert terminal.screen() == ["before", f"{'a' * 250} b/c", "step   7/200  loss 2.0000"]
    showing.line.close()
    print("after")
    assert terminal.screen()[2:] == ["step   7/200  loss 2.0000", "after", ""]


def test_a_shorter_line_leaves_nothing_of_a_longer_one(log, monkeypatch):
    terminal = terminal_of(monkeypatch)
    showing = Run(200)
    showing.step(1, 3.0)
    showing.step(2, 1.0, loss=123456.0)
    showing.step(3, 1.0)
    shown = "step   3/200  loss 1.0000  1.0 steps/s  waits for input 0%  3m17s left"
    assert terminal.screen() == [shown]


def test_a_narrow_terminal_lacks_the_lesser_numbers_and_no_line_wraps(log, monkeypatch):
    terminal = terminal_of(monkeypatch)
    shown = {}
    for width in (20, 40, 82, 102, 122, 142):
        monkeypatch.setenv("COLUMNS", str(width))
        terminal.truncate(0)
        showing = Run(200, num_devices=4)
        for step in range(1, 111):
            showing.step(step, 0.25, 8000.0, input_time=0.05, mfu=0.412, hfu=0.5)
        showing.line.close()
        (shown[width], _) = terminal.screen()
        assert len(shown[width]) < width - (22 if width >= 61 else 0)
    whole = (
        "step 110/200  loss 1.0000  4.0 steps/s  8,000 tokens/s/device  MFU 41.2%  HFU 50.0%  "
        "waits for input 20%  22s left"
    )
    assert shown[142] == whole
    assert shown[122] == whole.replace("  HFU 50.0%", "").replace("  4.0 steps/s", "")
    assert shown[102] == "step 110/200  loss 1.0000  8,000 tokens/s/device  MFU 41.2%  22s left"
    assert shown[82] == "step 110/200  loss 1.0000  8,000 tokens/s/device  22s left"
    assert shown[40] == "step 110/200  loss 1.0000  22s left"
    assert shown[20] == "step 110/200  22s l"


def test_closing_an_unused_line_shows_nothing(log, monkeypatch):
    terminal = terminal_of(monkeypatch)
    ProgressLine(200, live_line(), None, 0).close()
    assert (terminal.getvalue(), log) == ("", [])


def test_the_share_of_a_step_that_waits_for_input_is_of_the_steps_shown(log):
    showing = Run(120, 60)
    for step in range(1, 121):
        # The last 50 steps wait a fifth of their time, those before half.
        showing.step(step, 0.25, input_time=0.05 if step > 70 else 0.125)
    assert re.findall(r"waits for input (\S+)", " ".join(log)) == ["50%", "20%"]
    assert showing.rates.input_summary("rows").startswith("waiting for input took 37% of ")


def test_utilization_is_of_the_time_of_the_steps_and_of_all_devices_alike():
    rates = Rates(100, 8, PAUSES)
    for step, (seconds, mfu) in enumerate(((9.0, 0.01), (1.0, 0.5), (3.0, 0.1)), start=1):
        times = {"step_time": seconds, "input_time": 0, EVALUATION_TIME: 0, SAVE_TIME: 0}
        rates.add({"step": step, "mfu": mfu, **times}, 160.0, 0.0)
    # 0.5 of one second and 0.1 of three; the first step pays for the start of the launch.
    assert rates.utilization("mfu") == pytest.approx((0.5 + 0.3) / 4)
    assert rates.utilization("hfu") is None
    assert rates.per_second_and_device == pytest.approx(2 * 160 / 4 / 8)


def lines_with_pauses(log, first_step, steps, pauses, num_steps=100):
    """Returns lines of steps of 0.5 s, the first of a minute; evaluations take 20 s, saves 3 s."""
    showing = Run(num_steps, 1, first_step, **pauses)
    for step in steps:
        showing.step(step, 60.0 if step == first_step + 1 else 0.5, 100.0, input_time=0.05)
        if step % 10 == 0:
            showing.pauses(EVALUATION_TIME, 20.0)
        if step % 25 == 0:
            showing.pauses(SAVE_TIME, 3.0)
    return dict(zip(steps, log, strict=True))


PAUSES = {EVALUATION_TIME: Pause(10), SAVE_TIME: Pause(25)}


def test_all_numbers_are_right_straight_after_evaluations_and_saves(log):
    lines = lines_with_pauses(log, 0, range(1, 101), PAUSES)
    assert lines[1] == "step   1/100  loss 1.0000"
    speeds = "2.0 steps/s  200 tokens/s/device  waits for input 10%"
    actual = [line.partition("loss 1.0000  ")[2].removesuffix(" left") for line in lines.values()]
    assert {text.rpartition("  ")[0] for text in actual[1:-1]} == {speeds}
    # Before the first evaluation nobody knows how long they take: 92 steps of 0.5 s.
    assert lines[8].endswith("  46s left")
    # At step 11 89 steps and nine evaluations; at 26 74, eight, and three saves; at 51 49, five,
    # two; at 90, before its evaluation begins, 10, two, one.
    for step, seconds in (
        (11, 44.5 + 180),
        (26, 37 + 160 + 9),
        (51, 24.5 + 100 + 6),
        (90, 5 + 40 + 3),
        (99, 0.5 + 20 + 3),
    ):
        minutes = re.search(r"(?:(\d+)m)?(\d+)s left$", lines[step])
        assert int(minutes[1] or 0) * 60 + int(minutes[2]) == pytest.approx(seconds, abs=0.5)


def test_all_numbers_are_right_straight_after_a_resume(log):
    lines = lines_with_pauses(log, 49, range(50, 55), PAUSES)
    # The one evaluation and the one save of this launch were those of step 50.
    assert lines[51].endswith("2.0 steps/s  200 tokens/s/device  waits for input 10%  2m10s left")
    assert 49 * 0.5 + 5 * 20 + 2 * 3 == 130.5


def test_saves_by_time_and_hooks_that_wait_count_for_the_time_left(log):
    showing = Run(100, 1, **{SAVE_TIME: Pause(None, 10)})
    for step in range(1, 41):
        showing.step(step, 0.5, hook=2.0 if step % 4 == 0 else 0.0)
        if step % 20 == 0:
            showing.pauses(SAVE_TIME, 3.0)
    # 60 steps, and 9 hooks in 39 steps; a save for each 10 s of these, and the last.
    steps = 60 * (0.5 + 18 / 39)
    assert showing.rates.seconds_left() == pytest.approx(steps + 3 * (steps / 10 + 1))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (2.34567, "2.3457"),
        (558740361714736954343424.0, "5.5874e+23"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (123456.0, "123456.0000"),
    ],
)
def test_a_number_is_as_long_as_it_says_something(loss, text):
    assert metric_text(loss) == text
