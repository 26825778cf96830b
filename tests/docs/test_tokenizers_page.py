"""The blocks of docs/tokenizers.md run."""

import re
import shlex
from pathlib import Path

import pytest

from praxis_lite.inputs.tokenizers.__main__ import main as command
from tests.support.job_runs import succeed

PAGE = (Path(__file__).parents[2] / "docs" / "tokenizers.md").read_text("utf-8")


@pytest.mark.slow
def test_the_pages_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    text = "Who is there? né 😀 It is a fox, and it is there again. "
    Path("texts/a.txt").write_text("\n".join(text * 5 for _ in range(60)), "utf-8")
    training, *_ = re.findall(r"```\npython -m \S+ (train .*?)\n(.*?)```", PAGE, re.DOTALL)
    words = shlex.split(training[0].replace("~/texts/**", "texts").replace("8192", "280"))
    assert command(words) == 0
    argv = shlex.split(training[1].replace("\\\n", "").replace("~/texts/**", "texts"))
    assert argv[:2] == ["python", "main.py"]
    short = ("run.num_train_steps=1", "corpus.heldout_percent=50", "task.model.num_layers=1")
    argv = [f"--job_log_dir={tmp_path}/job" if "--job" in item else item for item in argv[2:]]
    succeed(*argv, *short)
    actual = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, actual)
    assert actual["text"] == "né 😀" and actual["vocab_size"] == 280
    assert actual["tokenizer"].decode(actual["prompt"]).endswith("assistant\n")
