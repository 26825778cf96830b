"""What an experiment's methods must return, and the settings of a run."""

import dataclasses

import fiddle as fdl
import pytest

from praxis_lite import (
    BestCheckpoints,
    ConfigError,
    EarlyStopping,
    EvaluationSettings,
    Experiment,
    Job,
    LossSpikeSettings,
    RunConfig,
    SaveSettings,
    StopSettings,
)
from praxis_lite.run.config.former_settings import FORMER
from praxis_lite.run.config.overrides import apply_overrides
from praxis_lite.run.config.text import config_lines


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
        ConfigError, match=rf"{method}\(\).*{method}\(self"
    ):
        broken.config()


@pytest.mark.parametrize("method", ["mesh", "task"])
def test_a_built_object_is_told_to_become_a_config(method):
    with pytest.raises(
        ConfigError, match=rf"{method}\(\).*fdl\.Config\(Thing"
    ):
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
    assert str(caught.value).startswith(f"run.{field} is {value!r}; wanted is a whole number")


def test_the_runs_defaults_and_limits_are_accepted():
    assert RunConfig(num_train_steps=1).evaluation.every_steps is None
    RunConfig(
        num_train_steps=1, seed=2**32 - 1, checkpoints=SaveSettings(max_to_keep=2),
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


def test_a_part_of_another_class_and_one_checkpoint_alone_are_refused():
    with pytest.raises(ConfigError, match="run.stopping.*StopSettings"):
        RunConfig(num_train_steps=1, stopping=SaveSettings())
    with pytest.raises(ConfigError, match="run.checkpoints.max_to_keep.*1.*2"):
        RunConfig(num_train_steps=1, checkpoints=SaveSettings(max_to_keep=1))


FORMER_VALUES = {
    name: "roll_back" if name == "on_loss_spike" else True if name in (
        "save_non_finite", "eval_use_ema_states", "watchdog_exits"
    ) else EarlyStopping(metric="a/b") if name == "early_stopping"
    else BestCheckpoints(metric="a/b") if name == "best_checkpoints" else 7
    for name in FORMER
}


def test_the_former_settings_are_taken_in_python_with_a_warning_that_names_the_path():
    for name, value in FORMER_VALUES.items():
        part, today = FORMER[name]
        more = {"loss_spikes": LossSpikeSettings(factor=3.0)} if name == "on_loss_spike" else {}
        with pytest.warns(DeprecationWarning, match=f"run.{name}.*run.{part}.{today}"):
            run = RunConfig(num_train_steps=7, **{name: value}, **more)
        assert getattr(getattr(run, part), today) == value
        with pytest.warns(DeprecationWarning, match=f"run.{part}.{today}"):
            assert getattr(run, name) == value
    run = RunConfig(num_train_steps=7)
    with pytest.warns(DeprecationWarning, match="checkpoints.seconds_between"):
        assert run.seconds_between_checkpoints == run.checkpoints.seconds_between == 600
    with pytest.raises(TypeError, match="every_step"):
        RunConfig(num_train_steps=7, every_step=7)


def test_the_former_settings_of_a_config_move_to_their_parts(capsys):
    class Former(Whole):
        def run(self):
            return fdl.Config(
                RunConfig, num_train_steps=13, checkpoint_every_steps=5, loss_spike_factor=3.0,
                checkpoints=fdl.Config(SaveSettings, retries=2),
            )

    config = Former().config()
    assert config.run.checkpoints == fdl.Config(SaveSettings, retries=2, every_steps=5)
    assert config.run.loss_spikes == fdl.Config(LossSpikeSettings, factor=3.0)
    assert "checkpoint_every_steps" not in config.run.__arguments__
    for name, value in (("early_stopping.patience", 5), ("max_checkpoints_to_keep", 9)):
        if "patience" in name:
            apply_overrides(config, ["run.stopping.early=EarlyStopping()"])
        apply_overrides(config, [f"run.{name}={value}"])
    out = capsys.readouterr().out
    assert "note: run.early_stopping is run.stopping.early now" in out
    assert "note: run.max_checkpoints_to_keep is run.checkpoints.max_to_keep now" in out
    assert config.run.stopping.early.patience == 5 and config.run.checkpoints.max_to_keep == 9
    paths = [line.partition("=")[0] for line in config_lines(config)]
    assert "run.checkpoints.every_steps" in paths
    assert not {f"run.{name}" for name in FORMER} & set(paths)
