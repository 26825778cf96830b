"""Settings of models of others that only change how a number is computed are found and switched."""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Literal

import fiddle as fdl
import jax
import pytest
from flax import nnx

from praxis_tools.check import check_on_meshes
from praxis_tools.check.runs.implementation_settings import (
    implementation_settings,
    switch_remat,
    switch_setting,
)
from tests.tools.check import tiny
from tests.tools.check.defects import by_pipeline, by_remat, by_setting
from tests.tools.check.defects.defect import replaced


class Policy(enum.Enum):
    """Which values are kept."""

    ALL = 1
    NONE = 2


@dataclasses.dataclass
class Inner:
    """Settings of a user's own."""

    gradient_checkpointing: bool = False
    vocab_chunk_size: int = 64
    load_checkpoint: bool = False
    width: int = 8


INNER = Inner()


def model(
    use_remat=True,
    scan_layers=False,
    remat_policy: Literal["none", "full"] | None = "full",
    policy_of_remat=Policy.ALL,
    attn_implementation="xla",
    kernel="rbf",
    kernel_init="normal",
    checkpoint_dir="x",
    scan_unroll=4,
    num_heads=2,
    remat_what=None,
    settings=INNER,
    more=None,
    checkpoint_every=5,
    attention="flash",
    q_block_size=8,
    num_blocks=3,
    implementation=None,
    backend="numpy",
):
    """Is built of all kinds of settings."""


class Job:
    """A job's config, as far as its task."""

    def __init__(self, **settings):
        self.task = {"a": fdl.Config(model, **settings), "b": [fdl.Config(model)]}


def test_they_are_known_by_their_names_wherever_they_stand():
    job = Job(more={"fused": True, "depth": 3})
    settings = {item.name: item for item in implementation_settings(job)}
    found = {name: (x.value, x.alternatives[0]) for name, x in settings.items() if x.alternatives}
    assert found == {
        "use_remat": (True, False),
        "scan_layers": (False, True),
        "remat_policy": ("full", "none"),
        "policy_of_remat": (Policy.ALL, Policy.NONE),
        "attn_implementation": ("xla", "dot_product"),
        "scan_unroll": (4, 2),
        "gradient_checkpointing": (False, True),
        "attention": ("flash", "xla"),
        "q_block_size": (8, 4),
        "vocab_chunk_size": (64, 32),
        "fused": (True, False),
    }
    # Its other values nobody can know: that is said.
    assert [name for name, x in settings.items() if not x.alternatives] == ["remat_what"]


def test_they_are_switched_wherever_they_stand_and_nothing_else_is():
    job = Job(more={"fused": True, "depth": 3}, use_remat=False)
    settings = {setting.name: setting for setting in implementation_settings(job)}
    remat = switch_setting(job, settings["use_remat"], True)
    assert (remat.task["a"].use_remat, remat.task["b"][0].use_remat) == (True, False)
    inner = switch_setting(job, settings["vocab_chunk_size"], 32).task["a"].settings
    assert inner == Inner(vocab_chunk_size=32)
    unfused = switch_setting(job, settings["fused"], False).task["a"]
    assert unfused.more == {"fused": False, "depth": 3}
    assert job.task["a"].settings == Inner() and job.task["a"].more["fused"]


def test_the_librarys_own_are_switched_as_layers():
    class Own:
        task = tiny.Lm().task()

    assert not implementation_settings(Own)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [tiny.OfLinen, tiny.OfNnx, tiny.OfFunctions])
def test_models_of_every_kind_are_certified(experiment):
    actual = check_on_meshes(experiment, [(2, 2)], steps=2, parts=("settings switched",))
    assert actual.certified, actual.summary()
    kinds = {comparison.kind.split(", ")[1] for comparison in actual.comparisons}
    assert len(kinds) == (2 if experiment is tiny.OfFunctions else 3)
    assert {item.kind.split(",")[0] for item in actual.comparisons} >= {"evaluation", "decoding"}


def _refusing(old):
    def hidden_of(x, w, remat, unroll):
        if not remat:
            raise NotImplementedError("no memory for it")
        return old(x, w, remat, unroll)

    return hidden_of


