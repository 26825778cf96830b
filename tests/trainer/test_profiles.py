"""Profiles that settings, SIGUSR1 and a file ask for, and faults of the profiler."""

import collections
import gzip
import json
import logging
import os
import signal
import threading
from pathlib import Path

import jax
import pytest

from praxis_lite import ConfigError, ProfileSettings, RunConfig
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes import signals, stop_request
from praxis_lite.job.processes.signals import EndsBySignal
from praxis_lite.job.processes.stop_consensus import StopConsensus
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.trainer.hooks.profile_facts import read_facts
from praxis_lite.trainer.hooks.profile_requests import ProfileRequests
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_tools.plan.residuals import read_residuals
from praxis_tools.profile.measured import measure
from tests.job.test_disk_full import files_of_at_most
from tests.support.job_runs import launch, succeed, trained
from tests.support.line_jobs import LINE

TINY = "--exp=jobzoo.experiments.Tiny"


def test_ranges_of_steps_end_before_their_second_number():
    ranges = ProfileSettings(steps="3:5,7:8").ranges()
    assert [list(steps) for steps in ranges] == [[3, 4], [7]]
    assert ProfileSettings().ranges() == []


@pytest.mark.parametrize("steps", ["5:3", "4:4", "0:2", "3", "a:b", "3:5,4:6", "7:8,3:5", "", 3])
def test_ranges_that_cannot_be_are_refused(steps):
    with pytest.raises(ConfigError, match=f"run.profile.steps is {steps!r}"):
        ProfileSettings(steps=steps)


def test_steps_after_the_last_are_refused():
    RunConfig(num_train_steps=7, profile=ProfileSettings(steps="6:8"))
    with pytest.raises(ConfigError, match="'6:9'.*END of at most 8"):
        RunConfig(num_train_steps=7, profile=ProfileSettings(steps="6:9"))


def test_which_processes_trace_is_one_of_two_words():
    with pytest.raises(ConfigError, match="run.profile.processes is 'second'"):
        ProfileSettings(processes="second")


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        ("", 3, ""),
        (" 12\n", 12, ""),
        ("0", 0, "expected a number"),
        ("1001", 0, "1001"),
        ("three \x1b[2J", 0, r"\x1b"),
        ("9" * 10_000, 0, "999..."),
    ],
)
def test_a_file_asks_once_for_as_many_steps_as_it_says(tmp_path, caplog, text, expected, words):
    caplog.set_level(logging.INFO)
    file = tmp_path / "profile.request"
    requests = ProfileRequests(file, StopRequest())
    assert requests.take() == 0
    file.write_text(text)
    requests._polled_at -= 1.0
    assert requests.take() == expected
    assert not file.exists()
    assert requests.take() == 0
    assert words in caplog.text
    assert len(caplog.records) == bool(words)


def test_a_request_that_cannot_be_read_is_reported_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "profile.request"
    file.mkdir()
    requests = ProfileRequests(file, StopRequest())
    for _ in range(3):
        assert requests.take() == 0
        requests._polled_at -= 1.0
    (record,) = caplog.records
    assert "profile.request cannot be read and removed" in record.getMessage()


def test_sigusr1_asks_for_a_profile_in_training_and_ends_nothing_outside_of_it(monkeypatch):
    lines = []
    for module in (signals, stop_request):
        monkeypatch.setattr(module, "write_now", lines.append)
    with EndsBySignal():
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert wait_for(lambda: stop.profile_requested)
            assert stop.reason is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wait_for(lambda: len(lines) == 2)
    assert lines == [
        "SIGUSR1: a profile begins after the first step",
        "SIGUSR1: ignored, because only a training job can be profiled",
    ]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_handler_that_the_user_has_for_sigusr1_stays():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert wait_for(lambda: heard)
            assert not stop.profile_requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_number_of_steps_is_told_once(mesh_of):
    consensus = StopConsensus(mesh_of(1, 4, 2))
    consensus.should_stop(False, False, 5)
    assert consensus.profile_steps == 5
    consensus.should_stop(False, False)
    assert consensus.profile_steps == 0


def wait_for(is_so):
    """Returns True once something is so; False if that takes seconds."""
    for _ in range(500):
        if is_so():
            return True
        threading.Event().wait(0.01)
    return False


def steps_in(folder: Path, process: int = 0) -> list[int]:
    """Returns the steps that a trace's annotations name."""
    file = folder / f"plugins/profile/step_{folder.name}/process_{process}.xplane.pb"
    return sorted(
        dict(event.stats)["step_num"]
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    )


def runs_in(folder: Path, process: int = 0) -> dict[int, int]:
    """Returns how often each device of a process ran the training step in a trace."""
    file = folder / f"plugins/profile/step_{folder.name}/process_{process}.xplane.pb"
    runs = collections.defaultdict(set)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "train_step" in str(stats.get("hlo_module")):
                    runs[stats["device_ordinal"]].add(stats["run_id"])
    return {device: len(ids) for device, ids in runs.items()}


