"""The log: what commands print of it, what log.txt gets, and what a program's logging gets."""

import contextlib
import io
import json
import logging

import pytest

import praxis_lite as pl
import praxis_tools  # noqa: F401  # Its loggers become children of praxis_lite's.
from praxis_lite.job.processes import logs
from praxis_lite.job.processes.logs import LogFormat
from tests.job.test_disk_full import files_of_at_most
from tests.support.job_runs import home, lines_of, succeed
from tests.support.line_jobs import LINE
from tests.support.log_lines import terminal_text

A, B = logging.getLogger("praxis_lite.a"), logging.getLogger("praxis_tools.b.c")


@contextlib.contextmanager
def command(**settings):
    """Yields the standard output and standard error of a command."""
    options = {"verbose": False, "quiet": False, "log_format": LogFormat.TEXT} | settings
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), logs.command_log():
        logs.configure_log(**options)
        yield out, err


def test_a_command_prints_both_packages_with_time_level_and_process():
    with command() as (out, err):
        A.debug("hidden")
        A.info("%d of %s", 3, "x")
        B.warning("note: a: b")
        B.error("broken")
    first, second = out.getvalue().splitlines()
    assert first[20:] == "INFO 0: 3 of x" and second[20:] == "WARNING 0: note: a: b"
    assert terminal_text(out.getvalue()) == "3 of x\nWARNING: note: a: b\n"
    assert terminal_text(err.getvalue()) == "ERROR: broken\n"


def test_the_log_of_a_command_whose_output_is_its_result_is_on_standard_error(capsys):
    with logs.command_log(to_stderr=True):
        A.info("i")
        print("result")
    out, err = capsys.readouterr()
    assert (out, terminal_text(err)) == ("result\n", "i\n")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"quiet": True}, "WARNING: w\n"), ({"verbose": True}, "d\ni\nWARNING: w\n")],
)
def test_quiet_and_verbose_commands_print_less_and_more(settings, expected):
    with command(**settings) as (out, _):
        A.debug("d")
        B.info("i")
        A.warning("w")
    assert terminal_text(out.getvalue()) == expected


def test_json_has_an_object_per_line():
    with command(log_format=LogFormat.JSON) as (out, _):
        B.info("two\nlines \xe9")
    line = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1 and line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "process": 0,
        "logger": "praxis_tools.b.c",
        "message": "two\nlines \xe9",
    }


def test_equal_lines_are_folded_for_half_a_minute():
    def log(message, seconds):
        fields = {"msg": message, "levelname": "INFO", "levelno": logging.INFO, "created": seconds}
        logs.LOGGER.handle(logging.makeLogRecord(fields))

    with command() as (out, _):
        for second in range(13):
            log("waits", second)
        log("goes on", 13)
        for second in (20, 21, 80, 81):
            log("waits", second)
    assert terminal_text(out.getvalue()).splitlines() == [
        "waits",
        "... repeated 12 times",
        "goes on",
        "waits",
        "... repeated 1 time",
        "waits",
        "... repeated 1 time",
    ]


@pytest.fixture
def root_lines(monkeypatch):
    """The lines that a handler of the root logger gets, as from `logging.basicConfig`."""
    lines, root = [], logging.getLogger()
    handler = logging.StreamHandler(io.StringIO())
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(root, "handlers", [handler])
    return lines


def test_a_job_log_changes_nothing_for_other_handlers(tmp_path, root_lines, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    path = tmp_path / "log.txt"
    with pytest.raises(KeyError), logs.job_log():
        A.info("early")
        logs.open_job_log(path)
        A.warning("late")
        raise KeyError("x")
    A.info("after")
    assert root_lines == ["late"]
    lines = terminal_text(path.read_text()).splitlines()
    assert lines == ["early", "WARNING: late", "ERROR: KeyError: 'x'"]
    logs.LOGGER.setLevel(logging.ERROR)
    try:
        with logs.job_log():
            logs.open_job_log(path)
            A.warning("silenced")
    finally:
        logs.LOGGER.setLevel(logging.NOTSET)
    assert "silenced" not in path.read_text() and root_lines == ["late"]


def test_a_line_written_at_once_is_a_warning_like_others(tmp_path, capfd):
    path = tmp_path / "log.txt"
    with logs.command_log(), logs.job_log():
        logs.configure_log(verbose=False, quiet=False, log_format=LogFormat.TEXT)
        logs.open_job_log(path)
        A.info("begun")
        logs.write_now("no step for 5% of a day")
        err = capfd.readouterr().err
    assert terminal_text(err) == "WARNING: no step for 5% of a day\n"
    assert terminal_text(path.read_text()) == "begun\nWARNING: no step for 5% of a day\n"


def test_a_full_disk_is_told_once_and_later_lines_are_written(tmp_path):
    path = tmp_path / "log.txt"
    with command() as (out, _), logs.job_log():
        A.info("fits")
        logs.open_job_log(path)
        with files_of_at_most(path.stat().st_size + 3):
            for number in range(20):
                A.info("too much %d", number)
        A.info("fits again")
    (told,) = [line for line in terminal_text(out.getvalue()).splitlines() if "WARNING" in line]
    assert f"{path} cannot be written: File too large. The job continues" in told
    lines = terminal_text(path.read_text()).splitlines()
    assert (lines[0], lines[-1]) == ("fits", "fits again")
    with files_of_at_most(0), logs.job_log():  # It stays full to the end.
        logs.open_job_log(tmp_path / "another.txt")
        A.info("too much")


def test_log_txt_has_what_a_command_prints_and_grows_with_each_launch(tmp_path):
    argv = (LINE, f"--job_log_dir={tmp_path}", "--set")
    first = succeed(*argv, "run.num_train_steps=3")
    log_txt = tmp_path / "log.txt"
    assert terminal_text(log_txt.read_text()) == first.out
    quiet = succeed("-q", *argv, "run.num_train_steps=5")
    assert quiet.out == ""
    text = terminal_text(log_txt.read_text())
    assert text.startswith(first.out) and "restored the checkpoint of step 3\n" in text
    assert "step 5/5" in text and lines_of(tmp_path / "metrics.jsonl")[-1]["step"] == 5


@pytest.mark.slow
def test_train_prints_its_progress_or_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home() / "cache"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def output(name, **settings):
        steps = {"run.num_train_steps": 3}
        argument = LINE.removeprefix("--exp=")
        pl.train(argument, tmp_path / name, packages=["jobzoo"], settings=steps, **settings)
        out, err = capfd.readouterr()
        assert err == ""
        return [line[:8] for line in terminal_text(out).splitlines()]

    assert output("shown") == ["step 1/3", "step 2/3", "step 3/3"]
    assert output("hidden", progress=False) == []
    logs.LOGGER.setLevel(logging.CRITICAL)
    try:
        assert output("silent") == []
    finally:
        logs.LOGGER.setLevel(logging.NOTSET)
    assert {path.parent.name for path in tmp_path.glob("*/log.txt")} == {"shown", "hidden"}
