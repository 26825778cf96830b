"""`--set BATCH_SIZE=32`: attributes of an experiment's class, and a preset by its word."""

import fiddle as fdl
import optax
import pytest

from praxis_lite import ConfigError, Experiment, RunConfig
from praxis_lite.config.config_json import dump_config, load_config
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.core import Learner, MeshConfig
from praxis_lite.layers import (
    COMPILER_OPTIONS,
    SHARDING_PRESETS,
    TransformerLm,
    set_sharding_params,
)
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.support import callables as zoo


class Sized(Experiment):
    """As Pax's users write: sizes as attributes of the class."""

    BATCH_SIZE = 16
    LEARNING_RATE: float = 3e-3
    corpus = fdl.Config(zoo.Corpus, path="a.txt")

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 1, 1))

    def task(self):
        lm = set_sharding_params(fdl.Partial(TransformerLm, 17, 6, 11, 3, 1))
        learner = fdl.Config(Learner, fdl.Partial(optax.adamw), self.LEARNING_RATE)
        return fdl.Config(
            LanguageModelTask, lm, learner, inputs_split_mapping={"map_2d": ("data", None)}
        )

    def datasets(self):
        return {"train": fdl.Config(zoo.Pipeline, self.corpus, batch_size=2 * self.BATCH_SIZE)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=7)


class Wider(Sized):
    """A variant."""

    BATCH_SIZE = 32


def test_attributes_of_an_experiments_class_are_set_before_it_makes_its_config():
    local = ["BATCH_SIZE=5", "LEARNING_RATE=1", "corpus.path=b"]
    config = configured(Wider, ["task.learner.learning_rate=0.5", *local])
    train = config.datasets["train"]
    assert (train.batch_size, train.corpus.path) == (10, "b")
    # A field is set after the attribute that it was made of, whatever the order.
    assert config.task.learner.learning_rate == 0.5
    # What is recorded makes the same again, without the class.
    again = load_config(
        dump_config(config, "tests.Wider", local, packages=["tests"]), packages=["tests"]
    )
    assert (again.config, list(again.overrides)) == (config, local)
    # One job's settings reach no other.
    assert (Wider.BATCH_SIZE, Sized.corpus.path) == (32, "a.txt")
    assert configured(Sized, []).datasets["train"].batch_size == 32


def test_a_preset_is_set_by_its_word_with_the_batchs_split():
    config = configured(Sized, ["SHARDING_PRESET=fsdp"])
    expected = set_sharding_params(fdl.Partial(TransformerLm, 17, 6, 11, 3, 1), "fsdp")
    assert config.task.model == expected != configured(Sized, []).task.model
    batch = SHARDING_PRESETS["fsdp"]["batch"]
    assert config.task.inputs_split_mapping == {"map_2d": (batch, None)}
    with pytest.raises(ConfigError, match="'megatorn'.*megatron"):
        configured(Sized, ["SHARDING_PRESET=megatorn"])


def test_a_preset_keeps_the_ranks_that_are_left_as_they_are():
    class Unsplit(Sized):
        def task(self):
            task = super().task()
            task.inputs_split_mapping = {"map_1d": None, "map_2d": (None, None)}
            return task

    mapping = configured(Unsplit, ["SHARDING_PRESET=fsdp"]).task.inputs_split_mapping
    batch = SHARDING_PRESETS["fsdp"]["batch"]
    assert mapping == {"map_1d": None, "map_2d": (batch, None)}


def test_a_preset_adds_its_compiler_options_to_the_meshs_own():
    class WithOptions(Sized):
        def mesh(self):
            return fdl.Config(MeshConfig, ici_mesh_shape=(1, 1, 1), compiler_options=local)

    of_preset = COMPILER_OPTIONS["fsdp+tensor"]
    assert set(of_preset["tpu"].values()) == {False} and of_preset["v6e"]
    actual = configured(Sized, ["SHARDING_PRESET=fsdp+tensor"]).mesh.compiler_options
    assert actual == of_preset
    local = {"cpu": {"xla_a": 1}, "tpu": {"xla_b": 2, **dict.fromkeys(of_preset["tpu"], True)}}
    actual = configured(WithOptions, ["SHARDING_PRESET=fsdp+tensor"]).mesh.compiler_options
    assert actual == local | {"v6e": of_preset["v6e"]}
    given = "mesh.compiler_options={'tpu': {}}"
    actual = configured(Sized, ["SHARDING_PRESET=fsdp+tensor", given]).mesh.compiler_options
    assert actual == {"tpu": {}}
    assert not configured(Sized, []).mesh.compiler_options


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("BATCH_SIZE=many", "BATCH_SIZE.*'many'.*int.*16"),
        ("BATCH_SIZ=7", r"BATCH_SIZ: .*BATCH_SIZE\?"),
        ("corpuss.path=b", r"corpuss\.path: .*corpus\?"),
        ("datasets.train.batch_sze=7", r"batch_sze: .*datasets\.train\.batch_size"),
        ("task=7", "task: .*'7'"),
        ("config=7", r"--set config: .*config\.txt"),
    ],
)
def test_an_attribute_that_is_none_or_of_another_type_is_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        configured(Sized, [setting])


def test_a_job_that_was_trained_has_no_attributes_any_more():
    with pytest.raises(ConfigError, match=r"datasets\.train\.batch_size"):
        apply_overrides(configured(Sized, []), ["BATCH_SIZE=7"])
