"""A trained job stands alone: its tokenizers are its own, and a mode reads only its data."""

import json
import shutil
import sys

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.config.build import naming_settings
from praxis_lite.config.config_json import dump_config
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.core.callables import callable_name
from praxis_lite.experiment import registry
from praxis_lite.experiment.recorded_job import (
    check_tokenizers,
    copy_tokenizers,
    recorded_config,
    remove_unused,
)
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.job.job_dir import JobDir
from tests.support.goldens import GOLDENS
from tests.support.job_runs import copy_of_trained, launch, loaded

LLAMA = GOLDENS / "tokenizers" / "llama3"
GONE = "datasets.train.corpus.files=/gone/*.txt"  # Of all datasets, which share one corpus.


@pytest.fixture
def recorded(tmp_path):
    """Returns a job's directory with the config of a job whose tokenizer lies elsewhere."""
    tokenizer = tmp_path / "a tokenizer=1"
    shutil.copytree(LLAMA, tokenizer)
    experiment = registry.get_experiment("lm.PyDocs")
    config = configured(experiment, [f"corpus.tokenizer={tokenizer}"])
    job = JobDir(tmp_path / "job")
    job.path.mkdir()
    name = callable_name(experiment)
    job.write_config(dump_config(config, name), [])
    return job, config, tokenizer


def test_a_job_keeps_its_tokenizers_and_reads_its_own(recorded):
    job, config, tokenizer = recorded
    copy_tokenizers(config, job)
    before = load_tokenizer(tokenizer).fingerprint()
    shutil.rmtree(tokenizer)
    local = recorded_config(job, ()).config
    check_tokenizers(local)
    for kept in (
        local.task.tokenizer,
        local.datasets["train"].corpus.tokenizer,
        local.decode_datasets["heldout"].corpus.tokenizer,
    ):
        assert kept == str(job.tokenizers / "0")
    assert load_tokenizer(local.task.tokenizer).fingerprint() == before
    # The corpus is one for all datasets, as before.
    assert local.datasets["train"].corpus is local.datasets["heldout"].corpus


