"""Sweeps whose trials are a program that takes no time: chosen, judged, recorded, resumed."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from praxis_lite import ConfigError
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.logs import command_log
from praxis_lite.modes.mode import CommandLine
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_tools.sweep import running
from praxis_tools.sweep.command import sweep
from praxis_tools.sweep.space import Space
from praxis_tools.sweep.study import Study
from praxis_tools.sweep.sweep_settings import SweepSettings
from praxis_tools.sweep.trial_job import TrialJob
from tests.support import quick_trial
from tests.support.job_runs import home
from tests.support.swept_jobs import SWEPT

optuna = pytest.importorskip("optuna")
RATE = "task.learner.learning_rate"
CHOSEN = {"search": "grid", "better": "min", "pruner": "none", "seed": 7}


@pytest.fixture
def quick(monkeypatch):
    """Trials are quick; returns a function that sweeps."""
    home()
    command = TrialJob.command
    monkeypatch.setattr(
        TrialJob,
        "command",
        lambda job: [sys.executable, "-S", quick_trial.__file__, *command(job)[3:]],
    )
    monkeypatch.setattr(running, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(running, "_PRINT_PLATFORM", "print('cpu')")

    def run(folder, *settings, parallel=1, prints=False, num_trials=None, metric=None, **chosen):
        line = CommandLine(
            mode="sweep", exp=SWEPT.removeprefix("--exp="), packages=["jobzoo"], settings=settings
        )
        options = {"prints": prints, "num_trials": num_trials, "metric": metric}
        return sweep(line, str(folder), parallel=parallel, **options, **(CHOSEN | chosen))

    return run


def records_in(folder):
    return Study(folder / "sweep.journal").records()


def loss_at(rate):
    return 1 + (quick_trial.math.log10(rate) + 2) ** 2


@pytest.fixture(autouse=True)
def in_a_command():
    """Lets a command print the log."""
    with command_log():
        yield


def test_a_grid_is_tried_in_its_order_and_the_best_is_said_as_set_takes_it(tmp_path, quick, capsys):
    rates = f"{RATE}=1e-1,1e-2"
    sizes = "datasets.train.batch_size=13,26"
    assert quick(tmp_path / "s", rates, sizes, "run.seed=3") is None
    records = records_in(tmp_path / "s")
    assert [tuple(record.values.values()) for record in records] == [
        (rate, size) for rate in ("1e-1", "1e-2") for size in ("13", "26")
    ]
    assert [record.value for record in records] == [
        loss_at(float(record.values[RATE])) for record in records
    ]
    out = capsys.readouterr().out
    (line,) = [text for text in out.splitlines() if text.startswith("    praxis train ")]
    assert shlex.split(line)[2:] == [
        SWEPT.removeprefix("--exp="),
        "--set",
        "run.seed=3",
        f"{RATE}=1e-2",
        "datasets.train.batch_size=13",
    ]
    assert f"best trial: 2, heldout/loss 1: {tmp_path}/s/trials/0002\n" in out
    assert (tmp_path / "s/sweep.png").read_bytes().startswith(b"\x89PNG")
    # Finished: nothing is run, the table is printed; without --exp too.
    assert quick(tmp_path / "s", rates, sizes, "run.seed=3") is None
    again = capsys.readouterr().out
    table = out[out.index("   trial") :]
    assert again.endswith(table) and "starts" not in again and "resumes" not in again
    # The columns after the settings: the metric, its step and the status.
    rows = [line.split() for line in table.splitlines()[1 : 1 + len(records)]]
    assert [row[-3:] for row in rows] == [
        [f"{record.value:.6g}", str(record.step), record.status] for record in records
    ]
    sweep(
        CommandLine(mode="sweep"),
        str(tmp_path / "s"),
        parallel=1,
        prints=False,
        num_trials=None,
        metric=None,
        **CHOSEN,
    )
    assert capsys.readouterr().out == table
    # A full disk tore the line of the journal with the end of the last trial.
    journal = tmp_path / "s/sweep.journal"
    journal.write_bytes(journal.read_bytes().rpartition(b'"datetime_complete"')[0])
    (tmp_path / "s/sweep.png").unlink()
    (tmp_path / "s/sweep.png").mkdir()
    assert quick(tmp_path / "s", rates, sizes, "run.seed=3") is None
    assert records_in(tmp_path / "s") == records
    out = capsys.readouterr().out
    assert "trial 3 resumes" in out and re.search("note: .*sweep.png could not be written", out)


@pytest.mark.slow
def test_trials_that_are_refused_or_fail_are_recorded_and_the_sweep_goes_on(
    tmp_path, quick, capsys
):
    quick(tmp_path / "s", f"{RATE}=512,256,128,32,1e-2", parallel=3)
    reasons = [(record.status, record.reason) for record in records_in(tmp_path / "s")]
    assert reasons == [
        ("refused", "The training state does not fit."),
        ("failed", "status 1: the plug was pulled"),
        ("failed", "heldout/loss is nan at step 20"),
        ("failed", mock.ANY),
        ("complete", ""),
    ]
    assert "eval_metrics.jsonl, line 2: " in records_in(tmp_path / "s")[3].reason
    out = capsys.readouterr().out
    assert "trial 0 refused: The training state does not fit.\n" in out
    assert quick(tmp_path / "none", f"{RATE}=512,512.0") == 1
    assert "no trial is complete" in capsys.readouterr().out


@pytest.mark.slow
def test_the_pruner_ends_the_worst_trial_while_it_runs(tmp_path, quick):
    # The first five set the median; the last would wait at step 10 for a minute.
    at = time.monotonic()
    quick(tmp_path / "s", f"{RATE}=1e-2,2e-2,3e-2,4e-2,5e-2,64", pruner="median")
    *others, worst = records_in(tmp_path / "s")
    assert {record.status for record in others} == {"complete"}
    assert (worst.status, worst.step, worst.value) == ("pruned", 5, loss_at(64))
    job = JobDir(tmp_path / "s/trials/0005")
    assert 5 <= len(read_json_lines(job.metrics_jsonl)) <= 10
    assert "stopped by SIGTERM: step " in (tmp_path / "s/trials/0005.txt").read_text()
    assert time.monotonic() - at < 30


@pytest.mark.slow
@pytest.mark.parametrize("search", ["random", "tpe"])
def test_a_search_with_a_seed_makes_the_same_trials_also_if_it_was_cut_in_two(
    tmp_path, quick, search
):
    space = (f"{RATE}=1e-5..1", "datasets.train.batch_size=13..26", "run.seed=1,2,3")
    given = {"search": search, "pruner": "median"}

    def values(name):
        return [
            (record.values, record.status, record.value) for record in records_in(tmp_path / name)
        ]

    quick(tmp_path / "whole", *space, num_trials=14, **given)
    quick(tmp_path / "cut", *space, num_trials=5, **given)
    quick(tmp_path / "cut", *space, num_trials=14, **given)
    assert values("whole") == values("cut") and len(values("cut")) == 14
    quick(tmp_path / "other", *space, num_trials=3, seed=8, **given)
    assert values("other")[0][0] != values("whole")[0][0]
    rates = [float(record.values[RATE]) for record in records_in(tmp_path / "whole")]
    assert all(1e-5 <= rate <= 1 for rate in rates) and len(set(rates)) == 14


@pytest.mark.slow
def test_ctrl_c_ends_all_trials_softly_and_the_same_command_goes_on(tmp_path, quick, capsys):
    folder, rates = tmp_path / "s", f"{RATE}=64,64.0"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # As in the background of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def both_wait():
        jobs = [JobDir(folder / "trials" / name) for name in ("0000", "0001")]
        return all(
            job.metrics_jsonl.exists() and len(job.metrics_jsonl.read_text().splitlines()) == 10
            for job in jobs
        )

    def interrupt():
        deadline = time.monotonic() + 60
        while not both_wait() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert quick(folder, rates, parallel=2) is None
    thread.join()
    out = capsys.readouterr().out
    assert f"stopped by SIGINT; run the same command to resume the sweep: {folder}\n" in out
    for name in ("0000", "0001"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((folder / "trials" / name / "pid").read_text()), 0)
    assert {record.status for record in records_in(folder)} == {"runs"}
    quick(folder, rates, parallel=2)
    assert "trial 0 resumes: " in capsys.readouterr().out
    assert {record.status for record in records_in(folder)} == {"complete"}
    for name in ("0000", "0001"):
        steps = [x["step"] for x in read_json_lines(folder / "trials" / name / "metrics.jsonl")]
        assert steps == [*range(1, 21)]


@pytest.mark.slow
def test_printed_lines_are_the_trials_and_their_results_are_collected(
    tmp_path, quick, capsys, monkeypatch
):
    folder, settings = tmp_path / "a folder's", (f"{RATE}=1e-3,1e-2", "PRESET='a b'")
    assert quick(folder, *settings, prints=True, pruner="median") is None
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[-3:] for line in lines] == [  # And nothing else.
        ["--set", "PRESET='a b'", f"{RATE}={rate}"] for rate in ("1e-3", "1e-2")
    ]
    (folder / "trials").mkdir()
    for line in lines:
        assert subprocess.run(line, shell=True, check=True, stdout=subprocess.DEVNULL)
    # As if their last steps were committed: what a job's files say is another test's.
    monkeypatch.setattr(TrialJob, "is_complete", lambda job: job.has_stepped())
    assert quick(folder, *settings, prints=True) is None
    out = capsys.readouterr().out
    assert "best trial: 1" in out and "-m praxis_lite" not in out
    assert [record.value for record in records_in(folder)] == [loss_at(1e-3), loss_at(1e-2)]


def test_what_does_not_fit_by_its_plan_is_not_begun(tmp_path, quick, capsys, monkeypatch):
    plan = "import sys; at = sys.argv[1]; print('error:', at); sys.exit(2 * ('128' in at))"

    def planned(job, topology):
        return [sys.executable, "-S", "-c", plan, f"{topology} {job._settings[-1]}"]

    monkeypatch.setattr(TrialJob, "plan_command", planned)
    rates = f"{RATE}=128,1e-2"
    quick(tmp_path / "s", rates, topology="v5e:2x4")
    records = records_in(tmp_path / "s")
    reasons = [(record.status, record.reason) for record in records]
    assert reasons == [("refused", f"v5e:2x4 {RATE}=128"), ("complete", "")]
    assert not (tmp_path / "s/trials/0000").exists()
    capsys.readouterr()
    quick(tmp_path / "p", rates, topology="v5e:2x4", prints=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert shlex.split(line)[-1] == f"{RATE}=1e-2"
    with pytest.raises(ConfigError, match="Planning trial 0 .* status 2: --topology=v5x"):
        quick(tmp_path / "t", rates, topology="--topology=v5x")


def test_what_is_wrong_is_refused_before_a_trial_begins(tmp_path, quick):
    rates = f"{RATE}=1e-3,1e-2"
    for settings, given, words in [
        ((f"{RATE}=1e-3,-1",), {}, f"The trial with {RATE}=-1: Learner.learning_rate is -1"),
        ((rates,), {"search": "grid", "num_trials": 3}, "--trials"),
        ((rates,), {"search": "gird"}, "Did you mean grid"),
        ((rates,), {"search": "tpe", "prints": True}, "--print"),
        ((rates,), {"metric": "helt/loss"}, "Did you mean heldout/loss"),
        ((rates,), {"better": "most"}, "--better"),
        ((rates,), {"parallel": 0}, "--parallel"),
        (
            (rates, "run.evaluation.by_follower=true", "run.evaluation.every_steps=none"),
            {},
            "by_follower",
        ),
        ((f"{RATE}=1e-3..1e-2",), {}, "--search=random"),
    ]:
        with pytest.raises(ConfigError) as error:
            quick(tmp_path / "s", *settings, **given)
        assert words in str(error.value), error.value
    assert not (tmp_path / "s").exists()
    (tmp_path / "job").mkdir()
    (tmp_path / "job/config.json").touch()
    with pytest.raises(ConfigError, match="is a job directory"):
        quick(tmp_path / "job", rates)


@pytest.mark.slow
def test_another_sweep_in_its_directory_is_refused_by_name(tmp_path, quick):
    quick(tmp_path / "s", f"{RATE}=1e-3,1e-2")
    for settings, given, words in [
        ((f"{RATE}=1e-3,1e-1",), {}, "--set "),
        ((f"{RATE}=1e-3,1e-2",), {"seed": 8}, "--seed 7, but --seed is 8"),
        ((f"{RATE}=1e-3,1e-2",), {"metric": "loss"}, "--metric heldout/loss"),
    ]:
        with pytest.raises(ConfigError) as error:
            quick(tmp_path / "s", *settings, **given)
        assert words in str(error.value)
    (tmp_path / "s/sweep.journal").write_text("{}\n")
    with pytest.raises(ConfigError, match="sweep.journal is damaged"):
        records_in(tmp_path / "s")


@pytest.mark.slow
def test_the_loss_of_training_is_judged_without_evaluations(tmp_path, quick):
    quick(tmp_path / "s", f"{RATE}=1e-3,1e-2", metric="loss")
    records = records_in(tmp_path / "s")
    assert [(record.step, record.value) for record in records] == [
        (20, loss_at(1e-3)),
        (20, loss_at(1e-2)),
    ]


def test_texts_that_were_tried_are_no_formulas_in_the_picture(tmp_path):
    texts = (r"$\frac$", "b" * 40)
    space = Space((), {"a.b": optuna.distributions.CategoricalDistribution(texts)})
    study = Study(
        tmp_path / "sweep.journal",
        SweepSettings(
            experiment="zoo.Lm",
            packages=(),
            space=space,
            metric="loss",
            num_trials=2,
            num_steps=7,
            **CHOSEN,
        ),
    )
    for value in (1.0, 2.0):
        study.next().completed(7, value)
    study.draw(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_accelerators_are_no_processes_to_share(monkeypatch):
    monkeypatch.setattr(running, "_PRINT_PLATFORM", "print('tpu')")
    with pytest.raises(ConfigError, match="--parallel is 2, but expected 1 on .*'tpu'"):
        running.check_parallel(2)
    running.check_parallel(1)
