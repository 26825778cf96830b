"""Every name that docs/coming_from_pax.md gives as this library's exists, and its block runs."""

import inspect
import math
import re
import zipfile
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax import nnx

import praxis_lite
from praxis_lite import (
    core,
    decode,
    inputs,
    layers,
    main,
    models,
    optimizers,
)
from praxis_lite.checkpoints import checkpoints
from praxis_lite.checkpoints.init import loading_rules
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.core import make_mesh, sharding, task
from praxis_lite.core.collectives import explicit_collectives, mapped_weights
from praxis_lite.core.learner import learner, optimizer_groups
from praxis_lite.core.partitioner import partitioner, steps, train_state
from praxis_lite.core.sharding import batch_sharding, rules, weight_sharding
from praxis_lite.experiment import experiment, registry, run_settings
from praxis_lite.inputs import numpy_data
from praxis_lite.layers.activations import ACTIVATIONS
from praxis_lite.layers.base import base_layer as weights
from praxis_lite.layers.stacking.remat_policies import CHECKPOINT_POLICIES
from praxis_lite.modes.options import parser_of
from praxis_lite.optimizers import schedules
from praxis_lite.pax import job as pax_job
from praxis_lite.tasks import image_classification, language_model, loss, sequence_to_sequence
from praxis_lite.trained_model import trained_model
from praxis_lite.trainer import decoding, evaluation, metrics, training_loop
from praxis_lite.trainer.decoding.user_prompts import prompt_batch
from tests.pax.test_checkpoints import MADE_BY_PAX, lm
from tests.support.every_case import assert_each
from tests.support.goldens import golden

PAGE = (Path(__file__).parents[2] / "docs/coming_from_pax.md").read_text(encoding="utf-8")
PLACES = (
    praxis_lite, optimizers, core, layers, learner, decode, experiment, inputs, task, training_loop,
    decoding, partitioner,
    checkpoints, train_state, registry, sharding, weights, language_model, run_settings,
    evaluation, image_classification, sequence_to_sequence, pax_job,
    optimizer_groups, schedules, loading_rules, steps, batch_sharding,
    explicit_collectives, mapped_weights, rules, weight_sharding, trained_model, metrics, models,
    numpy_data, loss,
)  # fmt: skip


def test_the_rewritten_layer_runs():
    names: dict = {}
    exec(block_of("layer"), names)
    layer = names["Scaled"](3, rngs=nnx.Rngs(0))
    x = np.ones((2, 3), np.float32)
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which readers have.
        np.testing.assert_allclose(layer(x), layer.linear(x))


def block_of(name: str) -> str:
    pattern = rf"begin {name} -->\n```python\n(.*?)```\n<!-- end {name}"
    (block,) = re.findall(pattern, PAGE, re.DOTALL)
    return block


def rows() -> list[list[str]]:
    cells = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    actual = [[cell.strip() for cell in row] for row in cells]
    return [row for row in actual if row[0] not in ("Pax", "notebook", "Big Vision", "---")]


NAMES = sorted({name for row in rows() for name in re.findall(r"`([^`]+)`", row[1])})


def test_every_row_has_three_cells_and_something_of_paxs():
    assert len(rows()) > 80
    for row in rows():
        assert len(row) == 3 or (len(row) == 2 and not row[-1].strip("|")), row
        assert "`" in row[0], row


def has(owner: object, name: str) -> bool:
    """Returns whether a class has a constructor's argument, a method or a field of that name."""
    parameters = inspect.signature(owner).parameters
    return name in parameters or hasattr(owner, name) or name in owner.__annotations__


def test_every_name_given_as_ours_exists():
    assert_each(exists, ((name, name) for name in NAMES))


def exists(name):
    if name.startswith("--"):
        flag, _, value = name.partition("=")
        parser = parser_of("train", main.MODES["train"], main.MODES)
        assert flag in {string for action in parser._actions for string in action.option_strings}
        assert not value or value in main.MODES
    elif name in ("fdl.Partial", "optax"):
        pass
    elif name.startswith('"'):
        known = {*ACTIVATIONS, *CHECKPOINT_POLICIES}
        assert name.strip('"') in known
    else:
        owner, _, setting = name.partition(".")
        actual = [getattr(place, owner) for place in PLACES if hasattr(place, owner)]
        assert actual, f"no module has {owner}"
        assert not setting or any(has(item, setting) for item in actual), name