def test_a_job_needs_no_transformers_for_its_copy_of_a_tokenizer(recorded, monkeypatch):
    job, config, tokenizer = recorded
    monkeypatch.setenv("XDG_CACHE_HOME", str(job.path / "cache"))
    (tokenizer / "config.json").write_text('{"model_type": "llama", "eos_token_id": [7, 5]}')
    fields = json.loads((tokenizer / "tokenizer_config.json").read_text())
    fields |= {"tokenizer_class": "LlamaTokenizer"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(fields))
    expected = load_tokenizer(tokenizer)
    ids, ends = expected.encode("né fox").tolist(), expected.eos_ids
    assert expected.directory != tokenizer and set(ends) == {7, 5, expected.eos_id}
    copy_tokenizers(config, job)
    shutil.rmtree(tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", None)
    local = load_tokenizer(recorded_config(job, ()).config.task.tokenizer)
    assert local.encode("né fox").tolist() == ids and local.eos_ids == ends
    assert local.fingerprint() == expected.fingerprint()


def test_a_tokenizer_that_has_changed_is_copied_again(recorded):
    job, config, tokenizer = recorded
    copy_tokenizers(config, job)
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": 7}')
    (tokenizer / "tokenizer_config.json").unlink()
    copy_tokenizers(config, job)
    names = {"tokenizer.json", "generation_config.json", "came_from.txt"}
    assert {path.name for path in (job.tokenizers / "0").iterdir()} == names
    assert len(list(job.tokenizers.iterdir())) == 1


def test_a_tokenizer_that_is_gone_is_said_by_the_settings_that_name_it(recorded):
    job, config, tokenizer = recorded
    shutil.rmtree(tokenizer)  # Of a job that kept none, as former versions did.
    local = recorded_config(job, ()).config
    remove_unused(local, "decode", has_prompts=True)
    with pytest.raises(ConfigError, match=r"tokenizer=1.*--set.*task.tokenizer=DI"):
        check_tokenizers(local)
    whole = recorded_config(job, ()).config
    with pytest.raises(ConfigError, match=r"datasets\.train\.corpus\.tokenizer=DIR"):
        check_tokenizers(whole)


def test_each_mode_keeps_its_own_data_alone(recorded):
    job, config, _ = recorded
    for mode, has_prompts, datasets, decoded in (
        ("eval", False, ["heldout"], []),
        ("decode", False, [], ["heldout"]),
        ("decode", True, [], []),
        ("train", False, ["train", "heldout"], ["heldout"]),
    ):
        local = recorded_config(job, ()).config
        remove_unused(local, mode, has_prompts=has_prompts)
        assert (list(local.datasets), list(local.decode_datasets)) == (datasets, decoded), mode


def test_an_error_about_a_file_names_the_setting(recorded):
    _, config, _ = recorded
    config.datasets["train"].corpus.files = "/data/*.jsonl"
    match = r"datasets\.train\.corpus\.files"
    with pytest.raises(ConfigError, match=match), naming_settings(config):
        raise ConfigError("/data/*.jsonl matches no file.")


@pytest.mark.parametrize(
    ("message", "is_about_setting"),
    [
        ("Sample.temperature is -1; expected 0 or more.", True),
        ("inputs_split_mapping.map_1d: no.", True),
        ("The mesh of mesh.ici_mesh_shape needs 8.", True),
        ("There are no decode datasets. Add decode_datasets().", True),
        ("--set task.decoder.temprature: no such field.", True),
        ("There is no checkpoint of step 3.", False),
        ("The prompt is empty.", False),
        ("It has no such name; it has eos_id, batch_size, max_decode_steps, num_heads.", False),
    ],
)
def test_an_error_about_a_recorded_setting_says_where_it_is_read(
    recorded, message, is_about_setting
):
    job, config, _ = recorded
    with (
        pytest.raises(ConfigError) as error,
        naming_settings(config, job.config_json),
        naming_settings(config, job.config_json),
    ):
        raise ConfigError(message)
    assert str(error.value).count(str(job.config_json)) == is_about_setting


@pytest.mark.parametrize(
    "argv",
    [
        ("--mode=decode", "--prompt=7", "--set", "task.inputs_split_mapping={'map_2d': None}"),
        ("--mode=decode", "--set", "task.decoder.temprature=3"),
        ("--mode=eval", "--set", "task.learner.clip_gradient_norm_to_value=-1"),
    ],
)
def test_a_mode_that_reads_a_job_names_its_config_in_errors(tmp_path, argv):
    job = copy_of_trained(tmp_path / "job")
    done = launch(*argv[:1], f"--job_log_dir={job.path}", *argv[1:])
    assert (done.code, done.num_compiled) == (2, 0)
    assert str(job.config_json) in done.err.replace("\n", " ")
    assert "not from the experiment's class" in " ".join(done.err.split())


def test_moved_data_is_refused_by_its_setting_before_anything_compiles(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    done = launch("--mode=eval", f"--job_log_dir={job.path}", "--set", GONE)
    assert (done.code, done.num_compiled) == (2, 0)
    assert "datasets.heldout.corpus.files" in " ".join(done.err.split())


@pytest.mark.slow
def test_eval_and_decode_need_only_their_own_data(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    gone = [
        f"datasets.train{setting}"
        for setting in (
            "=praxis_lite.inputs.FromSource()",
            ".source=praxis_lite.inputs.JsonLines()",
            ".source.files=/gone/*.jsonl",
            ".batch_size=3",
            ".shuffle=True",
        )
    ]
    done = launch("--mode=eval", f"--job_log_dir={job.path}", "--set", *gone)
    assert done.code == 0 and "step 7  heldout: accuracy" in done.out, done.err
    done = launch("--mode=decode", f"--job_log_dir={job.path}", "--prompt", "7 plus", "--set", GONE)
    assert done.code == 0, done.err
    (record,) = map(json.loads, job.decode_jsonl("command_line", 7).read_text().splitlines())
    assert record["prompt"] == "7 plus"
    model = loaded(job, settings=[GONE])
    assert model.generate("7 plus")[0]["continuation"] == record["continuation"]
    with pytest.raises(ConfigError, match=r"datasets\.heldout\.corpus\.files"):
        model.evaluate("heldout")
    assert np.isfinite(
        model.evaluate(
            {
                "ids": np.ones((3, 5), np.int32),
                "labels": np.ones((3, 5), np.int32),
            }
        )["loss"]
    )
