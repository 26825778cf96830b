"""Every name that docs/coming_from_pax.md gives as this library's exists, and its block runs."""

import functools
import inspect
import re
import zipfile
from pathlib import Path

import fiddle as fdl
import pytest
from flax import nnx

from praxis_lite import (
    decode,
    decoding,
    early_stopping,
    evaluation,
    experiment,
    inputs,
    layers,
    learner,
    main,
    optimizer_groups,
    optimizers,
    partitioner,
    registry,
    regularization,
    schedules,
    sharding,
    task,
    train_state,
    trainer,
    weights,
)
from praxis_lite.checkpoints import checkpoints, loading_rules
from praxis_lite.interop import pax_job
from praxis_lite.tasks import image_classification, language_model, sequence_to_sequence
from tests.goldens import golden
from tests.interop.test_pax_checkpoints import MADE_BY_PAX, lm

PAGE = (Path(__file__).parents[1] / "docs/coming_from_pax.md").read_text(encoding="utf-8")
PLACES = (
    layers, learner, decode, experiment, inputs, task, trainer, decoding, partitioner, checkpoints,
    train_state, registry, sharding, weights, language_model, early_stopping, evaluation,
    image_classification, sequence_to_sequence, pax_job, optimizers, optimizer_groups, schedules,
    regularization, loading_rules,
)  # fmt: skip


def rows() -> list[list[str]]:
    cells = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in row] for row in cells]
    return [row for row in found if row[0] not in ("Pax", "---")]


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


@pytest.mark.parametrize("name", NAMES)
def test_every_name_given_as_ours_exists(name):
    if name.startswith("--"):
        flag, _, value = name.partition("=")
        (action,) = [a for a in main._parser()._actions if flag in a.option_strings]
        assert not value or value in action.choices
    elif name in ("fdl.Partial", "optax"):
        pass
    elif name.startswith('"'):
        known = {*layers.activations.ACTIVATIONS, *layers.repeats.CHECKPOINT_POLICIES}
        assert name.strip('"') in known
    else:
        owner, _, setting = name.partition(".")
        found = [getattr(place, owner) for place in PLACES if hasattr(place, owner)]
        assert found, f"no module has {owner}"
        assert not setting or any(has(one, setting) for one in found), name


@pytest.mark.parametrize("of_pax", ["Learner", "MultiOptimizerLearner", "BaseOptimizer"])
def test_every_setting_of_paxs_learner_and_optimizers_is_in_a_table(of_pax):
    found = set(re.findall(r"[a-z_0-9]+", " ".join(row[0] for row in rows())))
    wanted = set(golden("pax/cases.json")["class_defaults"][of_pax])
    # These have their rows under the names of the classes, and nothing but a name.
    assert wanted - found - {"name"} == set()


def test_a_setting_of_paxs_learner_that_is_absent_is_an_error_that_names_it():
    absent = [
        name for row in rows() if row[1] == "none" and "learner." in row[0]
        for name in re.findall(r"[a-z_]+", row[0].replace("learner.", ""))
    ]
    assert "scale_update_by_var_norm" in absent
    for name in absent:
        with pytest.raises(TypeError, match=name):
            fdl.Config(learner.Learner, **{name: True})


def test_the_pages_block_runs(tmp_path):
    (block,) = re.findall(r"begin pax -->\n```python\n(.*?)```\n<!-- end pax", PAGE, re.DOTALL)
    with zipfile.ZipFile(MADE_BY_PAX / "scanned_gda.zip") as file:
        file.extractall(tmp_path)
    model = lm(unroll=False)
    names = {"pax_job_log_dir": tmp_path, "build": functools.partial(model._build)}
    exec(block, names)
    assert isinstance(names["module"], nnx.Module)
    assert names["back"].keys() == {
        path.replace("/lm/", "/") for path in names["pax_vars"]
    }
