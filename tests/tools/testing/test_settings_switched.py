"""Settings of models of others that only change how a number is computed are found and switched."""

import dataclasses
import enum
from typing import Literal

import fiddle as fdl
import pytest

from praxis_lite.tools.testing import check_on_meshes
from praxis_lite.tools.testing.runs.how_settings import how_settings, switched
from tests.tools.testing import tiny
from tests.tools.testing.defects import by_setting
from tests.tools.testing.defects.defect import replaced


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
    use_remat=True, scan_layers=False, remat_policy: Literal["none", "full"] | None = "full",
    policy_of_remat=Policy.ALL, attn_implementation="xla", kernel="rbf", kernel_init="normal",
    checkpoint_dir="x", scan_unroll=4, num_heads=2, remat_what=None, settings=INNER,
    more=None, checkpoint_every=5, attention="flash", q_block_size=8, num_blocks=3,
    implementation=None,
    backend="numpy",
):
    """Is built of all kinds of settings."""


class Job:
    """A job's config, as far as its task."""

    def __init__(self, **settings):
        self.task = {"a": fdl.Config(model, **settings), "b": [fdl.Config(model)]}


def test_they_are_known_by_their_names_wherever_they_stand():
    settings = {item.name: item for item in how_settings(Job(more={"fused": True, "depth": 3}))}
    assert {name: (one.value, one.others[0]) for name, one in settings.items() if one.others} == {
        "use_remat": (True, False), "scan_layers": (False, True), "remat_policy": ("full", "none"),
        "policy_of_remat": (Policy.ALL, Policy.NONE), "attn_implementation": ("xla", "dot_product"),
        "scan_unroll": (4, 2), "gradient_checkpointing": (False, True),
        "attention": ("flash", "xla"), "q_block_size": (8, 4),
        "vocab_chunk_size": (64, 32), "fused": (True, False),
    }
    # Its other values nobody can know: that is said.
    assert [name for name, setting in settings.items() if not setting.others] == ["remat_what"]


def test_they_are_switched_wherever_they_stand_and_nothing_else_is():
    job = Job(more={"fused": True, "depth": 3}, use_remat=False)
    settings = {setting.name: setting for setting in how_settings(job)}
    remat = switched(job, settings["use_remat"], True)
    assert (remat.task["a"].use_remat, remat.task["b"][0].use_remat) == (True, False)
    inner = switched(job, settings["vocab_chunk_size"], 32).task["a"].settings
    assert inner == Inner(vocab_chunk_size=32)
    assert switched(job, settings["fused"], False).task["a"].more == {"fused": False, "depth": 3}
    assert job.task["a"].settings == Inner() and job.task["a"].more["fused"]


def test_the_librarys_own_are_switched_as_layers():
    class Own:
        task = tiny.Lm().task()

    assert not how_settings(Own)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [tiny.OfLinen, tiny.OfNnx, tiny.OfFunctions])
def test_models_of_every_kind_are_certified(experiment):
    actual = check_on_meshes(experiment, [(2, 2)], steps=2, parts=("settings switched",))
    assert actual.certified, actual.summary()
    kinds = {comparison.what.split(", ")[1] for comparison in actual.comparisons}
    assert len(kinds) == (2 if experiment is tiny.OfFunctions else 3)
    assert {item.what.split(",")[0] for item in actual.comparisons} >= {"evaluation", "decoding"}


@pytest.mark.slow
@pytest.mark.parametrize("defect", by_setting.DEFECTS, ids=lambda defect: defect.name)
def test_a_setting_with_which_other_numbers_come_is_caught(defect):
    first = defect.certificate().first_difference
    assert first is not None
    assert defect.name.split(" ")[0].split("_")[-1] in first.what or "alone" in defect.name


def _refusing(old):
    def hidden_of(x, w, remat, unroll):
        if not remat:
            raise NotImplementedError("no memory for it")
        return old(x, w, remat, unroll)

    return hidden_of


@pytest.mark.slow
def test_a_value_that_the_model_refuses_is_a_remark():
    with replaced(by_setting.HIDDEN, _refusing)():
        actual = check_on_meshes(
            tiny.OfFunctions, [(2, 2)], steps=2, parts=("settings switched",)
        )
    assert actual.certified and {item.what for item in actual.comparisons} >= {"loss, unroll 2"}
    assert "remat = True: not switched (False: no memory for it)." in actual.notes
