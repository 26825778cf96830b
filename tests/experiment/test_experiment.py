"""What an experiment's methods must return, and the settings of a run."""

import dataclasses

import fiddle as fdl
import pytest

from praxis_lite import (
    ConfigError,
    EvaluationSettings,
    Experiment,
    Job,
    RunConfig,
    SaveSettings,
    StopSettings,
)


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
    with pytest.raises(ConfigError, match=rf"{method}\(\).*{method}\(self"):
        broken.config()


@pytest.mark.parametrize("method", ["mesh", "task"])
def test_a_built_object_is_told_to_become_a_config(method):
    with pytest.raises(ConfigError, match=rf"{method}\(\).*fdl\.Config\(Thing"):
        variant(**{method: Thing()}).config()


def test_other_wrong_returns_say_what_to_write():
    with pytest.raises(ConfigError, match=r"task\(\)"):
        variant(task=None).config()
    with pytest.raises(ConfigError, match=r"task\(\).*fdl\.Partial"):
        variant(task=fdl.Partial(Thing)).config()
    with pytest.raises(ConfigError, match=r"partitioner\(\)"):
        variant(partitioner=fdl.Config(Thing)).config()
    with pytest.raises(ConfigError, match=r"mesh\(\)"):
        variant(mesh=Thing).config()
    with pytest.raises(ConfigError, match=r"datasets\(\)\['train'\]"):
        variant(datasets={"train": Thing()}).config()
    with pytest.raises(ConfigError, match=r"datasets\(\)"):
        variant(datasets=fdl.Config(Thing)).config()
    with pytest.raises(ConfigError, match="decode_datasets.*'a/b'"):
        variant(decode_datasets={"a/b": fdl.Config(Thing)}).config()
    with pytest.raises(ConfigError, match=r"run\(\).*RunConfig"):
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
        ("log_every_steps", -13),
    ],
)
def test_a_wrong_setting_of_the_run_names_its_path_and_value(field, value):
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{"num_train_steps": 7, field: value})
    assert str(caught.value).startswith(f"run.{field} is {value!r}; expected a whole number")


def test_the_runs_defaults_and_limits_are_accepted():
    assert RunConfig(num_train_steps=1).evaluation.every_steps is None
    RunConfig(
        num_train_steps=1,
        seed=2**32 - 1,
        checkpoints=SaveSettings(max_to_keep=2),
        evaluation=EvaluationSettings(max_batches=1),
    )


@pytest.mark.parametrize(
    ("part", "settings", "path"),
    [
        (SaveSettings, {"every_steps": 0}, "run.checkpoints.every_steps.* 0;"),
        (SaveSettings, {"max_to_keep": 0}, "run.checkpoints.max_to_keep.* 0;"),
        (EvaluationSettings, {"every_steps": "7"}, "run.evaluation.every_steps.*'7';"),
        (EvaluationSettings, {"max_batches": 0}, "run.evaluation.max_batches.* 0;"),
        (StopSettings, {"time_limit_seconds": 0}, "run.stopping.time_limit_seconds.* 0;"),
    ],
)
def test_a_wrong_setting_of_a_part_names_its_path_and_value(part, settings, path):
    with pytest.raises(ConfigError, match=path):
        part(**settings)


def test_one_checkpoint_alone_is_refused():
    with pytest.raises(ConfigError, match="run.checkpoints.max_to_keep.*1.*2"):
        RunConfig(num_train_steps=1, checkpoints=SaveSettings(max_to_keep=1))
