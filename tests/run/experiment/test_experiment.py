"""What an experiment's methods must return, and the settings of a run."""

import dataclasses

import fiddle as fdl
import pytest

from praxis_lite import ConfigError, Experiment, Job, RunConfig


@dataclasses.dataclass(frozen=True)
class Thing:
    size: int = 7


class Whole(Experiment):
    def mesh(self):
        return fdl.Config(Thing, size=1)

    def task(self):
        return fdl.Config(Thing, size=2)

    def datasets(self):
        return {"train": fdl.Config(Thing, size=3), "held-out": fdl.Config(Thing, size=5)}

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=13)


def variant(**methods):
    return type("Variant", (Whole,), {k: lambda self, v=v: v for k, v in methods.items()})()


def test_the_config_builds_a_job_with_the_five_roots():
    built = fdl.build(Whole().config())
    assert built == Job(
        mesh=Thing(1),
        task=Thing(2),
        datasets={"train": Thing(3), "held-out": Thing(5)},
        decode_datasets={},
        run=RunConfig(num_train_steps=13),
    )


@pytest.mark.parametrize("method", ["mesh", "task", "datasets", "run"])
def test_a_missing_method_is_named_with_an_example(method):
    broken = type("Broken", (Whole,), {method: getattr(Experiment, method)})()
    with pytest.raises(
        ConfigError, match=rf"Broken has no method {method}\(\).*def {method}\(self"
    ):
        broken.config()


@pytest.mark.parametrize("method", ["mesh", "task"])
def test_a_built_object_is_told_to_become_a_config(method):
    with pytest.raises(
        ConfigError, match=rf"{method}\(\) returns a built Thing.*fdl\.Config\(Thing"
    ):
        variant(**{method: Thing()}).config()


def test_other_wrong_returns_say_what_to_write():
    with pytest.raises(ConfigError, match=r"task\(\) returns None.*`return` missing"):
        variant(task=None).config()
    with pytest.raises(ConfigError, match=r"task\(\) returns an fdl\.Partial of Thing"):
        variant(task=fdl.Partial(Thing)).config()
    with pytest.raises(ConfigError, match=r"partitioner\(\) returns Config, wanted an fdl"):
        variant(partitioner=fdl.Config(Thing)).config()
    with pytest.raises(ConfigError, match=r"mesh\(\) returns the class Thing"):
        variant(mesh=Thing).config()
    with pytest.raises(ConfigError, match=r"datasets\(\)\['train'\] returns a built Thing"):
        variant(datasets={"train": Thing()}).config()
    with pytest.raises(ConfigError, match=r"datasets\(\) returns Config.*by name"):
        variant(datasets=fdl.Config(Thing)).config()
    with pytest.raises(ConfigError, match=r"a dataset in .* is 'a/b'"):
        variant(decode_datasets={"a/b": fdl.Config(Thing)}).config()
    with pytest.raises(ConfigError, match=r"run\(\) configures Thing, wanted RunConfig"):
        variant(run=fdl.Config(Thing)).config()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_train_steps", 0),
        ("num_train_steps", 7.0),
        ("num_train_steps", None),
        ("num_train_steps", True),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", None),
        ("checkpoint_every_steps", 0),
        ("eval_every_steps", "7"),
        ("log_every_steps", -13),
        ("max_checkpoints_to_keep", 0),
        ("max_eval_batches", 0),
    ],
)
def test_a_wrong_setting_of_the_run_names_its_path_and_value(field, value):
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{"num_train_steps": 7, field: value})
    assert str(caught.value).startswith(f"run.{field} is {value!r}; wanted is a whole number")


def test_the_runs_defaults_and_limits_are_accepted():
    assert RunConfig(num_train_steps=1).eval_every_steps is None
    RunConfig(num_train_steps=1, seed=2**32 - 1, max_checkpoints_to_keep=2, max_eval_batches=1)
