"""Adapters, and what little else is trained, over weights that nothing has trained are refused."""

import functools
import types

import fiddle as fdl
import pytest

from praxis_lite import ConfigError
from praxis_lite.checkpoints.init.frozen_base import check_frozen_base
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.core.sharding.weight_spec import spec_items
from praxis_lite.experiment import registry
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.starting_point import StartingPoints
from tests.support.goldens import GOLDENS

AXES = {"replica": 1, "data": 4, "mdl": 2}


HEAD_ALONE = "task.learner.bprop_variable_exclusion=transformer/.*"
HEADS = "mdl_vars/params/softmax", "mdl_vars/params/final_ln"


@functools.cache
def groups_of(name, *settings):
    task = fdl.build(configured(registry.get_experiment(name), list(settings)).task)
    return layout_and_learner(task, AXES)[1].groups


def paths_of(groups):
    return ["/".join(("mdl_vars/params", *path)) for path, _ in spec_items(groups.weight_specs)]


def refusal(groups, loaded=()):
    with pytest.raises(ConfigError) as refused:
        check_frozen_base(groups, set(loaded), may_be_new=False)
    return str(refused.value)


@pytest.mark.parametrize("name", ["huggingface.ChatLora", "finetune.PyDocsLora"])
def test_adapters_over_new_weights_are_refused_by_the_names_of_these(name):
    groups = groups_of(name)
    message = refusal(groups)
    assert message.startswith("Adapters would be trained over weights that are frozen and random")
    assert "self_attention/" in message and "/w" in message and "HF_DIR=DIRECTORY" in message
    assert "lora" not in message
    check_frozen_base(groups, [], may_be_new=True)
    base = {path for path in paths_of(groups) if "lora" not in path}
    check_frozen_base(groups, base, may_be_new=False)
    # Of a base that is there in part, what is missing is named.
    (missing,) = [path for path in base if path.endswith("self_attention/post/w")][:1]
    message = refusal(groups, base - {missing})
    assert f"1 weights, {missing.removeprefix('mdl_vars/params/')}." in message
    # What no adapter sits on may be new, such as a head.
    other = {path for path in base if path.startswith(HEADS)}
    assert other
    check_frozen_base(groups, base - other, may_be_new=False)


def test_adapters_alone_are_trained_where_the_model_has_a_frozen_weight_of_its_router():
    groups = groups_of("huggingface.ChatLora", f"HF_DIR={GOLDENS / 'hf/deepseek_v3'}")
    trained = {path[-1] for group in groups.by_name.values() for path in group.paths}
    assert trained == {"lora_a", "lora_b"}
    assert any(path.endswith("gate_correction") for path in paths_of(groups))


@pytest.mark.parametrize(
    "settings, is_refused",
    [
        (HEAD_ALONE, True),
        ("task.learner.bprop_variable_inclusion=.*/(b|bias)", True),
        ("task.learner.bprop_variable_inclusion=.*/scale", True),
        ("task.learner.bprop_variable_exclusion=softmax/.*", False),  # Most is trained.
        ("task.learner.bprop_variable_exclusion=.*/scale", False),
    ],
)
def test_little_over_much_that_is_new_is_refused_whatever_it_is(settings, is_refused):
    groups = groups_of("lm.Synthetic", settings)
    if is_refused:
        assert "over weights that are frozen and random" in refusal(groups)
    check_frozen_base(groups, paths_of(groups), may_be_new=False)
    if not is_refused:
        check_frozen_base(groups, [], may_be_new=False)


@pytest.mark.parametrize("name", ["huggingface.ChatDpo", "lm.Synthetic", "seq2seq.Reverse"])
def test_a_frozen_copy_of_what_is_trained_and_models_without_frozen_weights_are_right(name):
    check_frozen_base(groups_of(name), [], may_be_new=False)


def test_a_frozen_base_is_required_until_a_step_is_saved(tmp_path):
    job = types.SimpleNamespace(
        files=JobDir(tmp_path),
        partitioner=types.SimpleNamespace(
            bound_learner=types.SimpleNamespace(groups=groups_of("lm.Synthetic", HEAD_ALONE))
        ),
        run=RunConfig(num_train_steps=7),
    )
    with pytest.raises(ConfigError, match="frozen and random"):
        StartingPoints(job, {})
    step_dir = job.files.checkpoints / "3"
    step_dir.mkdir(parents=True)
    (step_dir / "commit.json").touch()
    StartingPoints(job, {})  # The weights are in the checkpoint.


def test_the_directory_of_a_model_is_its_weights_too():
    for name in ("CausalLm", "ChatFull", "ChatLora", "ChatDpo", "ChatDpoLora"):
        experiment = registry.get_experiment(f"huggingface.{name}")
        assert configured(experiment, []).run.init_from_huggingface is None

    directory = str(GOLDENS / "hf/llama")
    config = configured(registry.get_experiment("huggingface.ChatLora"), [f"HF_DIR={directory}"])
    assert config.run.init_from_huggingface == directory
    config = configured(
        registry.get_experiment("huggingface.CausalLm"),
        [f"HF_DIR={directory}", "run.init_from_huggingface=None"],
    )
    assert config.run.init_from_huggingface is None
