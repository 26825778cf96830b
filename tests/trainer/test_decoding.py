"""--mode=decode and --mode=eval: the job's directory is all they need."""

import json
import os
import re
import shutil
from pathlib import Path

import fiddle as fdl
import pytest

from praxis_lite.config.config_json import dump_config, load_config_file
from praxis_lite.decode import BeamSearch
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import copy_of_trained, launch, start_process, succeed
from tests.support.line_jobs import LINE

ONE_DEVICE = "mesh.ici_mesh_shape=1,1,1"
SAMPLE = (
    "task.decoder.temperature=1.5",
    "task.decoder.num_samples=3",
    "decode_datasets.prompts.batch_size=2",
)


def records(job, dataset="prompts", step=7):
    text = job.decode_jsonl(dataset, step).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def decode(job, *settings):
    """Returns the records and what was printed; on the job's own mesh unless it is set."""
    setting = ("--set", *settings) if settings else ()
    done = succeed("--mode=decode", f"--job_log_dir={job.path}", *setting)
    return records(job), done.out


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """The job that was trained on (1, 4, 2), decoded greedily on one device: job, records."""
    job = copy_of_trained(tmp_path_factory.mktemp("decoded") / "job")
    lines, out = decode(job, ONE_DEVICE)
    assert "restored the weights of step 7" in out
    assert f"decoded 3 records of prompts with the weights of step 7: {job.path}" in out
    return job, lines


@pytest.fixture(scope="module")
def sampled(decoded):
    """Three samples of each prompt, decoded in batches of two."""
    return decode(decoded[0], ONE_DEVICE, *SAMPLE)[0]


def test_decode_writes_a_json_line_per_prompt(decoded):
    job, lines = decoded
    # Three prompts in a batch of five: the fillers are not decoded.
    assert len(lines) == 3
    for line in lines:
        # A prompt is the end of text that begins every document, and 2 to 7 bytes of one.
        assert 3 <= line["prefix_length"] == 1 + len(line["prompt"]) <= 8
        assert 1 <= line["decode_length"] == len(line["output_ids"]) <= 5
        assert line["ended"] == (line["output_ids"][-1] in (256, 3))
        assert line["log_prob"] < 0
        if not line["ended"] and all(token < 128 for token in line["output_ids"]):
            assert line["continuation"] == bytes(line["output_ids"]).decode()
    assert len({line["prefix_length"] for line in lines}) > 1, "the prompts are not ragged"
    assert os.listdir(job.decode_jsonl("prompts", 7).parent) == ["7.jsonl"]


def assert_same_tokens(actual, expected):
    for item, other in zip(actual, expected, strict=True):
        assert item["log_prob"] == pytest.approx(other["log_prob"], abs=1e-4)
        about = {"log_prob": 0, "score": 0}
        assert item | about == other | about


