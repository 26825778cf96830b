"""The summary that ends the demo, from files written here by hand."""

import json

import pytest

from praxis_lite.job.job_dir import COMMAND_LINE, JobDir
from praxis_lite.trainer.metrics.records import add_records
from praxis_lite.trainer.summary import summary
from praxis_tools.goodput.goodput import time_section
from tests.support.job_runs import copy_of_trained, launch


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_it_shows_losses_evaluations_continuations_and_places(tmp_path):
    job = JobDir(tmp_path)
    write_lines(job.metrics_jsonl, [{"step": n, "loss": 8.0 - n / 100} for n in range(1, 201)])
    write_lines(
        job.eval_metrics_jsonl,
        [
            {
                "step": 200,
                "dataset": "heldout",
                "loss": 1.75,
                "bits_per_byte": 2.525,
                "gzip_bits_per_byte": 2.5,
            },
            {"step": 100, "dataset": "heldout", "loss": 7.0, "bits_per_byte": 3.0},
        ],
    )
    prompts = [
        {"prompt": f"prompt {n}", "continuation": "two\nlines" if n == 0 else f"tail {n}"}
        for n in range(5)
    ]
    write_lines(job.decode_jsonl("heldout", 200), prompts)
    write_lines(job.decode_jsonl("heldout", 100), [{"prompt": "old", "continuation": "older"}])
    text = summary(job)
    training, evaluation, continuations, places = text.split("\n\n")
    # The first step, the last, and three between.
    assert training.splitlines()[1].split() == ["step", "1", "51", "101", "151", "200"]
    losses = ["7.9900", "7.4900", "6.9900", "6.4900", "6.0000"]
    assert training.splitlines()[2].split() == ["loss", *losses]
    # The newest evaluation only, with gzip's figure beside the model's.
    assert "heldout, step 200: loss 1.7500  bits_per_byte 2.5250" in evaluation
    assert "gzip -9 needs 2.5000 bits per byte" in evaluation and "7.0000" not in evaluation
    # The newest step, three prompts, lines kept apart.
    assert continuations.splitlines()[0] == "Continuations (heldout, step 200, 3 of 5)"
    assert [line.strip() for line in continuations.splitlines()[1:4]] == [
        "prompt    | prompt 0",
        "output | two",
        "| lines",
    ]
    assert "prompt 2" in continuations and "prompt 3" not in continuations
    assert "old" not in continuations
    # What is there, and nothing else.
    assert str(job.metrics_jsonl) in places and "loss curve" not in places
    assert "TensorBoard" not in places


def test_it_shows_where_the_time_of_the_job_and_of_a_step_went(tmp_path):
    job = JobDir(tmp_path)
    times = {
        "step_time": 0.5,
        "input_time": 0.1,
        "dispatch_time": 0.01,
        "device_time": 0.35,
        "evaluation_time": 0.0,
        "save_time": 0.2,
    }
    shares = {"mfu": 0.3, "hfu": 0.4}
    slow = times | {"step_time": 1.5, "mfu": 0.1, "hfu": 0.4 / 3}
    write_lines(
        job.metrics_jsonl,
        [{"step": 1, "loss": 3.0, **times, **shares}, {"step": 2, "loss": 2.0, **slow}],
    )
    stretch = {"launch": 1.7e9, "first_step": 0, "last_step": 2, "ended_by": "the end"}
    write_lines(job.timeline_jsonl, [stretch | {"seconds": {"compile": 6.0, "step": 2.0}}])
    _, time, step, _ = summary(job, more=time_section).replace("\n\n  ", "\n  ").split("\n\n")
    assert time.startswith("Where the time went\n") and "goodput: 25.0%" in time
    assert [line.split() for line in step.splitlines()[1:]] == [
        ["step_time", "1", "s", "100.0%"],
        ["input_time", "0.1", "s", "10.0%"],
        ["dispatch_time", "0.01", "s", "1.0%"],
        ["device_time", "0.35", "s", "35.0%"],
        ["evaluation_time", "0", "s", "0.0%"],
        ["save_time", "0.2", "s", "20.0%"],
        ["mfu", "15.0%"],
        ["hfu", "20.0%"],
    ]