@pytest.mark.slow
def test_a_job_traces_the_steps_of_its_ranges_and_trains_as_without(tmp_path):
    done = succeed(
        TINY,
        f"--job_log_dir={tmp_path / 'job'}",
        "--set",
        "run.profile.steps=1:2,3:5",
    )
    job = JobDir(tmp_path / "job")
    assert sorted(path.name for path in job.profiles.iterdir()) == ["1", "3"]
    assert done.out.count("profiled step") == 2
    # Step 3 is evaluated and saved, which is in the trace; steps 2 and 5 are not.
    assert steps_in(job.profiles / "1") == [1]
    assert steps_in(job.profiles / "3") == [3, 4]
    assert runs_in(job.profiles / "3") == dict.fromkeys(range(8), 2)
    with gzip.open(job.profiles / "3/plugins/profile/step_3/process_0.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    # What Perfetto shows: events of XLA's threads, with a begin and a duration.
    assert sum(item.get("name", "").startswith("all-reduce") for item in events) > 8
    expected = [measure(job.profiles / name).residual for name in ("1", "3")]
    assert read_residuals(job.residuals_jsonl) == expected
    facts = read_facts(job.profiles / "3")
    assert (facts.first_step, facts.last_step, len(facts.devices)) == (3, 4, 8)
    losses = [line["loss"] for line in read_json_lines(trained()[0].metrics_jsonl)]
    assert [line["loss"] for line in read_json_lines(job.metrics_jsonl)] == losses


@pytest.mark.slow
def test_a_signal_asks_while_a_job_runs(tmp_path, monkeypatch):
    from jobzoo.lines import Lines

    job, rows_before = JobDir(tmp_path / "job"), Lines.rows

    def rows(self, index, which):
        if index == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return rows_before(self, index, which)

    monkeypatch.setattr(Lines, "rows", rows)
    done = launch(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=9")
    assert done.code == 0, done.err
    # It came while the batch of step 2 was read.
    (profile,) = job.profiles.iterdir()
    first = int(profile.name)
    assert steps_in(profile) == [first, first + 1, first + 2] and first in (3, 4, 5)


@pytest.mark.slow
def test_a_profile_that_cannot_be_made_is_said_and_ends_nothing(tmp_path):
    job = JobDir(tmp_path / "job")
    steps = ("--set", "run.profile.steps=2:4")
    succeed(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=1")
    job.profiles.write_text("no directory")
    done = succeed(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=7", *steps[1:])
    assert done.out.count("no profile is recorded of steps 2 to 3, but training continues") == 1
    assert "Not a directory" in done.out
    other = JobDir(tmp_path / "other")
    jax.profiler.start_trace(tmp_path / "of_the_user")
    try:
        done = succeed(
            LINE, f"--job_log_dir={other.path}", "--set", "run.num_train_steps=7", *steps[1:]
        )
    finally:
        jax.profiler.stop_trace()
    assert done.out.count("no profile is recorded of steps 2 to 3, but training continues") == 1
    assert [line["step"] for line in read_json_lines(other.metrics_jsonl)] == list(range(1, 8))


@pytest.mark.nightly
def test_a_trace_that_the_disk_does_not_take_is_lost_and_the_next_is_written(tmp_path):
    job = JobDir(tmp_path / "job")
    succeed(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=1")
    with files_of_at_most(40_000):
        done = launch(
            LINE,
            f"--job_log_dir={job.path}",
            "--set",
            "run.num_train_steps=5",
            "run.profile.steps=2:4",
        )
    assert done.code == 0, done.err
    assert done.out.count("the profile of steps 2 to 3 is lost, but training continues") == 1
    assert "File too large" in done.out
    assert list(job.profiles.iterdir()) == []
    succeed(
        LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=9", "run.profile.steps=6:8"
    )
    assert steps_in(job.profiles / "6") == [6, 7]
    assert runs_in(job.profiles / "6") == dict.fromkeys(range(2), 2)


@pytest.mark.slow
def test_outside_of_the_main_thread_it_is_said_that_sigusr1_is_not_heard(tmp_path):
    done = []
    thread = threading.Thread(
        target=lambda: done.append(
            launch(LINE, f"--job_log_dir={tmp_path}", "--set", "run.num_train_steps=2")
        )
    )
    thread.start()
    thread.join()
    assert done[0].code == 0, done[0].err
    assert "note: SIGUSR1 does not request a profile" in done[0].out
    assert str(tmp_path / "profile.request") in done[0].out


@pytest.mark.slow
def test_a_resumed_job_profiles_the_steps_of_a_range_that_are_left(tmp_path):
    job = JobDir(tmp_path / "job")
    succeed(LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=2")
    done = succeed(
        LINE, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=4", "run.profile.steps=2:4"
    )
    assert "profiled step 3:" in done.out
    assert runs_in(job.profiles / "3") == dict.fromkeys(range(2), 1)


@pytest.mark.slow
def test_a_job_that_is_asked_to_end_gives_its_profile_up_and_its_last_step_none(
    tmp_path, monkeypatch
):
    job = JobDir(tmp_path / "job")
    monkeypatch.setenv("JOBZOO_KILL_AT", "4")
    monkeypatch.setenv("JOBZOO_SIGNAL", "SIGTERM")
    done = launch(TINY, f"--job_log_dir={job.path}", "--set", "run.profile.steps=2:8")
    assert done.code == 0, done.err
    assert "the profile that started with step 2 is discarded" in done.out
    assert "stopped by SIGTERM: step 5 is saved" in done.out
    assert list(job.profiles.iterdir()) == []
    monkeypatch.setenv("JOBZOO_KILL_AT", "6")
    monkeypatch.setenv("JOBZOO_SIGNAL", "SIGUSR1")
    done = launch(TINY, f"--job_log_dir={job.path}")
    assert done.code == 0, done.err
    assert done.out.count("the requested profile is not recorded: no step is left") == 1