@pytest.mark.slow
def test_a_value_that_the_model_refuses_is_a_remark():
    with replaced(by_setting.HIDDEN, _refusing)():
        actual = check_on_meshes(tiny.OfFunctions, [(2, 2)], steps=2, parts=("settings switched",))
    assert actual.certified and {item.kind for item in actual.comparisons} >= {"loss, unroll 2"}
    assert "remat = True: not switched (False: no memory for it)." in actual.notes


def remat_of_others(
    activation_checkpointing: str = "full",
    recompute=False,
    remat_every=2,
    checkpoint_policy: Callable | None = None,
    remat_saves=jax.checkpoint_policies.checkpoint_dots,
    remat_layer: str | None = None,
    remat_places=(("context", "device"),),
    checkpoint_steps=3,
):
    """Is built of all kinds of settings of remat."""


@pytest.mark.parametrize(
    "template",
    [remat_of_others, functools.partial(remat_of_others), fdl.Partial(remat_of_others)],
    ids=["bare", "functools", "fiddle"],
)
def test_settings_of_remat_are_found_in_templates_of_every_kind(template):
    job = Job()
    job.task = fdl.Config(model, use_remat=None, remat_policy=None, more=[template])
    found = {item.name: item for item in implementation_settings(job)}
    policies = jax.checkpoint_policies
    of_remat = [x for x in found.values() if x.is_remat and x.alternatives]
    assert {x.name: x.alternatives[0] for x in of_remat} == {
        "activation_checkpointing": "none",
        "recompute": True,
        "remat_every": 0,
        "checkpoint_policy": policies.nothing_saveable,
        "remat_layer": "none",
        "remat_places": "save_everything",
        "remat_saves": None,
        "gradient_checkpointing": True,
        "remat_policy": "none",
        "policy_of_remat": Policy.NONE,
    }
    changed = switch_setting(job, found["recompute"], True).task.more[0]
    assert changed.recompute is True and changed.remat_every == 2


def _switched_of(experiment):
    task = switch_remat(fdl.build(experiment().task()))
    return (
        {}
        if task is None
        else {
            (*path, name): value
            for path, layer in nnx.compat.iter_modules(task.model.abstract_module())
            for name, value in vars(layer).items()
            if name in ("remat", "checkpoint_policy", "split_backward", "config")
        }
    )


@pytest.mark.parametrize(
    "experiment, expected",
    [
        (tiny.Lm, {("transformer", "checkpoint_policy"): "save_everything"}),
        (tiny.RowOfLayers, {("transformer", "checkpoint_policy"): "save_nothing"}),
        (
            by_pipeline.Split,
            {
                ("transformer", "checkpoint_policy"): "save_everything",
                ("transformer", "split_backward"): False,
            },
        ),
        (tiny.InnerRematOfOthers, {("stack", "remat"): False}),
        (tiny.OfNnx, {("config",): tiny.HowConfig(remat=False)}),
        (tiny.Norms, {}),
        (tiny.OfLinen, {}),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_attributes_of_remat_are_switched_in_the_built_model(experiment, expected):
    assert _switched_of(experiment) == expected


@pytest.mark.parametrize(
    "experiment, mesh",
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (tiny.ScannedRematOfOthers, (2, 2)),
                (tiny.InnerRematOfOthers, (2, 2)),
            )
        ),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (tiny.RematOfOthers, (2, 2)),
                (tiny.BareRematOfOthers, (2, 2)),
                (tiny.RowOfLayers, (1, 2, 2)),
                (by_remat.Stages, (2, 1, 1)),
                (by_pipeline.Split, (2, 1, 1)),
            )
        ),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_remat_that_is_right_is_certified(experiment, mesh):
    parts = ("remat switched", "settings switched")
    actual = check_on_meshes(experiment, [mesh], steps=1, parts=parts)
    assert actual.certified, actual.summary()
    assert {"gradients, remat switched", "weights, remat switched"} <= {
        item.kind for item in actual.comparisons
    }
