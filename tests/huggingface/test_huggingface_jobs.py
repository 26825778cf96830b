"""Jobs that begin with models of Hugging Face, and what is written of them."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from praxis_lite import ConfigError
from praxis_lite.main import main as launch
from tests.support.commands import praxis
from tests.support.goldens import GOLDENS
from tests.support.log_lines import terminal_text

PHI3 = GOLDENS / "hf/phi3"
UNEVEN = "mesh.ici_mesh_shape=1,4,2"


def test_a_job_is_begun_and_written_again_bit_for_bit(tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    for file in PHI3.glob("*"):
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "hf/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert praxis("hf", "import", tmp_path / "hf", tmp_path / "job", "--set", UNEVEN) == 0
    message = terminal_text(capsys.readouterr().out)
    num_bytes = sum(4 * x.size for x in load_file(PHI3 / "model.safetensors").values())
    assert f"\nread {num_bytes / 2**10:.1f} KiB in " in f"\n{message}"
    kept = f"HF_DIR={tmp_path}/job/huggingface"
    assert (
        f"created {tmp_path / 'job'}: continue with praxis train huggingface.CausalLm "
        f"--job_log_dir={tmp_path / 'job'} --set {kept} {UNEVEN}\n"
    ) in message
    # The directory that it came from is no longer needed.
    (tmp_path / "hf").rename(tmp_path / "gone")
    assert praxis("hf", "export", tmp_path / "job", tmp_path / "out") == 0
    expected = load_file(tmp_path / "gone/model.safetensors")
    actual = load_file(tmp_path / "out/model.safetensors")
    assert {name: x.tobytes() for name, x in actual.items()} == {
        name: x.tobytes() for name, x in expected.items()
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == json.loads((PHI3 / "config.json").read_text())
    assert (tmp_path / "out/tokenizer_config.json").read_text() == '{"eos_token": "</s>"}'
    assert praxis("hf", "export", tmp_path / "job", tmp_path / "wide", "--dtype", "float32") == 0
    wide = load_file(tmp_path / "wide/model.safetensors")
    for name, x in expected.items():
        np.testing.assert_array_equal(wide[name], x.astype(np.float32))
    assert json.loads((tmp_path / "wide/config.json").read_text())["torch_dtype"] == "float32"
    assert praxis("hf", "import", tmp_path / "gone", tmp_path / "job") == 2
    assert f"{tmp_path}/job already has a job" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_an_experiment_begins_with_its_weights(tmp_path, capsys):
    data = [
        f"datasets.{name}{setting}"
        for name in ("train", "heldout")
        for setting in (
            "=praxis_lite.inputs.SyntheticLm()",
            ".vocab_size=101",
            ".batch_size=8",
            ".seq_len=16",
        )
    ]
    launch(
        [
            "--exp=huggingface.CausalLm",
            f"--job_log_dir={tmp_path / 'job'}",
            "--set",
            f"HF_DIR={PHI3}",
            f"run.init_from_huggingface={PHI3}",
            "run.num_train_steps=1",
            "task.learner.learning_rate=0.0",
            UNEVEN,
            *data,
            "datasets.heldout.num_batches=1",
        ]
    )
    assert f"12 weights from {PHI3}" in capsys.readouterr().out
    assert praxis("hf", "export", tmp_path / "job", tmp_path / "out") == 0
    actual = load_file(tmp_path / "out/model.safetensors")
    for name, x in load_file(PHI3 / "model.safetensors").items():
        assert actual[name].tobytes() == x.tobytes()


def test_an_import_that_is_refused_leaves_none_of_its_files(tmp_path, capsys):
    assert praxis("hf", "import", PHI3, tmp_path / "job", "--set", "run.num_steps=3") == 2
    assert " run.num_train_steps" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "job").iterdir()] == [".training"]


@pytest.mark.slow
def test_a_job_goes_on_by_what_it_keeps_itself(tmp_path, capsys):
    shutil.copytree(PHI3, tmp_path / "hf")
    settings = [UNEVEN, "run.num_train_steps=1", "task.learner.learning_rate=0.0"]
    settings += [
        f"datasets.{name}{setting}"
        for name in ("train", "heldout")
        for setting in (
            "=praxis_lite.inputs.SyntheticLm()",
            ".vocab_size=101",
            ".batch_size=8",
            ".seq_len=16",
            ".num_batches=1",
        )
    ]
    assert praxis("hf", "import", tmp_path / "hf", tmp_path / "job", "--set", *settings) == 0
    (words,) = re.findall("continue with praxis (.*)", capsys.readouterr().out)
    shutil.rmtree(tmp_path / "hf")
    launch(shlex.split(words))
    assert "step 1/1" in capsys.readouterr().out
    assert praxis("hf", "export", tmp_path / "job", tmp_path / "out") == 0
    actual = load_file(tmp_path / "out/model.safetensors")
    for name, x in load_file(PHI3 / "model.safetensors").items():
        assert actual[name].tobytes() == x.tobytes()


def test_a_job_of_another_kind_is_not_written(tmp_path):
    job = tmp_path / "job"
    job.mkdir()
    (job / "config.json").write_text("{}")
    from praxis_lite.huggingface.jobs import export_job

    with pytest.raises(ConfigError, match=r"run\.init_from_huggingface"):
        export_job(job, tmp_path / "out")