@pytest.mark.slow
def test_decode_runs_from_another_directory_on_the_jobs_mesh_with_the_same_tokens(
    decoded, tmp_path
):
    job, expected = decoded
    process = start_process("--mode=decode", f"--job_log_dir={job.path}", cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert "(replica 1, data 4, mdl 2): 8 simulated CPU devices" in out
    assert_same_tokens(records(job), expected)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_sampling_is_set_on_the_command_line(decoded, sampled):
    job, greedy = decoded
    assert [line["prompt"] for line in sampled[::3]] == [line["prompt"] for line in greedy]
    assert [line["sample"] for line in sampled] == [0, 1, 2] * 3
    for i in range(0, 9, 3):
        assert sampled[i]["score"] >= sampled[i + 1]["score"] >= sampled[i + 2]["score"]
        assert len({tuple(line["output_ids"]) for line in sampled[i : i + 3]}) > 1
    other_seed, _ = decode(job, ONE_DEVICE, *SAMPLE, "run.seed=7")
    assert [line["output_ids"] for line in other_seed] != [line["output_ids"] for line in sampled]
    # The config of the job stays what it was trained with.
    assert "temperature=1.5" not in job.config_txt.read_text()


@pytest.mark.slow
def test_records_of_other_settings_are_kept_beside_and_said(decoded, tmp_path):
    job = JobDir(Path(shutil.copytree(decoded[0].path, tmp_path / "job")))
    path = job.decode_jsonl("prompts", 7)
    before = path.read_bytes()
    lines, out = decode(job, ONE_DEVICE, "task.decoder.max_decode_steps=2")
    assert max(line["decode_length"] for line in lines) == 2
    former = path.with_name(f"{path.name}.{len(os.listdir(path.parent)) - 1}")
    assert former.read_bytes() == before
    assert f"{path} contained different records, which were moved to {former.name}" in out
    # The same records again are no others.
    names = sorted(os.listdir(path.parent))
    again, out = decode(job, ONE_DEVICE, "task.decoder.max_decode_steps=2")
    assert again == lines and sorted(os.listdir(path.parent)) == names
    assert "other records" not in out


@pytest.mark.slow
def test_continuous_batching_on_a_mesh_gives_the_tokens_of_batches_and_says_its_steps(
    decoded, sampled
):
    actual, out = decode(decoded[0], *SAMPLE, "task.decoder.num_cache_slots=4")
    for item, other in zip(actual, sampled, strict=True):
        assert item["score"] == pytest.approx(other["score"], abs=1e-4)
    assert_same_tokens(actual, sampled)
    message = re.search(r"9 rows of prompts took (\d+) model steps, 4 rows at a time", out)
    num_steps = int(message[1])
    lengths = [line["decode_length"] for line in sampled]
    assert sum(lengths) / 4 <= num_steps <= sum(lengths) / 4 + max(lengths)


@pytest.mark.slow
def test_a_stop_string_ends_the_text_before_it(decoded):
    job, greedy = decoded
    text = greedy[0]["continuation"]
    stop = text[2:4]
    assert text.isascii() and len(stop) == 2
    actual, _ = decode(job, ONE_DEVICE, f'task.decoder.stop_strings=["{stop}"]')
    cut = text.index(stop)
    assert actual[0]["continuation"] == text[:cut] and actual[0]["ended"]
    assert actual[0]["output_ids"] == greedy[0]["output_ids"][: cut + 2]


@pytest.mark.slow
def test_a_beam_holds_the_likeliest_that_end(decoded):
    job, _ = decoded
    loaded = load_config_file(job.config_json, packages=["jobzoo"])
    copy = JobDir(Path(shutil.copytree(job.path, job.path.parent / "beam")))
    loaded.config.task.decoder = fdl.Config(
        BeamSearch, beam_size=4, max_decode_steps=5, eos_id=(256, 10)
    )
    copy.write_config(dump_config(loaded.config, loaded.experiment), [])
    lines, _ = decode(copy)
    assert len(lines) == 12
    for line in lines:
        assert line["output_ids"][-1] in (256, 10) and line["ended"]
        norm = ((line["decode_length"] + 5) / 5) ** 0.8
        assert line["score"] == pytest.approx(line["log_prob"] / norm, abs=1e-4)


def test_eval_gives_the_numbers_of_the_end_of_training(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    before = read_json_lines(job.eval_metrics_jsonl)
    done = succeed("--mode=eval", f"--job_log_dir={job.path}")
    after = read_json_lines(job.eval_metrics_jsonl)
    assert after[:-1] == before
    assert after[-1] == before[-1] and after[-1]["step"] == 7
    assert f"step 7  heldout: accuracy {before[-1]['accuracy']:.4f}" in done.out


@pytest.mark.slow
def test_eval_on_another_mesh_gives_the_same_numbers(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    succeed("--mode=eval", f"--job_log_dir={job.path}", "--set", "mesh.ici_mesh_shape=1,1,1")
    trained_on_eight, on_one = read_json_lines(job.eval_metrics_jsonl)[-2:]
    assert trained_on_eight.keys() == on_one.keys()
    for name, value in on_one.items():
        if not isinstance(value, str):
            assert value == pytest.approx(trained_on_eight[name], abs=1e-5)


@pytest.mark.parametrize(
    ("mode", "words"),
    [("decode", "no decode datasets. Pass --prompt TEXT"), ("eval", "no evaluation dataset")],
)
def test_nothing_to_decode_or_evaluate_is_said(mode, words, tmp_path):
    job = copy_of_trained(tmp_path / "job")
    loaded = load_config_file(job.config_json, packages=["jobzoo"])
    loaded.config.decode_datasets = {}
    del loaded.config.datasets["heldout"]
    job.write_config(dump_config(loaded.config, loaded.experiment), [])
    done = launch(f"--mode={mode}", f"--job_log_dir={job.path}")
    assert (done.code, done.num_compiled) == (2, 0)
    assert words in " ".join(done.err.split())


def test_a_task_that_does_not_continue_text_is_not_asked_for_prompts(tmp_path):
    succeed(LINE, f"--job_log_dir={tmp_path}", "--set", "run.num_train_steps=1")
    done = launch("--mode=decode", f"--job_log_dir={tmp_path}")
    assert done.code == 2 and "decode_datasets()" in done.err and "--prompt" not in done.err


def test_a_file_of_decoded_prompts_is_whole_or_absent(decoded, monkeypatch):
    from praxis_lite.tasks.language_model import LanguageModelTask

    job, _ = decoded
    before = job.decode_jsonl("prompts", 7).read_text()

    def broken(*args):
        raise RuntimeError("in the middle of the prompts")

    monkeypatch.setattr(LanguageModelTask, "decode_to_records", broken)
    with pytest.raises(AssertionError, match="in the middle of the"):  # It did not succeed.
        decode(job, ONE_DEVICE)
    assert job.decode_jsonl("prompts", 7).read_text() == before
