"""Every experiment that `praxis list` names can be built, and its steps traced on its own mesh."""

import importlib
import pkgutil

import fiddle as fdl
import pytest

from praxis_lite.config.overrides import apply_overrides, check_required
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.experiment import registry
from praxis_lite.inputs import SyntheticLm
from praxis_lite.inputs.base import TRAIN
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.trainer.checks.job_checks import check_num_batches
from praxis_lite.trainer.decoding.user_prompts import prompt_batch
from tests.support.marks import slow_or_nightly

NAMES = list(registry.list_experiments())
TRACED = [name for name in NAMES if not name.startswith("published.")]  # See test_published.py.
DATA_PARALLEL = {"explicit.NotebookDp", "explicit.DigitsDp"}  # Weights whole by design.


# Their models differ from those of others in one layer, and the nightly ones in size or data.
SLOW = {
    "explicit.PyDocs",
    "finetune.PyDocsLora",
    "huggingface.CausalLm",
    "lm.Llama",
    "pipelined.Synthetic",
    "seq2seq.Reverse",
    "vision.DigitsResNet",
}
NIGHTLY = {
    "explicit.DigitsDp",
    "explicit.DigitsFsdp",
    "explicit.NotebookDp",
    "finetune.PyDocsFull",
    "huggingface.ChatDpo",
    "huggingface.ChatDpoLora",
    "huggingface.ChatFull",
    "huggingface.ChatLora",
    "linen.DigitsViT",
    "linen.PyDocs",
    "moe.PyDocs",
    "moe.Synthetic",
    "pipelined.PyDocs",
    "pipelined.SplitBackward",
    "pipelined.ZeroBubble",
    "python_texts.PythonTexts",
    "vision.DigitsViT",
}


@pytest.mark.parametrize("name", slow_or_nightly({*TRACED} - SLOW - NIGHTLY, SLOW, TRACED))
def test_its_steps_can_be_traced(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # Some make their data there.
    config = registry.get_experiment(name)().config()
    check_required(config)
    job = fdl.build(config)
    check_num_batches(job.datasets, job.run)
    if any(isinstance(dataset, SyntheticLm) for dataset in job.datasets.values()):
        assert job.task.tokenizer.token_unit == "token", "made-up tokens are no bytes"
    partitioner = (job.partitioner or Partitioner)(job.task, make_mesh(job.mesh))
    is_split = any(leaf.num_shards > 1 for leaf in partitioner.layout.leaves())
    assert is_split != (name in DATA_PARALLEL), "no weight is split"
    train, prompts = {TRAIN: job.datasets[TRAIN]}, job.decode_datasets
    if isinstance(job.task, LanguageModelTask):
        prompts = {**prompts, "a user's": prompt_batch(job.task, [[1, 2, 3]])}
        apply_overrides(config, ["task.decoder.temperature=0.5"])
    for step, datasets in (("train", train), ("decode", prompts)):
        for pipeline in datasets.values():
            pipeline.check()
            partitioner.steps[step].check_batch(pipeline.element_spec())
            partitioner.steps[step].trace(pipeline.element_spec())


def test_the_list_has_every_experiment_that_its_module_registers():
    home = importlib.import_module(registry.HOME)
    for module in pkgutil.walk_packages(home.__path__, f"{registry.HOME}."):
        importlib.import_module(module.name)
    registered = [full for full in registry.registered if full.startswith(f"{registry.HOME}.")]
    assert sorted(registered) == [f"{registry.HOME}.{name}" for name in NAMES]
