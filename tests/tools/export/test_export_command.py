"""`praxis export`: a job's directory, or Hugging Face's, as an artifact."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.huggingface import load as load_huggingface
from praxis_lite.job.job_dir import JobDir
from praxis_tools.export import load as loader
from tests.support.commands import praxis
from tests.support.job_runs import CHECKOUT, home, loaded, succeed, trained

LLAMA = Path(__file__).parents[2] / "goldens/hf/llama"


def refused(capsys, *argv):
    assert praxis("export", *argv) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def packages(monkeypatch):
    monkeypatch.syspath_prepend(home())
    monkeypatch.setenv("XDG_CACHE_HOME", str(home() / "cache"))
    return "--packages=jobzoo"


@pytest.mark.slow
def test_a_jobs_decoding_and_predictions_are_those_of_load(tmp_path, packages):
    job, _ = trained()
    sampling = "task.decoder.temperature=1.2"
    settings = ["mesh.ici_mesh_shape=1,2,2", sampling]
    for what, more in (("decode", []), ("predict", ["--batch=5", "--length=6"])):
        assert (
            praxis(
                "export",
                job.path,
                str(tmp_path / what),
                f"--what={what}",
                packages,
                *more,
                "--step=7",
                "--mesh=1,2,2",
                "--set",
                sampling,
            )
            == 0
        )
    model = loaded(job, mesh="job", settings=settings)
    (batch,) = model.job.decode_datasets["prompts"].batches()
    key = model.partitioner.batch_key(0, model.step, 0)
    outputs = loader.load(tmp_path / "decode")({**batch, "key": jax.random.key_data(key)})
    records = model.partitioner.task.decode_to_records(batch, outputs)
    assert records == model.decode("prompts") and len(records) == 3
    ids = np.arange(1, 31, dtype=np.int32).reshape(5, 6)
    logits, cache = loader.load(tmp_path / "predict")({"ids": ids})
    np.testing.assert_array_equal(logits, model.predict(ids)[0])
    assert cache is None
    about = json.loads((tmp_path / "decode/manifest.json").read_text())
    assert about["step"] == 7 and about["experiment"] == "jobzoo.experiments.Tiny"
    assert about["tokenizer"]["eos_ids"] == [256, 3] and about["decoder"]["class"] == "Sample"


@pytest.mark.slow
def test_averages_are_exported_where_the_job_decodes_with_them(tmp_path, packages):
    job, out = tmp_path / "job", tmp_path / "out"
    succeed(
        "--exp=jobzoo.experiments.Tiny",
        f"--job_log_dir={job}",
        "--set",
        "run.num_train_steps=2",
        "mesh.ici_mesh_shape=1,1,1",
        "task.learner.ema_decay=0.5",
        "run.decode_use_ema_states=true",
    )
    assert praxis("export", job, out, "--what=decode", packages, "--batch=1", "--length=2") == 0
    model = loaded(JobDir(job))
    with np.load(out / "weights.npz") as file:
        weights = dict(file)
    differing = set()
    for use_ema in (False, True):
        mdl_vars = model.partitioner.for_decoding(model.mdl_vars_with(use_ema=use_ema))
        expected = dict(leaves_with_path(mdl_vars))
        assert weights.keys() == expected.keys()
        differs = any((weights[path] != x).any() for path, x in expected.items())
        differing |= {use_ema} if differs else set()
    assert differing == {False}


@pytest.mark.slow
def test_the_lines_of_the_page_run(tmp_path, packages):
    job, _ = trained()
    assert (
        praxis(
            "export",
            job.path,
            str(tmp_path / "OUT"),
            "--what=decode",
            packages,
            "--batch=1",
            "--length=3",
            "--mesh=1,1,1",
        )
        == 0
    )
    page = (CHECKOUT / "docs/exporting.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    ids = [int(word) for word in done.stdout.strip("[]\n").split()]
    model = loaded(job, mesh="job", settings=["mesh.ici_mesh_shape=1,1,1"])
    (record,) = model.generate([[84, 104, 101]])
    assert ids == record["output_ids"] and len(ids) > 0


@pytest.mark.slow
def test_a_model_of_hugging_face_continues_as_it_does_in_python(tmp_path):
    out = tmp_path / "out"
    assert (
        praxis(
            "export",
            LLAMA,
            out,
            "--what=decode",
            "--batch=b",
            "--length=4",
            "--mesh=1,2,1",
            "--set",
            "task.decoder.max_decode_steps=6",
            "task.decoder.eos_id=[]",
        )
        == 0
    )
    prompts = [[5, 6, 7, 8], [9, 10], [11], [3, 2, 1]]
    ids, lengths = np.zeros((4, 4), np.int32), np.array([4, 2, 1, 3], np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    outputs = loader.load(out)(
        {
            "ids": ids,
            "prefix_lengths": lengths,
            "weights": np.ones(4, np.float32),
            "key": np.zeros(2, np.uint32),
        }
    )
    expected = load_huggingface(LLAMA, note=lambda line: None).generate(prompts, 6)
    assert [row[0].tolist() for row in outputs["output_ids"]] == expected


def test_a_directory_that_is_no_job_or_not_empty_is_refused(tmp_path, capsys):
    out, job = tmp_path / "out", tmp_path / "job"
    assert f"{job}" in refused(capsys, job, out, "--what=decode")
    assert not out.exists()
    job.mkdir()
    (job / "notes.txt").write_text("of somebody")
    assert "already has files (notes.txt)" in refused(capsys, tmp_path, job, "--what=predict")
    assert "argument --what" in refused(capsys, tmp_path, out, "--what=train")
    assert [path.name for path in job.iterdir()] == ["notes.txt"]
