"""Tasks of lm_eval asked of our models, against lm_eval's adapter of transformers and our own."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from praxis_lite import ConfigError, huggingface
from praxis_lite.core import MeshConfig, make_mesh
from praxis_tools.lm_eval import harness_model
from tests.support import job_runs
from tests.support.commands import praxis
from tests.support.goldens import GOLDENS, golden
from tests.support.lm_eval_tasks import CHATS, TASKS, model_directory, write_tasks
from tests.support.marks import needs_lm_eval

SETTINGS = "packages=jobzoo,max_length=64"
pytestmark = [pytest.mark.slow, needs_lm_eval]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def task_manager(tasks):
    """Returns a manager of our tasks alone: to look at lm_eval's own takes six seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(tasks), include_defaults=False)


@pytest.fixture(scope="module")
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The model with each tokenizer: on a mesh that divides nothing, or on one device."""
    shapes = {"llama": (1, 4, 2), "qwen": (1, 1, 1)}
    return {
        name: huggingface.load(
            model_directory(tmp_path_factory.mktemp(name), name),
            make_mesh(MeshConfig(ici_mesh_shape=shape, allow_unused_devices=True)),
        )
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen", marks=pytest.mark.nightly)])
def test_tasks_have_the_answers_of_the_adapter_of_transformers(name, llama, tasks, offline):
    import lm_eval

    results = lm_eval.simple_evaluate(
        harness_model(llama[name], batch_size=3),
        tasks=[*TASKS],
        task_manager=task_manager(tasks),
        bootstrap_iters=0,
    )
    expected = golden("lm_eval/goldens.json")["tasks"][name]
    for task in TASKS:
        answers = [sample["resps"] for sample in results["samples"][task]]
        assert leaves(answers) == [pytest.approx(x, abs=1e-4) for x in leaves(expected[task])]
        metrics = results["results"][task]
        for metric, value in expected[task]["metrics"].items():
            assert metrics[metric] == pytest.approx(value, rel=1e-5), metric


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_contexts_and_continuations_are_cut_as_the_adapter_of_transformers_cuts_them(
    add_bos_token, llama
):
    (case,) = [
        case
        for case in golden("lm_eval/goldens.json")["encoded"]
        if case["tokenizer"] == "llama" and case["add_bos_token"] is add_bos_token
    ]
    asked = harness_model(llama["llama"], add_bos_token=add_bos_token)
    for context, continuation, *ids in case["pairs"]:
        assert [*asked._encode_pair(context, continuation)] == ids, (context, continuation)


def test_chats_go_by_the_tokenizers_template(llama):
    asked, others = harness_model(llama["llama"]), harness_model(llama["qwen"])
    expected = golden("lm_eval/goldens.json")["chats"]
    assert asked.apply_chat_template(*CHATS["question"]) == expected["question"]
    config = json.loads((GOLDENS / "lm_eval/llama/tokenizer_config.json").read_text())
    assert asked.chat_template(True) == config["chat_template"]
    assert asked.chat_template(False) is None
    with pytest.raises(ConfigError, match="is 'rag'; expected no value"):
        asked.chat_template("rag")
    # lm_eval keeps requests by these names.
    assert asked.tokenizer_name != others.tokenizer_name
    assert asked.tokenizer_name == harness_model(llama["llama"]).tokenizer_name
    assert "/" not in asked.tokenizer_name


def leaves(tree):
    """Returns the numbers, flags and texts of lists and tuples in lists and tuples."""
    if isinstance(tree, dict):
        return leaves(tree["answers"])
    return sum(map(leaves, tree), []) if isinstance(tree, list | tuple) else [tree]


@pytest.fixture(scope="module")
def job():
    """A model of bytes, and the block of the page that asks it, run with a task of ours."""
    job, _ = job_runs.trained()
    return job_runs.loaded(job)


@pytest.fixture(scope="module")
def asked(job):
    return harness_model(job, batch_size=4, max_length=48, seed=5)


def requests(kind, *args):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arg, place) for place, arg in enumerate(args)]


def test_the_score_of_what_a_job_of_bytes_generates_is_that_of_generate(job, asked):
    prompts = ["7 plus ", "9 plus 2 makes", "e"]
    records = job.generate([asked.tok_encode(item) for item in prompts])
    scores = asked._loglikelihood_tokens(
        [
            (None, asked.tok_encode(prompt), record["output_ids"])
            for prompt, record in zip(prompts, records, strict=True)
        ]
    )
    for (score, is_greedy), record in zip(scores, records, strict=True):
        assert is_greedy and score == pytest.approx(record["log_prob"], abs=1e-4)
    settings = {"until": ["\n\n"], "max_gen_toks": 5}
    texts = asked.generate_until(requests("generate_until", *((x, settings) for x in prompts)))
    assert texts == [record["continuation"] for record in records]


def test_a_stop_string_ends_the_steps(job, asked):
    prompt, steps = "7 plus ", 40
    (record,) = job.generate([list(prompt.encode())], max_decode_steps=steps)
    assert record["decode_length"] == steps  # Nothing else ends it.
    stop = record["continuation"][3]
    settings = {"until": [stop], "max_gen_toks": steps}
    (text,) = asked.generate_until(requests("generate_until", (prompt, settings)))
    assert text == record["continuation"].partition(stop)[0]
    *_, batching = asked._continuations._batchings.values()
    assert batching.latest.num_steps <= 8


def test_examples_that_are_read_once_and_drafts_change_no_text(job, asked):
    examples = "1 plus 1 makes 2. 2 plus 3 makes 5. "
    settings = {"until": ["~"], "max_gen_toks": 9}
    asks = requests("generate_until", *((f"{examples}{i}", settings) for i in "34567"))
    saving = harness_model(
        job, batch_size=4, max_length=48, seed=5, num_cached_prefixes=2, num_speculative_tokens=3
    )
    assert saving.generate_until(asks) == asked.generate_until(asks)
    ((batching,),) = [saving._continuations._batchings.values()]
    # Of 38 ids each after the beginning of a text, in blocks of eight or more.
    assert batching.latest.num_read_tokens <= 2 * 38 + 3 * (38 - 24)
    assert batching.latest.num_row_steps < batching.latest.num_row_tokens == 5 * 9


def test_a_text_of_bytes_has_the_score_of_the_forward_pass_in_windows(job, asked):
    text = "12 plus 3 makes 15.\n" * 3  # 60 bytes: a window of 48, and one more of 12.
    (score,) = asked.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    ids = [256, *text.encode()]
    expected = 0.0
    for row, num_scored in ((ids[:49], 48), (ids[12:], 12)):
        logits = job.predict(np.array([row[:-1]], np.int32))[0][0].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected += log_probs[np.arange(48), row[1:]][-num_scored:].sum()
    assert score == pytest.approx(expected, abs=1e-3)


def test_a_temperature_draws_alike_from_one_seed_and_otherwise_for_each_request(job, asked):
    settings = {"until": ["~"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    asks = requests("generate_until", *[("7 plus ", settings)] * 4)
    texts = asked.generate_until(asks)
    assert len(set(texts)) == 4
    assert asked.generate_until(asks) == texts
    again = harness_model(job, batch_size=4, max_length=48, seed=6).generate_until(asks)
    assert again != texts


def test_the_page_evaluates_a_job_on_the_command_line_and_in_python(tasks, offline, tmp_path):
    folder, _ = job_runs.trained()
    page = (Path(__file__).parents[3] / "docs/evaluation.md").read_text("utf-8")
    (command,) = re.findall(r"^    praxis (.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", "").replace("hellaswag", "tiny_choice"))
    words = [word.replace("JOB", f"{folder.path},mesh=job,{SETTINGS}") for word in words]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "praxis_lite",
            *words,
            "--include_path",
            tasks,
            "--output_path",
            tmp_path / "results",
            "--log_samples",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{job_runs.CHECKOUT}:{job_runs.home()}"},
    )
    assert done.returncode == 0, done.stderr
    assert "|tiny_choice|" in done.stdout
    (samples,) = (tmp_path / "results").rglob("samples_tiny_choice_*.jsonl")
    printed = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]

    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    block = block.replace('load("JOB")', f"load({str(folder.path)!r}, packages=['jobzoo'])")
    block = block.replace("batch_size=32", "batch_size=32, max_length=64")
    block = block.replace('["hellaswag"]', "['tiny_choice'], task_manager=tasks")
    actual = {"tasks": task_manager(tasks)}
    exec(block, actual)
    expected = [sample["resps"] for sample in actual["results"]["samples"]["tiny_choice"]]
    # The command line on the job's mesh, Python on one device.
    assert [x for x in leaves(printed) if x in ("True", "False")] == ["False"] * 15
    scores = [float(x) for x in leaves(printed) if x not in ("True", "False")]
    assert scores == pytest.approx(leaves(expected)[::2], abs=1e-4)


def test_the_command_says_in_a_paragraph_what_is_wrong(monkeypatch, capsys, tasks):
    monkeypatch.setattr(sys, "argv", [])
    ours = task_manager(tasks)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **given: ours)
    words = ["--model", "praxis_lite", "--model_args", "job=no_such_job", "--tasks", "tiny_choice"]
    assert praxis("lm_eval", *words) == 2
    assert re.search("^error: .*no_such_job", capsys.readouterr().err, re.MULTILINE)
