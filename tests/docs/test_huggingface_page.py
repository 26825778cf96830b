"""The blocks of docs/huggingface.md run, and its table has every family."""

import re
import shlex
from pathlib import Path

import pytest

from praxis_lite.huggingface import family
from tests.huggingface.test_finetuning import with_vocabulary
from tests.support.goldens import GOLDENS
from tests.support.job_runs import succeed

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text("utf-8")


@pytest.mark.slow
def test_the_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    actual = {}
    exec(block.replace("path/of/Llama-3.2-1B", str(GOLDENS / "hf" / "llama")), actual)
    assert actual["logits"].shape == (1, 3, 101)
    assert [len(row) for row in actual["tokens"]] == [16, 16]
    assert Path("path/of/copy/model.safetensors").is_file()

    with_vocabulary(GOLDENS / "hf" / "llama", Path("DIR"))
    (command,) = re.findall(r"```\n(python main.py .*?)```", PAGE, re.DOTALL)
    words = shlex.split(command.replace("\\\n", ""))[2:]
    message = succeed(*words, "run.num_train_steps=1").out
    assert "step 1" in message


def test_the_table_has_every_family():
    rows = re.findall(r"^\| ([A-Z][^|]*) \| [\d.]+e-6 \|", PAGE, re.MULTILINE)
    tables = [x for x in (Path(family.__file__).parent / "families").glob("*.toml")
              if x.stem != "common"]
    assert len(rows) == len(tables) == len(list((GOLDENS / "hf").iterdir()))
