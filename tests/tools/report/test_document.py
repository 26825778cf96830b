"""The document of a report's page, against the files that it is made of, read by Python's json."""

import base64
import collections
import contextlib
import datetime
import json
import math
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.trainer.summary import summary
from praxis_tools.profile.tables import PROFILE_TXT
from praxis_tools.report.document import MAX_CHARS_OF_SAMPLES, SPENT, document
from praxis_tools.report.job_reader import JobReader
from praxis_tools.report.report import Report
from praxis_tools.report.text import report_text
from tests.support.written_jobs import (
    LAYOUT,
    certificate_line,
    change_line,
    nonsense_job,
    training_lines,
    written_job,
)

NOW = datetime.datetime(2026, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
HOSTILE = "</script><script>document.title=7</script><!--<img src=x onerror=a>{{title}}{{document}}"


def read(jobs):
    """Returns the state of each job, as the report reads it."""
    max_chars = MAX_CHARS_OF_SAMPLES // len(jobs)
    return [JobReader(name, job).read(max_chars) for name, job in jobs.items()]


def document_in(text):
    (found,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def document_of(jobs):
    """Returns the document as it stands in the page."""
    states = read(jobs)
    return document_in(Report(states, NOW).page())


def numbers(text, dtype="<f4"):
    return np.frombuffer(base64.b64decode(text), dtype)


def lines_of(job):
    return [json.loads(line) for line in job.metrics_jsonl.read_text().splitlines()]


def test_a_short_jobs_curves_are_its_files_numbers_bit_for_bit(tmp_path):
    jobs = {
        name: written_job(tmp_path / name, training_lines(37, seed))
        for seed, name in enumerate("ab")
    }
    actual = document_of(jobs)
    assert actual["metrics"][0] == "loss"
    for name, of_job in zip(jobs, actual["jobs"], strict=True):
        lines = lines_of(jobs[name])
        columns = {key: np.array([line[key] for line in lines]) for key in lines[0]}
        for metric in actual["metrics"]:
            expected = columns[metric].astype("f4")
            np.testing.assert_array_equal(numbers(of_job["metrics"][metric]["mean"]), expected)
            assert of_job["metrics"][metric].keys() == {"mean"}
            assert of_job["last"][metric] == pytest.approx(lines[-1][metric], rel=1e-15)
        for part in SPENT:
            np.testing.assert_array_equal(
                numbers(of_job["spent"][part]), columns[part].astype("f4")
            )
        axes = {axis: numbers(text, "<f8") for axis, text in of_job["axes"].items()}
        np.testing.assert_array_equal(axes["steps"], columns["step"])
        np.testing.assert_array_equal(axes["tokens"], 512 * columns["step"])
        seconds = columns["step_time"] + columns["save_time"] + columns["evaluation_time"]
        np.testing.assert_allclose(axes["hours"], np.cumsum(seconds) / 3600, rtol=1e-12)
    assert set(actual["metrics"]) == {
        "loss",
        "accuracy",
        "grad_norm",
        "learning_rate",
        "step_time",
        "tokens_per_second",
    }


def test_a_long_jobs_page_keeps_every_extreme_and_is_of_limited_size(tmp_path):
    lines = training_lines(5_003)
    for step, loss in ((1_234, 77.5), (3_456, -3.25), (4_321, math.inf), (4_400, math.nan)):
        lines[step - 1]["loss"] = loss
    jobs = {"long": written_job(tmp_path / "long", lines)}
    (of_job,) = document_of(jobs)["jobs"]
    steps, curve = numbers(of_job["axes"]["steps"], "<f8"), of_job["metrics"]["loss"]
    mean, low, high = (numbers(curve[name]) for name in ("mean", "min", "max"))
    assert len(steps) == len(mean) == len(low) == len(high) <= 2_000
    before = np.concatenate([[0], steps[:-1]])
    losses = np.array([line["loss"] for line in lines])
    for bucket, (first, last) in enumerate(zip(before, steps, strict=True)):
        values = losses[int(first) : int(last)]
        values = values[~np.isnan(values)]
        finite = values[np.isfinite(values)]
        assert (low[bucket], high[bucket]) == (np.float32(values.min()), np.float32(values.max()))
        assert mean[bucket] == pytest.approx(finite.mean(), rel=1e-6)
    assert high.max() == math.inf and low.min() == -3.25 and 77.5 in high
    assert steps[-1] == 5_003 and of_job["last_step"] == 5_003


def test_a_page_of_very_many_jobs_has_fewer_points_of_each(tmp_path):
    job = written_job(tmp_path / "job", training_lines(1_009))
    states = read({"job": job}) * 300
    text = Report(states, NOW).page()
    assert len(text.encode()) < 5_000_000
    assert len(numbers(document_in(text)["jobs"][7]["axes"]["steps"], "<f8")) >= 40


def test_evaluations_stand_where_the_job_was_at_their_steps(tmp_path):
    evaluations = [
        {"step": step, "dataset": dataset, "loss": step / 7, "accuracy": 0.5}
        for step in (13, 26, 37)
        for dataset in ("heldout", "code")
    ]
    evaluations[2]["loss"] = math.nan
    job = written_job(tmp_path / "job", training_lines(37), evaluations=evaluations)
    (of_job,) = document_of({"job": job})["jobs"]
    assert set(of_job["evaluations"]) == {"heldout", "code"}
    points = of_job["evaluations"]["heldout"]["loss"]
    np.testing.assert_array_equal(
        numbers(points["values"]), np.array([13 / 7, math.nan, 37 / 7], "f4")
    )
    np.testing.assert_array_equal(numbers(points["axes"]["steps"], "<f8"), [13, 26, 37])
    np.testing.assert_array_equal(
        numbers(points["axes"]["tokens"], "<f8"), 512 * np.array([13, 26, 37])
    )


def test_a_users_rate_is_no_axis(tmp_path):
    lines = training_lines(7, **{"hours_per_second": 3.0, "steps_per_second": 2.0})
    (of_job,) = document_of({"job": written_job(tmp_path / "a", lines)})["jobs"]
    for line in lines:
        del line["tokens_per_second"]
    (other,) = document_of({"job": written_job(tmp_path / "b", lines)})["jobs"]
    assert of_job["axes"].keys() - other["axes"].keys() == {"tokens"}
    assert other["axes"]["steps"] == of_job["axes"]["steps"]
    assert other["axes"]["hours"] == of_job["axes"]["hours"]


def test_many_evaluations_keep_the_page_small(tmp_path):
    evaluations = [
        {"step": step, "dataset": f"set {number}", **{f"m{i}": step / (i + 1) for i in range(12)}}
        for number in range(5)
        for step in range(1, 701)
    ]
    (state,) = read(
        {"job": written_job(tmp_path / "job", training_lines(7), evaluations=evaluations)}
    )
    made = document(5 * [state], written=NOW, reload_seconds=None)
    assert len(Report(5 * [state], NOW).page().encode()) < 5_000_000
    points = made["jobs"][4]["evaluations"]["set 4"]["m11"]
    assert points["num"] == 700 and numbers(points["values"])[-1] == np.float32(700 / 12)


def test_differing_settings_are_shown_and_equal_ones_counted(tmp_path):
    jobs = {
        "a": written_job(tmp_path / "a", settings=["lr=1", "a.b=x=y", "same=1"]),
        "b": written_job(tmp_path / "b", settings=["lr=2", "a.b=x=y", "same=1", "more=3"]),
        "c": written_job(tmp_path / "c", settings=["lr=2", "a.b=z", "same=1"]),
    }
    config = document_of(jobs)["config"]
    assert config["rows"] == [
        ["lr", ["1", "2", "2"]],
        ["a.b", ["x=y", "x=y", "z"]],
        ["more", [None, "3", None]],
    ]
    assert config["num_equal"] == 3  # run.seed, task.model, same.


def test_skipped_steps_and_loss_spikes_are_marked(tmp_path):
    lines = training_lines(29, is_loss_spike=0)
    lines[6]["is_loss_spike"] = 1
    for step, in_a_row in ((11, 1), (12, 2), (23, 1)):
        lines[step - 1] |= {"num_skipped_in_a_row": in_a_row, "loss": math.nan}
    (of_job,) = document_of({"job": written_job(tmp_path / "job", lines)})["jobs"]
    steps = {
        kind: numbers(marks["steps"], "<f8").tolist() for kind, marks in of_job["marks"].items()
    }
    assert steps == {"skipped": [11, 12, 23], "spikes": [7]}
    assert of_job["last"]["loss"] == pytest.approx(lines[-1]["loss"])


def test_where_the_time_went_is_what_the_jobs_goodput_says(tmp_path):
    seconds = [{"import": 3.5, "compile": 10, "step": 60, "save": 2}, {"import": 4, "step": 30}]
    timeline = [
        {
            "launch": 1e9 + 100 * number,
            "first_step": 7 * number,
            "last_step": 7 * number + 7,
            "seconds": of_launch,
            "ended_by": ["SIGTERM", "the end"][number],
        }
        for number, of_launch in enumerate(seconds)
    ]
    job = written_job(tmp_path / "job", training_lines(14), timeline=timeline)
    (of_job,) = document_of({"job": job})["jobs"]
    goodput = of_job["goodput"]
    shown = {kind: value for kind, value in goodput["seconds"].items() if value}
    assert shown == {"import": 7.5, "compile": 10, "step": 90, "save": 2, "idle": 24.5}
    assert goodput["total"] == 134
    assert numbers(of_job["marks"]["restarts"]["steps"], "<f8").tolist() == [7]
    assert [launch["ended_by"] for launch in goodput["launches"]] == ["SIGTERM", "the end"]


def test_a_job_that_stopped_early_has_ended_and_one_that_was_killed_was_stopped(tmp_path):
    states = {}
    for ended_by in ("the end", "SIGTERM", None):
        launch = {
            "launch": 1e9,
            "first_step": 0,
            "last_step": 7,
            "seconds": {"step": 3},
            "ended_by": ended_by,
        }
        job = written_job(
            tmp_path / str(ended_by),
            training_lines(7),
            timeline=[launch],
            settings=["run.num_train_steps=13"],
        )
        states[ended_by] = read({"job": job})[0].state
    assert states == {"the end": "has ended", "SIGTERM": "was stopped", None: "was stopped"}


def test_samples_are_there_by_step_and_what_has_no_room_is_said(tmp_path):
    records = [
        {"prompt": f"prompt {number}", "continuation": "word " * number} for number in range(23)
    ]
    samples = {
        "prompts/7": records,
        "prompts/14": [{"prompt": "p", "continuation": "q"}],
        "command_line/7": records,
    }
    job = written_job(tmp_path / "job", samples=samples)
    (job.path / "decode/prompts/7.jsonl.1").write_text("former records")
    (job.path / "decode/prompts/21.jsonl").write_text('{"prompt": "cut", "conti')
    (of_job,) = document_of({"job": job})["jobs"]
    pairs = [[record["prompt"], record["continuation"]] for record in records]
    assert of_job["samples"] == {
        "prompts": {"7": pairs[:20], "14": [["p", "q"]]},
        "command_line": {"7": pairs[-20:]},
    }
    state = JobReader("job", job).read(max_chars=100)
    assert state.samples == {"prompts": {14: [("p", "q")]}}
    assert any("2 files" in note for note in state.notes)


def test_the_arrays_of_the_layout_are_those_of_layout_json(tmp_path):
    (of_job,) = document_of({"job": written_job(tmp_path / "job")})["jobs"]
    assert of_job["layout"]["num_arrays"] == 3
    assert of_job["layout"]["largest"][:2] == [
        LAYOUT["arrays"][1],
        LAYOUT["arrays"][2],
    ]
    assert of_job["layout"]["totals"].startswith("2 weights with 104 parameters;")


def test_profiles_are_shown_as_their_hook_wrote_them(tmp_path):
    job = written_job(tmp_path / "job", training_lines(7))
    for step in (3, 20, 100, 5):
        folder = job.profiles / str(step)
        folder.mkdir(parents=True)
        (folder / PROFILE_TXT).write_text(f"table of {step}{HOSTILE}\n")
    (job.profiles / "no step").mkdir()
    (of_job,) = document_of({"job": job})["jobs"]
    assert of_job["profiles"] == {str(step): f"table of {step}{HOSTILE}\n" for step in (5, 20, 100)}


def test_a_job_without_anything_and_damaged_files_are_shown_with_notes(tmp_path):
    empty = written_job(tmp_path / "empty", layout=None)
    empty.config_txt.unlink()
    damaged = written_job(tmp_path / "damaged", training_lines(3), layout={"arrays": [{}]})
    with damaged.metrics_jsonl.open("a") as file:
        file.write('{"step": nonsense}\n{"step": 4, "lo')
    damaged.eval_metrics_jsonl.write_text("no line\n{}\n")
    damaged.timeline_jsonl.write_text('{"launch": "long ago"}\n\0\n')
    actual = document_of({"empty": empty, "damaged": damaged})
    assert [job["last_step"] for job in actual["jobs"]] == [0, 3]
    notes = collections.Counter(note.partition(":")[0] for note in actual["notes"])
    assert notes == {"empty": 2, "damaged": 3}
    assert actual["jobs"][1]["goodput"] is None


@pytest.mark.parametrize("seed", range(23))
def test_files_of_nonsense_end_no_report(tmp_path, seed):
    job = nonsense_job(tmp_path / "job", seed)
    states = read({"job": job})
    text = Report(states, NOW).page()
    assert len(document_in(text)["jobs"]) == 1 and report_text(states)
    with contextlib.suppress(ConfigError):  # Of a damaged line.
        assert summary(job)


def test_names_settings_and_samples_stay_text_in_the_page(tmp_path):
    array = LAYOUT["arrays"][0] | {"path": HOSTILE, "spec": HOSTILE}
    job = written_job(
        tmp_path / "job",
        training_lines(7, **{HOSTILE: 1.5}),
        evaluations=[{"step": 7, "dataset": HOSTILE, "loss": 2.0, HOSTILE: 3.0}],
        settings=[f"a={HOSTILE}"],
        samples={"prompts/7": [{"prompt": HOSTILE, "continuation": HOSTILE}]},
        experiment=HOSTILE,
        layout={"totals": HOSTILE, "arrays": [array]},
    )
    states = read({HOSTILE: job})
    text = Report(states, NOW).page()
    template = (resources.files("praxis_tools.report") / "report_page.html").read_text("utf-8")
    for tag in ("<script", "</script", "<img", "<!--"):
        assert text.count(tag) == template.count(tag), tag
    actual = document_in(text)
    (of_job,) = actual["jobs"]
    assert of_job["name"] == of_job["experiment"] == HOSTILE
    assert HOSTILE in actual["metrics"] and HOSTILE in of_job["evaluations"]
    assert of_job["samples"]["prompts"]["7"] == [[HOSTILE, HOSTILE]]
    # What draws makes text nodes only, and a policy forbids what is not in the page.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", template)
    assert "Content-Security-Policy" in template and "http" not in re.sub(
        r'http-equiv|"http://www.w3.org/2000/svg"', "", template
    )


def test_the_page_is_among_the_files_that_an_installation_copies():
    project = Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    assert '"praxis_tools.report" = ["report_page.html"]' in project


ELASTIC = [
    change_line(1, "start", 0, 8),
    change_line(2, "died", 11, 7),
    {**change_line(3, "failed", 13, 7), "reached": False, "from_step": None, "mesh": None},
    change_line(4, "left", 7, 5),
    change_line(5, "came", 23, 8),
]
DIFFERENCE = {"cause": "device", "device": "device 3", "layer": "w", "leaf": "mdl_vars/params/w/a"}


def test_changes_of_hands_and_certificates_stand_over_the_curve_and_in_the_text(tmp_path):
    timeline = [
        {"launch": 1e9 + 100 * k, "first_step": step, "last_step": step + 1, "seconds": {}}
        for k, step in enumerate((0, 11, 7, 23))
    ]
    job = written_job(
        tmp_path / "job",
        training_lines(37),
        elastic=ELASTIC,
        timeline=timeline,
        certificates=[certificate_line(5), certificate_line(10), certificate_line(15, DIFFERENCE)],
    )
    (of_job,) = document_of({"job": job})["jobs"]
    marks = {kind: numbers(mark["steps"], "<f8").tolist() for kind, mark in of_job["marks"].items()}
    assert marks == {"regroupings": [11, 7, 23], "certified": [5, 10], "differences": [15]}
    # Steps 8 to 11 of seven devices were lost: five made them for good.
    assert numbers(of_job["devices"]["axes"]["steps"], "<f8").tolist() == [0, 7, 23]
    assert of_job["devices"]["num"] == [8, 5, 8]
    tokens = numbers(of_job["regroupings"][1]["axes"]["tokens"], "<f8")
    np.testing.assert_array_equal(tokens, [11 * 512])
    assert [change["generation"] for change in of_job["regroupings"] if not change["axes"]] == [3]
    assert of_job["regroupings"][3]["mesh"] == "replica 1, data 5, mdl 1"
    text = report_text(read({"job": job}))
    assert "regroupings: 3, and 1 without a completed step; devices: 8 -> 7 -> 5 -> 8" in text
    assert re.search(r"^ +2 +11 +2 +7 +3\.0 .*died: process 3 \(host\) died", text, re.MULTILINE)
    assert "(no step completed)" in text
    assert "3 certificates of 33 comparisons, 1 found a difference" in text
    assert "step 15 is NOT CERTIFIED: cause device, device device 3, layer w, leaf" in text
