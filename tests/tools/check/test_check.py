"""A check certifies what is right, and names what differs first where a defect is planted."""

import json

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core.learner.optimizer_groups import AuxiliaryOptimizer
from praxis_lite.layers import Pipeline
from praxis_lite.main import main
from praxis_lite.models import FunctionModel
from praxis_lite.optimizers import DynamicLossScale
from praxis_tools.check import check_on_meshes
from tests.support.marks import slow_but
from tests.tools.check import tiny
from tests.tools.check.defects import by_pipeline
from tests.tools.check.defects.families import FAMILIES

DEFECTS = {defect.name: defect for defects in FAMILIES.values() for defect in defects}


@pytest.mark.slow
def test_an_experiment_that_is_right_is_certified():
    lines = []
    actual = check_on_meshes(
        tiny.Points,
        [(2, 2)],
        steps=2,
        print_text=lines.append,
        parts=("data", "initial weights", "training", "evaluation", "reference update", "resumed"),
    )
    assert actual.certified, actual.summary()
    assert actual.summary() == f"certified: {len(actual.comparisons)} comparisons on 1 mesh"
    compared = {comparison.kind for comparison in actual.comparisons}
    assert compared >= {
        "data",
        "initial state",
        "loss",
        "metrics",
        "gradients",
        "weights",
        "slots",
        "averages",
        "counts",
        "padding",
        "learner",
        "evaluation",
        "metrics of halves",
        "reference update",
        "restored",
        "losses of a resumed job",
        "state of a resumed job",
        "donated",
        "host transfers",
        "compilations",
    }
    # Rounding in float64, far below what is allowed: no tolerance is there to hide anything.
    assert all(
        item.difference <= 1e-13
        for item in actual.comparisons
        if item.kind != "padding" and item.kind != "metrics of halves"
    )
    assert any("mesh data 2, mdl 2: 2 steps" in line for line in lines)
    table = actual.table()
    assert "data 2, mdl 2" in table
    assert "float64: 1e-9 x the leaf's maximum" in table


# In CI, test_python_calls.py certifies every part of a job.
@pytest.mark.nightly
@pytest.mark.parametrize(
    "experiment, mesh",
    [(tiny.PointsByHand, (3, 2)), (tiny.Lm, (1, 2, 2)), (tiny.Norms, (2, 2))],
    ids=["PointsByHand", "Lm", "Norms"],
)
def test_every_part_of_what_is_right_is_certified(experiment, mesh):
    actual = check_on_meshes(experiment, [mesh], steps=2)
    assert actual.certified, actual.summary()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "pipeline, steps",
    [
        pytest.param({"num_microbatches": 5}, 1, id="five that do not divide"),
        pytest.param({"num_microbatches": 1}, 1, id="one"),
        pytest.param({"microbatch_size": 4}, 1, id="by size"),
        pytest.param({"num_microbatches": 2}, 2, id="accumulated"),
    ],
)
def test_1f1b_with_dropout_is_certified(pipeline, steps):
    class Cut(by_pipeline.OneForward):
        def task(self):
            task = super().task()
            task.model.stacked_transformer_tpl = fdl.Partial(Pipeline, num_stages=2, **pipeline)
            task.learner.gradient_accumulation_steps = steps
            return task

    actual = check_on_meshes(Cut, [(2, 1, 1)], steps=1, parts=("training",))
    assert actual.certified, actual.summary()


