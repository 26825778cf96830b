"""The experiment on Python's own texts: files made, read in three formats, filtered, packed, mixed.

Its jobs resume as if they had not ended; what is wrong with a file ends one before it compiles.
"""

import gzip
import json

import pytest

from tests.support.commands import praxis
from tests.support.job_runs import launch

EXP = "python_texts.PythonTexts"
SMALL = (
    "datasets.train.batch_size=4",
    "run.evaluation.every_steps=None",
    "run.checkpoints.every_steps=2",
    "task.model.num_layers=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The texts, ready."""
    folder = tmp_path_factory.mktemp("texts") / "made"
    assert praxis("inputs", "prepare", EXP, "--set", f"folder={folder}") == 0
    return folder


def train(folder, job, steps, *settings):
    return launch(
        f"--exp={EXP}",
        f"--job_log_dir={job}",
        "--set",
        f"folder={folder}",
        *SMALL,
        f"run.num_train_steps={steps}",
        *settings,
    )


@pytest.mark.nightly
def test_the_digest_is_the_same_for_any_number_of_processes(folder, capsys):
    actual = set()
    for number in (1, 3):  # A batch of 16 rows does not divide over three.
        capsys.readouterr()
        arguments = f"digest {EXP} --processes={number} --batches=6 --start=97"
        assert praxis("inputs", *arguments.split(), "--set", f"folder={folder}") == 0
        actual.add(capsys.readouterr().out.split()[0])
    assert len(actual) == 1


@pytest.mark.nightly
def test_a_damaged_or_changed_file_ends_a_job_with_its_name(folder, tmp_path):
    local = tmp_path / "own"
    local.mkdir()
    for name in ("code.parquet", "licenses.jsonl.zst", "docs.jsonl.gz"):
        (local / name).write_bytes((folder / name).read_bytes())
    done = train(local, tmp_path / "job", 2)
    assert done.code == 0, done.err
    path = local / "docs.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)

    def now(data):
        path.write_bytes(data)
        done = train(local, tmp_path / "job", 4)
        return done.code, " ".join(done.err.split())

    code, text = now(path.read_bytes()[:9000])
    assert code == 2 and "docs.jsonl.gz is truncated" in text
    code, text = now(gzip.compress(b"".join([*lines[:3], json.dumps({"name": "x"}).encode()])))
    assert code == 2 and "docs.jsonl.gz:4 has no key 'text'; its keys are ['name']" in text
    code, text = now(gzip.compress(b"".join(lines[1:])))
    assert code == 2 and "files.docs.jsonl.gz" in text and "run.accept_changed_data" in text, text