@pytest.mark.parametrize("of_pax", ["Learner", "MultiOptimizerLearner", "BaseOptimizer"])
def test_every_setting_of_paxs_learner_and_optimizers_is_in_a_table(of_pax):
    actual = set(re.findall(r"[a-z_0-9]+", " ".join(row[0] for row in rows())))
    expected = set(golden("pax/cases.json")["class_defaults"][of_pax])
    # These have their rows under the names of the classes, and nothing but a name.
    assert expected - actual - {"name"} == set()


def test_a_setting_of_paxs_learner_that_is_absent_is_an_error_that_names_it():
    absent = [
        name
        for row in rows()
        if row[1] == "none" and "learner." in row[0]
        for name in re.findall(r"[a-z_]+", row[0].replace("learner.", ""))
    ]
    assert "scale_update_by_var_norm" in absent
    for name in absent:
        with pytest.raises(TypeError, match=name):
            fdl.Config(learner.Learner, **{name: True})


def test_the_pages_block_runs(tmp_path):
    block = block_of("pax")
    with zipfile.ZipFile(MADE_BY_PAX / "scanned_gda.zip") as file:
        file.extractall(tmp_path)
    model = lm(unroll=False)
    names = {"pax_job_log_dir": tmp_path, "build": model.build}
    exec(block, names)
    assert isinstance(names["module"], nnx.Module)
    assert names["back"].keys() == {path.replace("/lm/", "/") for path in names["pax_vars"]}


def test_the_experiment_after_has_paxs_weights_and_its_step_traces(registry_copy):
    names = {"__name__": "coming_from_pax"}
    exec(block_of("experiment"), names)
    small = configured(names["MyLmSpmd2B"], ["NUM_LAYERS=2", "BATCH_SIZE=16"])
    assert (small.task.model.num_layers, small.datasets["train"].batch_size) == (2, 16)
    job = fdl.build(names["MyLmSpmd2B"]().config())
    result = partitioner.Partitioner(job.task, make_mesh(job.mesh))
    result.train_step.trace(job.datasets["train"].element_spec())
    result.eval_step.trace(job.datasets["heldout"].element_spec())
    result.decode_step.trace(prompt_batch(job.task, [[1, 2, 3]]).element_spec())
    attention = 4 * 3072**2 + 128  # Queries, keys, values, the way out; a scale per dim of a head.
    feed_forward = 2 * 3072 * 12288 + 12288 + 3072
    a_layer = attention + feed_forward + 2 * 2 * 3072
    softmax = 32000 * 3072 + 32000
    assert (
        sum(math.prod(leaf.shape) for leaf in result.layout.select("mdl_vars").leaves())
        == 18 * a_layer + softmax + 2 * 3072
    )
    assert not any(leaf.shape != leaf.padded_shape for leaf in result.layout.leaves())


def test_the_words_of_paxs_experiments_and_functions_are_found():
    words = """PERCORE_BATCH_SIZE USE_REPEATED_LAYER TransformerLmSpmdAdafactor SeqIOInput
        TransformerLmSpmdPipelineAdafactor SyntheticDataset SyntheticLmData set_default_adam
        shard_on_batch_dim_partition_spec infer_partition_spec_based_on_rank_fn _gather
        get_partitioned_spmd_model_decode_fn partition_spmd_model fold_rng_over_axis init_dp loss_fn
        train_step_dp shard_params gather_array_with_mean_grads gather_params shard_module_params
        sync_gradients train_step_fsdp accumulate_gradients print_metrics infer_sharding"""
    given = " ".join(row[0] for row in rows())
    assert [word for word in words.split() if f"`{word}" not in given] == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--exp=tasks.lm.params.c4.C4Spmd", "--job_log_dir=x"], "The name is from Pax"),
        (["--fdl_config=C4", "--job_log_dir=x"], "option of Pax. In praxis_lite it is the name"),
        (["--mode=decode_once", "--job_log_dir=x"], "mode of Pax; in praxis_lite it is decode"),
        (
            ["--exp=lm.Synthetic", "--job_log_dir=x", "--set", "PERCORE_BATCH_SIZE=4"],
            "In praxis_lite it is BATCH_SIZE, for all devices together",
        ),
    ],
)
def test_names_of_pax_are_said_as_that(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main.main(argv)
    message = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and words in message and "docs/coming_from_pax.md" in message
