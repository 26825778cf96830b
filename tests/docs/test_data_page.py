"""The blocks of docs/data.md run; its digest is the same however many processes make the stream."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from praxis_lite.inputs import __main__ as command
from tests.support.job_runs import launch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text("utf-8")


@pytest.mark.slow
def test_the_pages_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (experiment,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    Path("my_data.py").write_text(experiment, "utf-8")
    (train,) = re.findall(r"^python main.py (.*)", PAGE, re.MULTILINE)
    train = train.replace("/tmp/docs_and_code", str(tmp_path / "job"))
    done = launch(
        *shlex.split(train), "--set", "run.num_train_steps=2", "datasets.train.batch_size=4",
        "run.evaluation.every_steps=None",
    )
    assert done.code == 0, done.err
    (digest,) = re.findall(r"^python -m praxis_lite.inputs (digest .*--exp=.*)", PAGE, re.MULTILINE)
    actual, env = set(), {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    for num_processes in (1, 2, 3, 5, 8):
        arguments = shlex.split(digest.replace("processes=3", f"processes={num_processes}"))
        done = subprocess.run(
            [sys.executable, "-m", "praxis_lite.inputs", *arguments], capture_output=True,
            text=True, check=False, env=env,
        )
        assert done.returncode == 0, done.stderr
        actual.add(done.stdout.split()[0])
    assert len(actual) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--exp=lm.PyDoc", "Did you mean"),
        ("--exp=lm.Synthetic --dataset=trian", "Did you mean train?"),
        ("--exp=lm.Synthetic --batches=0", "1 or more"),
        ("--exp=lm.Synthetic --processes=0", "1 or more"),
        ("--exp=lm.Synthetic --start=-1", "0 or more"),
        ("--exp=lm.Synthetic --dataset=heldout --batches=999", "one pass has"),
        ("--exp=lm.Synthetic --procesess=2", "Did you mean --processes?"),
    ],
)
def test_what_is_wrong_is_said(arguments, words, capsys):
    assert command.main(["digest", *arguments.split()]) == 2
    assert words in capsys.readouterr().err
