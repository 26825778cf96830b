"""The commands of docs/serving.md run, and it names every field of a request."""

import argparse
import re
import shlex
from pathlib import Path

import openai
import pytest

from praxis_lite.huggingface.__main__ import main as huggingface
from praxis_lite.inputs.text.length_classes import SHORTEST
from praxis_tools.serve import endpoints, engine, requests, served_model
from praxis_tools.serve.mode import Serve
from tests.support.job_runs import succeed
from tests.support.lm_eval_tasks import model_directory
from tests.tools.serve.test_serve_mode import server

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
COMMANDS = [
    line.strip() for block in re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
]  # fmt: skip


def test_the_page_names_each_field():
    fields = {*requests._COMPLETION, *requests._CHAT}
    assert not {field for field in fields if f"`{field}`" not in PAGE}


def test_the_numbers_of_the_page_are_those_of_the_code():
    parser = argparse.ArgumentParser()
    Serve().add_options(parser)
    for name in ("num_rows", "max_queue", "request_seconds", "drain_seconds"):
        assert f"`--{name}={parser.get_default(name):g}`" in PAGE
    for words in (
        f"at most {served_model.USUAL_LENGTH})", f"powers? of two from {SHORTEST} on",
        f"up to {requests.MOST_CHOICES} of either", f"up to {requests.MOST_STOPS} texts",
        f"has {requests.COMPLETION_TOKENS} unless", f"up to {requests.MOST_LOGPROBS} tokens",
        f"at most {engine.STEPS_BETWEEN_LOOKS} steps",
        f"{endpoints.MOST_BYTES >> 20} MiB, in {endpoints.BODY_SECONDS:g} s",
    ):
        assert re.search(words.replace(")", r"\)"), PAGE), words


def words_of(beginning):
    (command,) = [line for line in COMMANDS if line.startswith(beginning)]
    return shlex.split(command, comments=True)


@pytest.mark.slow
def test_the_commands_run_and_the_exported_model_answers_as_the_job(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("HF_DIR").mkdir()
    model_directory(Path("HF_DIR"), "llama")
    program = "python -m praxis_lite.huggingface"
    huggingface(words_of(f"{program} import")[3:])
    trained = words_of("python main.py --exp=")[2:]
    succeed(*trained, "run.num_train_steps=1", "mesh.ici_mesh_shape=1,1,1")
    exported = words_of(f"{program} export")[3:]
    assert exported[-1] == "--dtype=bfloat16"  # The test compares tokens, and wants all bits.
    huggingface([*exported[:-1], "--dtype=float32"])
    capsys.readouterr()
    (client,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    answers = []
    options = words_of("python main.py --mode=serve --hf=OUT")[3:]
    for model in (options, ("--job_log_dir=JOB", "--model_name=mine")):
        with server(*model, "--max_length=64") as (_, url, _):
            actual = {}
            exec(client.replace("http://127.0.0.1:8000", url), actual)
            assert isinstance(actual["client"], openai.OpenAI)
            actual["client"].close()
            answers.append(capsys.readouterr().out)
    assert answers[0] and answers[0] == answers[1]
