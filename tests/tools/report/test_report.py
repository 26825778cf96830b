"""--mode=report as a command: its jobs, its errors, its text, and --follow until a job ends."""

import contextlib
import html as html_module
import io
import json
import os
import re
import subprocess
import sys

import pytest

import praxis_lite
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.job_lock import JobLock
from praxis_lite.main import main
from praxis_lite.trainer.metrics.json_lines import json_line
from praxis_tools.report import report
from praxis_tools.report.job_reader import named_jobs
from praxis_tools.report.report import ReportReader, print_reports
from tests.support import line_jobs
from tests.support.job_runs import CHECKOUT, home
from tests.support.written_jobs import training_lines, written_job


def launched(*argv):
    """Returns exit status, output and errors of a command line."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["--mode=report", *map(str, argv)])
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), " ".join(err.getvalue().split())


def document_in(file):
    return document_of(file.read_text())


def document_of(page):
    (text,) = re.findall(r'id="document">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


@pytest.fixture
def jobs(tmp_path):
    evaluations = [{"step": 13, "dataset": "heldout", "loss": 3.25}]
    lines = training_lines(13)
    lines[-1]["loss"] = 2.5
    a = written_job(tmp_path / "jobs/warm", lines, evaluations=evaluations, settings=["lr=1"])
    b = written_job(tmp_path / "jobs/cold", training_lines(7), settings=["lr=2"])
    return a.path, b.path


def test_jobs_stand_between_options_and_in_job_log_dir(jobs, tmp_path):
    a, b = jobs
    html = tmp_path / "report.html"
    status, out, err = launched(a, f"--html={html}", f"--job_log_dir={b}")
    assert (status, err) == (0, "")
    assert out == launched(f"--html={html}", a, b)[1] == launched(a, f"--html={html}", b)[1]
    assert [job["name"] for job in document_in(html)["jobs"]] == ["warm", "cold"]
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert "heldout/loss" in rows and "3.2500" in rows["heldout/loss"]
    assert rows["lr"] == ["lr", "1", "2"]
    assert re.search(r"warm +13 +2\.5000 +6,656 tokens", out)
    assert html.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "praxis report JOB"),
        (["{jobs}/wram"], "Did you mean warm, in {jobs}."),
        (["{jobs}"], "{jobs}/cold, {jobs}/warm"),
        (["{jobs}/warm", "--every=3"], "--every=3 requires --follow"),
        (["{jobs}/warm", "--follow", "--every=0"], "0 is not a number of seconds from 0.1"),
        (["{jobs}/warm", "--html={jobs}"], "{jobs} is a directory"),
        (["{jobs}/warm", "--exp=lm.PyDocs"], "--exp"),
        (["{jobs}/warm", "--htlm=x"], "Did you mean --html?"),
        (["hdfs://host/job"], "hdfs://host/job is a URL"),
    ],
)
def test_errors_say_what_to_change(jobs, argv, words):
    folder = jobs[0].parent
    status, _, err = launched(*(item.format(jobs=folder) for item in argv))
    assert status == 2
    assert words.format(jobs=folder) in err


def test_other_modes_take_a_single_job():
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
        main(["--mode=summary", "/tmp/job", "/tmp/other"])
    assert "/tmp/other is not an option" in " ".join(err.getvalue().split())


def test_a_job_named_twice_is_there_once_and_equal_names_are_told_apart(tmp_path):
    for name in ("x/run", "y/run", "y/other"):
        written_job(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "x/run")
    paths = [tmp_path / name for name in ("x/run", "y/run", "y/other", "x/../x/run", "link")]
    assert list(named_jobs(list(map(str, paths)))) == ["x/run", "y/run", "other"]


def test_control_characters_of_a_job_do_not_reach_the_terminal(tmp_path):
    evaluations = [{"step": 1, "dataset": "held\x1b[2Jout", "loss": 1.0}]
    job = written_job(tmp_path / "job", training_lines(1), evaluations=evaluations)
    assert "\x1b" not in launched(job.path)[1]


def test_following_ends_with_the_job_and_shows_its_last_line(tmp_path, monkeypatch, capsys):
    lines = training_lines(29)
    job = written_job(tmp_path / "job", lines[:7], settings=["run.num_train_steps=29"])
    html, seen, rounds = tmp_path / "report.html", [], iter(range(1, 100))
    lock = JobLock(job.path, print)

    def sleep(seconds):
        """Trains another few steps; a reader may come while a line is half written."""
        assert seconds == 3.0
        seen.append(document_in(html))
        with job.metrics_jsonl.open("a") as file:
            number = next(rounds)
            more = "".join(map(json_line, lines[7 * number : 7 * number + 7]))
            file.write(rest[0] + more[:-9])
            rest[0] = more[-9:]
            if number == 4:
                file.write(rest[0])
                lock.__exit__()

    rest = [""]
    monkeypatch.setattr(report.time, "sleep", sleep)
    with lock:
        print_reports(ReportReader({"job": JobDir(job.path)}), html=html, follow_seconds=3.0)
    assert [shown["jobs"][0]["last_step"] for shown in seen] == [7, 13, 20, 27]
    assert [shown["jobs"][0]["state"] for shown in seen] == ["trains"] * 4
    assert {shown["reload_seconds"] for shown in seen} == {3.0}
    last = document_in(html)
    assert (last["jobs"][0]["last_step"], last["jobs"][0]["state"]) == (29, "has ended")
    assert last["reload_seconds"] is None
    out = capsys.readouterr().out
    assert re.findall(r"^job: step (\d+)", out, re.MULTILINE) == ["7", "13", "20", "27"]
    assert out.endswith(f"\n\nOpen this page in a browser: {html}\n")


def test_nothing_is_followed_that_does_not_train(jobs, monkeypatch):
    monkeypatch.setattr(report.time, "sleep", pytest.fail)
    print_reports(ReportReader(named_jobs(list(map(str, jobs)))), html=None, follow_seconds=3.0)


def test_in_python_a_report_prints_as_the_command_does_and_its_page_is_the_commands(jobs, tmp_path):
    html = tmp_path / "report.html"
    _, out, _ = launched(*jobs, f"--html={html}")
    report = praxis_lite.report(*jobs)
    assert out.startswith(f"{report}\n")
    page = report.page()
    assert document_of(page)["jobs"] == document_in(html)["jobs"]
    assert html_module.escape(page) in report._repr_html_()


@pytest.mark.slow
def test_a_real_training_is_followed_to_its_end(tmp_path):
    job, html = tmp_path / "job", tmp_path / "report.html"
    command = [
        sys.executable,
        CHECKOUT / "main.py",
        "--packages=jobzoo",
        line_jobs.LINE,
        f"--job_log_dir={job}",
        "--set",
        "run.num_train_steps=97",
        "run.loss_spikes.action=report",
    ]
    env = {**os.environ, "PYTHONPATH": str(home()), "JAX_NUM_CPU_DEVICES": "2"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as training:
        for line in training.stdout:
            if "compiling" in line:
                break
        status, out, err = launched(job, f"--html={html}", "--follow", "--every=0.2")
        training.stdout.read()
    assert (training.returncode, status, err) == (0, 0, "")
    (of_job,) = document_in(html)["jobs"]
    assert (of_job["last_step"], of_job["state"]) == (97, "has ended")
    assert "examples" in of_job["axes"] and of_job["goodput"]["seconds"]["step"] > 0
    assert re.search("^job +97 +97 ", out, re.MULTILINE)
    assert out.startswith(f"writing {html} every 0.2 s")