def test_it_says_how_tensorboard_is_had_and_takes_packages_as_the_other_modes_do(tmp_path):
    job = JobDir(tmp_path / "job")
    job.tensorboard.mkdir(parents=True)
    job.config_json.touch()
    done = launch("--mode=summary", f"--job_log_dir={job.path}", "--packages=jobzoo")
    assert (done.code, done.err) == (0, "")
    (line,) = [line for line in done.out.splitlines() if "TensorBoard" in line]
    assert f"tensorboard --logdir={job.tensorboard}" in line
    assert "pip install tensorboard" in line


def test_a_long_line_is_wrapped_and_an_empty_continuation_shown(tmp_path):
    job = JobDir(tmp_path)
    write_lines(job.decode_jsonl("p", 7), [{"prompt": "word " * 50, "continuation": ""}])
    lines = summary(job).split("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.count("word") for line in lines) == 50
    assert lines[-1].strip() == "output |"


def test_the_mode_prints_it_without_a_mesh_or_a_compiler(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    done = launch("--mode=summary", f"--job_log_dir={job.path}")
    assert (done.code, done.err, done.num_compiled) == (0, "", 0)
    assert done.out == summary(job, more=time_section) + "\n"
    for name in ("config.txt", "layout.txt", "metrics.jsonl", "loss_curve.png", "checkpoints"):
        assert str(job.path / name) in done.out


def test_prompts_of_command_lines_are_added_to_one_file_and_the_newest_are_shown(tmp_path):
    job = JobDir(tmp_path)
    path = job.decode_jsonl(COMMAND_LINE, 7)
    for calls in (["a", "b"], ["b", "c"], ["d", "e"]):
        add_records(path, [{"prompt": text, "continuation": text * 3} for text in calls])
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == list("abcde")
    assert [file.name for file in path.parent.iterdir()] == ["7.jsonl"]
    continuations = summary(job).split("\n\n")[0].splitlines()
    assert continuations[0] == "Continuations (command_line, step 7, 3 of 5)"
    assert [line[-1] for line in continuations[1::2]] == ["c", "d", "e"]


def test_texts_of_continuations_may_have_any_letters(tmp_path):
    job = JobDir(tmp_path)
    path = job.decode_jsonl("p", 7)
    add_records(path, [{"prompt": "a\u2028b", "continuation": "c\x85d\x1b[31m"}])
    lines = summary(job).split("\n\n")[0].splitlines()
    assert lines == [
        "Continuations (p, step 7)",
        "  prompt    | a",
        "            | b",
        "     output | c",
        "            | d\\x1b[31m",
    ]


@pytest.mark.parametrize("line", ["7", "{", '"a"', "\udcff", ""])
def test_lines_that_are_no_records_are_counted(line, tmp_path):
    path = JobDir(tmp_path).decode_jsonl("p", 7)
    path.parent.mkdir(parents=True)
    whole = b'{"prompt": "a", "score": 3}\n'
    path.write_bytes(whole + line.encode("utf-8", "surrogateescape") + b"\n" + whole + b'{"prom')
    head, *lines = summary(JobDir(tmp_path)).split("\n\n")[0].splitlines()
    assert head == "Continuations (p, step 7, 2 of 3, unreadable lines: 1)"
    assert lines == 2 * ["  prompt    | a", '     output | {"score": 3}']


def test_lines_of_metrics_may_lack_numbers(tmp_path):
    job = JobDir(tmp_path)
    lines = [{"step": 1}, {"step": 2, "loss": "text"}, {"step": 3, "loss": 7}]
    write_lines(job.metrics_jsonl, lines)
    write_lines(job.eval_metrics_jsonl, [*lines, {"step": 4, "dataset": "h", "loss": None, "a": 1}])
    training, evaluation, _ = summary(job).split("\n\n")
    assert training.splitlines()[2].split() == ["loss", "nan", "nan", "nan", "7.0000", "7.0000"]
    assert evaluation.splitlines()[1:] == ["  , step 3: loss 7.0000", "  h, step 4: a 1.0000"]
