"""The commands and the block of docs/finetuning.md run, on a tiny model."""

import re
import shlex
from pathlib import Path

import pytest

from praxis_lite.huggingface.__main__ import main as convert
from tests.huggingface.test_finetuning import started  # noqa: F401
from tests.support.job_runs import succeed

PAGE = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text("utf-8")


@pytest.mark.slow
def test_the_pages_blocks_run(started, monkeypatch):  # noqa: F811
    monkeypatch.chdir(started)
    tuning, of_four_bits = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    train, decode, export = tuning.replace("\\\n", "").strip().splitlines()
    succeed(*shlex.split(train)[2:], "run.num_train_steps=2")
    assert "restored the weights of step 2" in succeed(*shlex.split(decode)[2:]).out
    convert(shlex.split(export)[3:])
    assert (started / "merged" / "model.safetensors").is_file()
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})
    pytest.importorskip("qwix")
    of_four_bits = of_four_bits.replace("jobs/chat", "jobs/four_bits").strip()
    succeed(
        *shlex.split(of_four_bits)[2:], "SEQ_LEN=64", "BATCH_SIZE=8", "run.num_train_steps=2",
        "CHAT_FILES=chat.jsonl",
    )  # fmt: skip