@pytest.mark.parametrize(
    "settings",
    [
        {"skip_step_gradient_norm_value": 0.5, "clip_gradient_norm_to_value": 0.0},
        pytest.param({"loss_scale": fdl.Config(DynamicLossScale)}, marks=pytest.mark.slow),
        {
            "apply_separate_scaling": True,
            "auxiliary_optimizers": [
                fdl.Config(
                    AuxiliaryOptimizer,
                    name="biases",
                    optimizer=fdl.Partial(optax.sgd),
                    learning_rate=0.1,
                    regex=".*/b",
                    clip_gradient_norm_to_value=0.01,
                )
            ],
        },
        pytest.param(
            {
                "optimizer": fdl.Partial(optax.contrib.muon),
                "clip_gradient_norm_to_value": 0.0,
                "clip_gradient_single_norm_to_value": 0.1,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["skipped steps", "loss scale", "separate scaling", "clipped by weight"],
)
def test_the_update_by_hand_follows_the_settings_of_a_learner(settings):
    class Trained(tiny.Points):
        def task(self):
            task = super().task()
            for name, value in settings.items():
                setattr(task.learner, name, value)
            return task

    actual = check_on_meshes(Trained, [(2, 2)], steps=4, parts=("reference update",))
    assert actual.certified, actual.summary()
    assert {item.kind for item in actual.comparisons} == {"reference update"}
    assert not actual.notes


@pytest.mark.nightly
def test_a_job_of_adapters_is_certified_without_the_weights_that_it_would_load():
    actual = check_on_meshes(tiny.Lora, [(1, 1, 2)], steps=2, parts=("resumed",))
    assert actual.certified, actual.summary()


class EdgeTask(tiny.PointsTask):
    """A ReLU whose inputs are 0 in float32, and 2^-26 of the points in float64."""

    def logits(self, model, inputs, key):
        x = inputs["inputs"]
        edge = model["edge"]
        ahead = jax.nn.relu(x * ((edge["one"] + edge["little"]) - edge["same"])[None])
        return jnp.tanh(x @ model["w"]) + ahead @ model["w"]


class OnTheEdge(tiny.Points):
    """Points, classified with a ReLU on its edge."""

    def task(self):
        ones = np.ones(6, np.float32)
        edge = {"one": ones, "same": ones, "little": ones * 2.0**-26}
        task = super().task()
        task.model = fdl.Config(
            FunctionModel,
            lambda key: {"edge": edge, "w": jax.random.normal(key, (6, 3))},
            specs={"edge": dict.fromkeys(edge, (None,)), "w": ("data", "mdl")},
        )
        return fdl.Config(EdgeTask, **task.__arguments__)


@pytest.mark.slow
def test_a_relu_on_the_edge_that_rounding_moves_is_no_difference():
    actual = check_on_meshes(
        OnTheEdge, [(2, 2)], steps=1, parts=("data", "initial weights", "training", "as trained")
    )
    assert actual.certified, actual.summary()
    (edge,) = (
        x for x in actual.comparisons if x.kind == "gradients in float32" and "one" in x.leaf
    )
    assert edge.difference > 0.01  # It is: float32 has no gradient there.


def places(name):
    """Returns (what, layer, leaf, step, axis) of a planted defect."""
    first = DEFECTS[name].certificate().first_difference
    return first.kind, first.layer, first.leaf, first.step, first.axis


@pytest.mark.slow
def test_the_layer_and_the_axis_of_a_sum_between_devices_are_named():
    kind, layer, leaf, step, axis = places("psum doubled")
    assert (kind, leaf, step, axis) == ("loss", "metrics/loss/value", 0, "mdl")
    assert layer.startswith("collectives.py:")


@pytest.mark.slow
def test_the_leaf_of_a_slot_that_went_elsewhere_is_named():
    kind, layer, leaf, step, axis = places("the learner on a mesh loses second moments")
    assert kind == "slots"
    assert leaf.startswith("opt_states/slots/")
    assert step == 0
    assert axis in ("data", "mdl")


def test_the_place_of_every_defect_is_there():
    for defect in DEFECTS.values():
        with defect.planted():
            pass


# `make check-defects` plants all of them.
QUICK_SAMPLE = (
    "data: another noise each time",
    "initial weights differ in a last bit",
    "loss: a mean of means",
)
SLOW_SAMPLE = (
    "microbatches: a mean of means",
    "cache is written a place further on",
    "the learner decays weights twice",
    "13 rows: a tenth more",
)


@pytest.mark.parametrize("name", slow_but(QUICK_SAMPLE, (*QUICK_SAMPLE, *SLOW_SAMPLE)))
def test_a_planted_defect_is_caught_at_its_place(name):
    defect = DEFECTS[name]
    assert not defect.missed(defect.certificate().first_difference)


def test_each_defect_has_its_own_name():
    assert len(DEFECTS) == sum(map(len, FAMILIES.values()))


# test_python_calls.py has the certificate of a job that is right, and exit status 0.
@pytest.mark.slow
def test_the_command_exits_1_and_names_what_differs(tmp_path, capsys, monkeypatch):
    from praxis_lite.tasks import image_classification

    old = image_classification.ClassificationTask.compute_loss

    def wrong(self, model, inputs, key):
        metrics = dict(old(self, model, inputs, key))
        value, weight = metrics["loss"]
        return metrics | {"loss": (value, weight * 0 + 1.0)}

    monkeypatch.setattr(image_classification.ClassificationTask, "compute_loss", wrong)
    path = tmp_path / "certificate.json"
    with pytest.raises(SystemExit) as exit_:
        main(
            [
                "--mode=check",
                "--exp=classify.Spirals",
                "--meshes=1x2x1",
                "--steps=1",
                f"--json={path}",
            ]
        )
    assert exit_.value.code == 1
    report = json.loads(path.read_text())
    assert report["certified"] is False
    assert [mesh["shape"] for mesh in report["meshes"]] == [{"replica": 1, "data": 2, "mdl": 1}]
    assert sum(item["number"] for item in report["comparisons"]) == report["num_comparisons"]
    first = report["first_difference"]
    assert set(first) >= {"kind", "layer", "leaf", "step", "axis", "difference", "tolerance"}
    assert first["leaf"] == "metrics/loss/weight"
    assert capsys.readouterr().out.splitlines()[-1].startswith("not certified: ")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--mode=train", "--json=x.json"], "check and plan"),
        (["--mode=check", "--html=x.html"], "; check "),
        (["--mode=check", "--meshes=1x4"], "'1x4';"),
        (["--mode=check", "--steps=0"], " 0;"),
        (["--mode=check", "--json=no/such/folder/x.json"], " no/such/folder"),
    ],
)
def test_a_wrong_option_is_said_before_anything_runs(words, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--exp=lm.Synthetic", *words])
    assert exit_.value.code == 2
    actual = " ".join(capsys.readouterr().err.split())
    assert said in actual


def test_a_part_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="'trainig'"):
        check_on_meshes(tiny.Points, [(2, 2)], parts=("trainig",))
