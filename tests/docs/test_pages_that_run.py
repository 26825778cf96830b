"""The pages of the docs run as they stand: their blocks, and their commands on small models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import openai
import optax
import pytest

import praxis_lite
from praxis_lite import ConfigError, optimizers
from praxis_lite.core import AuxiliaryOptimizer, Partitioner, make_mesh
from praxis_lite.experiments import lm
from praxis_lite.host.optional_packages import is_installed
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.layers import QuantizationRule, quantized
from praxis_lite.optimizers import DynamicLossScale, VariationalNoise, schedules
from tests.huggingface.test_finetuning import adapters_are_right, with_vocabulary
from tests.huggingface.test_finetuning import started as started  # A fixture.
from tests.support.commands import praxis
from tests.support.doc_pages import Block, page, pages
from tests.support.every_case import assert_each
from tests.support.fake_hub import WRITER, client_of, fake_hub
from tests.support.goldens import GOLDENS
from tests.support.job_runs import CHECKOUT, Launch, home, launch, succeed
from tests.support.lm_eval_tasks import model_directory
from tests.tools.serve.test_serve_mode import server

# Pages with blocks that a test elsewhere runs.
ELSEWHERE = {
    "README.md": "docs/test_readme.py",
    "docs/coming_from_pax.md": "docs/test_coming_from_pax.py",
    "docs/evaluation.md": "tools/lm_eval/test_lm.py",
    "docs/experiments.md": "experiment/test_user_package.py",
    "docs/exporting.md": "tools/export/test_export_command.py",
    "docs/how_to_add.md": "docs/test_how_to_add.py",
    "docs/trackers.md": "docs/test_trackers_page.py",
}


def test_every_page_with_a_block_is_run_by_a_test():
    local = Path(__file__).read_text(encoding="utf-8")
    for one in pages():
        if one.blocks():
            file = ELSEWHERE.get(one.name)
            text = local if file is None else (CHECKOUT / "tests" / file).read_text("utf-8")
            name = Path(one.name).stem
            assert f'page("{name}")' in text or f"{name}.md" in text, one.name


SECTIONS = {
    title: blocks
    for one in (page("sharding"), page("other_models"), page("parallelism"))
    for title, blocks in one.sections().items()
    if blocks
}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_blocks_of_a_section_of_the_pages_on_sharding_run(title, monkeypatch):
    # The devices of the tests are there already.
    monkeypatch.setattr("praxis_lite.core.simulate_devices", lambda num_devices: None)
    names = {"__name__": "sharding_page"}
    for block in SECTIONS[title]:
        with jax.numpy_rank_promotion("allow"):  # JAX's default, which readers have.
            block.run(names)


OF_TRAINING = {
    name: getattr(praxis_lite, name) for name in (
        "BestCheckpoints", "CheckpointLoadingRules", "EarlyStopping", "EvaluationSettings",
        "LossSpikeSettings", "SaveSettings", "StopSettings",
    )
} | {
    "fdl": fdl, "jax": jax, "jnp": jnp, "optax": optax, "optimizers": optimizers,
    "schedules": schedules, "AuxiliaryOptimizer": AuxiliaryOptimizer,
    "DynamicLossScale": DynamicLossScale, "QuantizationRule": QuantizationRule,
    "VariationalNoise": VariationalNoise, "quantized": quantized,
}  # fmt: skip


def configured(*blocks: Block) -> fdl.Config:
    """Returns the config of lm.Synthetic after blocks of docs/training.md."""
    config = lm.Synthetic().config()
    names = {"task": config.task, "learner": config.task.learner, "run": config.run, **OF_TRAINING}
    for block in blocks:
        before = str(config)
        block.run(names)
        # A block that configures nothing (a misspelled name, say) would trace as well.
        assert str(config) != before, block
    return config


@pytest.mark.slow
def test_each_block_of_the_training_page_builds_and_its_step_traces():
    blocks = page("training").blocks()
    if not is_installed("qwix"):
        blocks = [block for block in blocks if "quantized" not in block.text]
    assert_each(trace, ((str(block), block) for block in blocks))


def trace(block):
    config = configured(block)
    job = fdl.build(config)
    if config.task != lm.Synthetic().config().task:  # Else the step is that of lm.Synthetic.
        partitioner = Partitioner(job.task, make_mesh(job.mesh))
        partitioner.train_step.trace(job.datasets["train"].element_spec())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory that is on sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


def finished(*argv: str) -> Launch:
    """Runs `main`, which may warn but must not fail."""
    done = launch(*argv)
    assert done.code == 0, done.err
    return done


def run_alone(source: str, folder: Path) -> str:
    """Returns what a program prints that is run in a new process, as a reader does."""
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"
    }
    environment |= {"PYTHONPATH": str(CHECKOUT), "XDG_CACHE_HOME": str(home() / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_three_ways_in_of_the_first_page_run(started, folder, registry_copy):
    files = page("get_started").files()
    wave = files["wave.py"].text
    chat = files["chat.py"].text.replace("path/of/model", f"{started / 'llama'}")
    steps = '"run.num_train_steps": 100'
    assert steps in chat
    chat = chat.replace(steps, '"run.num_train_steps": 2')
    # In one process, for most of its time goes into imports.
    out = run_alone(f"{wave}\n{chat}", folder)
    loss = float(re.search(r"^loss ([\d.e-]+)$", out, re.MULTILINE)[1])
    prediction = re.search(r"^prediction \[(.*?)\] (\S+)$", out, re.MULTILINE)
    predicted, expected = map(float, prediction.groups())
    assert loss < 0.01 and abs(predicted - expected) < 0.1
    assert out.splitlines()[-1]
    assert Path("merged/model.safetensors").is_file()
    Path("mylm.py").write_text(files["mylm.py"].text, "utf-8")
    explained, *trained = page("get_started").commands("praxis")[:-1]
    assert "spec" in finished(*explained).out
    for words in trained:
        finished(*words, *([] if "--set" in words else ["--set"]), "run.num_train_steps=2")


@pytest.mark.slow
def test_the_blocks_of_the_python_page_run_one_after_the_other(tmp_path):
    out = run_alone("\n".join(block.text for block in page("python").blocks()), tmp_path)
    assert "step 20, loss" in out
    assert "trained to step 25" in (tmp_path / "jobs/lion/log.txt").read_text()
    assert out.splitlines()[-1].startswith("True ")


@pytest.mark.slow
def test_the_data_page_runs(folder, capsys):
    topics, experiment = page("data").blocks()
    Path("my_data.py").write_text(experiment.text, "utf-8")
    text = topics.text.replace("/tmp/topics", f"{folder}/topics")
    Path("my_topics.py").write_text(text, "utf-8")
    commands = page("data").commands("praxis inputs")
    (prepare,) = [words for words in commands if "my_topics.Topics" in words]
    assert praxis("inputs", *prepare) == 0
    assert "batches of 4 or 8 or 16 rows" in capsys.readouterr().out
    (train,) = page("data").commands("praxis train")
    train = [item.replace("/tmp/docs_and_code", f"{folder}/job") for item in train]
    finished(
        "train",
        *train,
        "--set",
        "run.num_train_steps=2",
        "datasets.train.batch_size=4",
        "run.evaluation.every_steps=None",
        "mesh.ici_mesh_shape=1,1,1",
        "task.model.num_layers=1",
    )
    (digest,) = [words for words in commands if words[0] == "digest" and "--processes=3" in words]
    # That it is the same for any number of them is tested in experiment/test_python_texts.py.
    capsys.readouterr()
    assert praxis("inputs", *digest) == 0
    assert re.match(r"[0-9a-f]{8,} ", capsys.readouterr().out)


@pytest.mark.slow
def test_the_tokenizers_page_runs(folder):
    Path("texts").mkdir()
    text = "Who is there? né 😀 It is a fox, and it is there again. "
    Path("texts/a.txt").write_text("\n".join(text * 5 for _ in range(60)), "utf-8")
    training, shown = page("tokenizers").commands("praxis tokenizers")
    words = [item.replace("~/texts/**", "texts").replace("8192", "280") for item in training]
    assert praxis("tokenizers", *words) == 0 and praxis("tokenizers", *shown) == 0
    (train,) = page("tokenizers").commands("praxis train")
    train = [
        item.replace("~/texts/**", "texts").replace("/tmp/mine", f"{folder}/job") for item in train
    ]
    train += ["run.num_train_steps=1", "corpus.heldout_percent=50", "task.model.num_layers=1"]
    succeed("train", *train)
    actual = {}
    for block in page("tokenizers").blocks():
        block.run(actual)
    assert actual["text"] == "né 😀" and actual["vocab_size"] == 280
    assert actual["tokenizer"].decode(actual["prompt"]).endswith("assistant\n")
    (template,) = page("tokenizers").blocks("jinja")
    Path("my_bpe/chat_template.jinja").write_text(template.text, "utf-8")
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    text, spans = load_tokenizer("my_bpe").chat.answers(said)
    assert text.startswith("user:\nHi\nassistant:\n")
    assert [text[slice(*span)] for span in spans] == ["Hello<|end_of_text|>"]


@pytest.mark.slow
def test_the_finetuning_page_runs(started, monkeypatch):
    monkeypatch.chdir(started)
    tuned, *_ = page("finetuning").commands("praxis train")
    (decoded,) = page("finetuning").commands("praxis decode")
    succeed("train", *tuned, "run.num_train_steps=2")
    assert "restored the weights of step 2" in succeed("decode", *decoded).out
    (export,) = page("finetuning").commands("praxis hf")
    assert praxis("hf", *export) == 0
    assert (started / "merged" / "model.safetensors").is_file()
    adapters_are_right(started, "jobs/chat")
    (block,) = page("finetuning").blocks()
    block.run()


@pytest.mark.nightly
def test_so_does_its_command_of_four_bits(started, monkeypatch):
    pytest.importorskip("qwix")
    monkeypatch.chdir(started)
    _, of_four_bits, _ = page("finetuning").commands("praxis train")
    of_four_bits = [item.replace("jobs/chat", "jobs/four_bits") for item in of_four_bits]
    succeed(
        "train", *of_four_bits, "SEQ_LEN=64", "BATCH_SIZE=8", "run.num_train_steps=2",
        "CHAT_FILES=chat.jsonl",
    )  # fmt: skip


@pytest.mark.slow
def test_the_page_of_hugging_face_runs(folder):
    (block,) = page("huggingface").blocks()
    actual = block.run({}, {"path/of/Llama-3.2-1B": str(GOLDENS / "hf" / "llama")})
    assert actual["logits"].shape == (1, 3, 101)
    assert [len(row) for row in actual["tokens"]] == [16, 16]
    assert Path("path/of/copy/model.safetensors").is_file()
    with_vocabulary(GOLDENS / "hf" / "llama", Path("DIR"))
    command, _ = page("huggingface").commands("praxis train")
    assert "step 1" in succeed("train", *command, "run.num_train_steps=1").out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # In huggingface_hub.
def test_the_commands_with_urls_of_the_hugging_face_page_run(started, tmp_path, monkeypatch):
    _, tuned = page("huggingface").commands("praxis train")
    (export,) = page("huggingface").commands("praxis hf")
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats/train.jsonl").write_text((started / "chat.jsonl").read_text())
    monkeypatch.chdir(tmp_path)
    with fake_hub() as hub, client_of(hub, monkeypatch, tmp_path / "home", WRITER):
        hub.add("org/model", started / "llama")
        hub.add("org/chats", tmp_path / "chats", "datasets")
        sizes = ("SEQ_LEN=64", "BATCH_SIZE=8", "mesh.ici_mesh_shape=1,1,1")
        assert "step 1" in succeed("train", *tuned, "run.num_train_steps=1", *sizes).out
        assert praxis("hf", *export) == 0
        adapters = hub.repos["models", "me/model-lora"]
        files = adapters.commits[adapters.branches["main"]]
        base_model = json.loads(files["adapter_config.json"])["base_model_name_or_path"]
    assert base_model == "org/model" and "adapter_model.safetensors" in files
    # The job contains a copy of the tokenizer, so that it no longer needs the Hub.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    decoded = succeed("--mode=decode", "--job_log_dir=jobs/chat", "--prompt=What comes after 4?")
    assert "restored the weights of step 1" in decoded.out


@pytest.mark.slow
def test_the_serving_page_runs_and_the_exported_model_answers_as_the_job(folder, capsys):
    Path("HF_DIR").mkdir()
    model_directory(Path("HF_DIR"), "llama")
    imported, exported = page("serving").commands("praxis hf")
    assert praxis("hf", *imported) == 0
    (trained,) = page("serving").commands("praxis train")
    succeed("train", *trained, "run.num_train_steps=1", "mesh.ici_mesh_shape=1,1,1")
    assert exported[-1] == "--dtype=bfloat16"  # The test compares tokens, and wants all bits.
    assert praxis("hf", *exported[:-1], "--dtype=float32") == 0
    capsys.readouterr()
    (client,) = page("serving").blocks()
    commands = page("serving").commands("praxis serve")
    (of_export,) = [words for words in commands if "--hf=OUT" in words]
    # A job as such is served in tools/serve/test_serve_mode.py.
    (record,) = praxis_lite.load("JOB").generate("the sun", max_decode_steps=8, temperature=0.0)
    assert record["continuation"]
    with server(*of_export, "--max_length=64") as (_, url, _):
        actual = client.run({}, {"http://127.0.0.1:8000": url})
        assert isinstance(actual["client"], openai.OpenAI)
        actual["client"].close()
    assert actual["answer"].choices[0].text == record["continuation"]
    assert len(capsys.readouterr().out) > len(record["continuation"]) + 1


SMALL_PLAN = [
    "--set",
    "ROWS=8",
    "SEQ_LEN=64",
    "MODEL_DIMS=32",
    "HIDDEN_DIMS=48",
    "NUM_LAYERS=2",
    "NUM_HEADS=4",
    "VOCAB_SIZE=61",
]


@pytest.mark.slow
def test_the_plan_page_runs_on_a_small_model_and_simulated_devices(folder):
    experiment, _ = page("plan").blocks()
    Path("my_pods.py").write_text(experiment.text, "utf-8")
    plan, of_7b, search, again, measured, corrected = (
        [re.sub(r"v5e:\w+", "cpu:8", item).replace("minutes=8", "minutes=0.02") for item in words]
        for words in page("plan").commands("praxis")
        if "--steps=decode" not in words
    )
    assert "--topology=cpu:8" in plan
    finished(*of_7b, *SMALL_PLAN)
    record = json.loads(Path("plan.json").read_text())
    named = re.search(r"## JSON\n\n(.*?) will not change", page("plan").text, re.DOTALL).group(1)
    outer = re.sub(r"\(a list of.*?\)", "", named, flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", outer)) <= set(record)
    done = finished(*search, *SMALL_PLAN)
    assert "Fastest layout that fits" in done.out and "--packages=plan_search,my_pods" in done.out
    finished(*again)
    finished(*measured, *SMALL_PLAN, "mesh.ici_mesh_shape=(1,8,1)")
    done = finished(*corrected, *SMALL_PLAN)
    assert "times the planned time (median of 1 in residuals.jsonl)" in done.out


@pytest.mark.slow
def test_the_budgets_of_the_check_page_hold():
    # The first block checks the reader's own experiment; the function is tested in tools/check.
    _, budgets = page("check").blocks()
    budgets.run()["test_what_my_step_sends"]()


def test_the_experiment_of_the_elastic_page_chooses_a_mesh():
    (block,) = page("elastic").blocks()
    names = {"Llama7BOnOneSlice": object, "fdl": fdl, "MeshConfig": praxis_lite.MeshConfig}
    experiment = block.run(names)["Llama7B"]()
    assert experiment.mesh_for(7) is None
    assert experiment.mesh_for(16).ici_mesh_shape == (1, 2, 8)


@pytest.fixture
def my_model(folder):
    """The files of docs/your_own_model.md in the current directory."""
    for name, block in page("your_own_model").files().items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    (folder / "mymodel/__init__.py").touch()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "mymodel"]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_page_of_your_own_model_passes_its_tests_trains_and_answers_in_python(
    my_model, capsys, monkeypatch
):
    files = page("your_own_model").files()
    names = files["test_mymodel.py"].run()
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        names[name]()
    (train,) = page("your_own_model").commands("praxis")
    monkeypatch.setenv("XDG_CACHE_HOME", str(my_model / "cache"))
    done = succeed(*train)
    capsys.readouterr()
    names = files["look.py"].run()
    assert "params/layers/0/gate (13, 37)" in capsys.readouterr().out
    points, predicted = names["points"], names["predicted"]
    np.testing.assert_allclose(
        predicted, np.sin(3 * points[:, 0]) * points[:, 1], atol=0.1, err_msg=done.out
    )
    assert names["model"].evaluate("heldout")["loss"] < 0.01
    with pytest.raises(ConfigError, match="SquaredErrorTask"):
        names["model"].generate("a prompt")
