"""What evaluation has besides means: a key of its own, and outputs per example."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, Task
from praxis_lite.core import (
    Learner,
    MeshConfig,
    NnxModel,
    Partitioner,
    make_mesh,
)
from praxis_lite.inputs import InMemory
from praxis_lite.job.job_dir import JobDir
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask
from praxis_lite.trainer.evaluation import Evaluator
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.job_runs import home, succeed
from tests.support.marks import slow_but

ROWS, DIMS = 7, 5
RNG = np.random.default_rng(3)
BATCH = {
    "x": RNG.normal(size=(ROWS, DIMS)).astype(np.float32),
    "weights": np.asarray([1, 1, 0, 0.5, 2, 1, 0], np.float32),
}
IS_TRUE = BATCH["weights"] > 0
MESHES = {
    "one device": (Partitioner, (1, 1, 1)),
    "compiler": (Partitioner, (1, 2, 2)),
    "by hand": (explicit_partitioner, (1, 4, 1)),
}


class Scores(Task):
    """Scores rows; an evaluation adds noise to what it reports, training does not."""

    required_inputs = ("x",)

    def compute_loss(self, model, inputs, key):
        scores = inputs["x"] @ model["w"]
        total = jnp.sum(inputs["weights"])
        mean = jnp.sum(jnp.square(scores) * inputs["weights"]) / jnp.maximum(total, 1e-9)
        pairs = jnp.stack([scores, -scores], 1).astype(jnp.bfloat16)
        return {"loss": (mean, total)}, {"score": scores, "pair": pairs}

    def compute_eval_loss(self, model, inputs, key):
        metrics, examples = self.compute_loss(model, inputs, None)
        noise = jax.random.normal(key, inputs["weights"].shape)
        total = jnp.sum(inputs["weights"])
        mean = jnp.sum(noise * inputs["weights"]) / jnp.maximum(total, 1e-9)
        return {**metrics, "noise": (mean, total)}, examples


class Plain(Task):
    """As tasks were before evaluation had a key: dropout-like noise where there is one."""

    def compute_loss(self, model, inputs, key):
        scores = inputs["x"] @ model["w"]
        if key is not None:
            scores += jax.random.normal(key, scores.shape)
        total = jnp.sum(inputs["weights"])
        return {"loss": (jnp.sum(scores * inputs["weights"]) / total, total)}


def init(key):
    return {"w": jax.random.normal(key, (DIMS,))}


def model_of():
    return FunctionModel(init, specs={"w": ("data",)})


@functools.cache
def on_mesh(where, kind=Scores):
    """Returns a partitioner, and the weights it draws."""
    partitioner_class, shape = MESHES[where]
    mesh = make_mesh(MeshConfig(ici_mesh_shape=shape))
    partitioner = partitioner_class(kind(model_of(), Learner(optax.sgd, 0.1)), mesh)
    return partitioner, partitioner.init(partitioner.key(0)).mdl_vars


@functools.cache
def weights():
    return np.asarray(jax.jit(init)(jax.random.key(0))["w"])


def evaluated(where, *, seed=0, step=11, batch=2, kind=Scores):
    """Returns the metrics of an eval step, as floats."""
    partitioner, mdl_vars = on_mesh(where, kind)
    metrics = partitioner.eval_step(
        mdl_vars, partitioner.global_batch(BATCH), partitioner.batch_key(seed, step, batch)
    )
    return {name: float(value) for name, (value, _) in metrics.items()}


@pytest.mark.parametrize("where", slow_but({"compiler"}, MESHES))
def test_per_example_outputs_are_those_of_numpy_on_any_mesh(where):
    partitioner, mdl_vars = on_mesh(where)
    metrics, examples, is_true_row = jax.device_get(
        partitioner.eval_examples(mdl_vars, partitioner.global_batch(BATCH))
    )
    scores = BATCH["x"] @ weights()
    np.testing.assert_allclose(examples["score"], scores, atol=1e-6)
    np.testing.assert_allclose(
        examples["pair"].astype(np.float32), np.stack([scores, -scores], 1), rtol=2**-8
    )
    np.testing.assert_array_equal(is_true_row, IS_TRUE)
    expected = np.average(scores**2, weights=BATCH["weights"])
    np.testing.assert_allclose(metrics["loss"], (expected, 5.5), rtol=1e-5)


def test_an_evaluation_draws_the_same_numbers_on_every_mesh_and_others_by_seed_step_and_batch():
    alone = evaluated("one device")
    assert evaluated("compiler") == pytest.approx(alone, abs=1e-6)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 11), 2)
    noise = np.asarray(jax.random.normal(key, (ROWS,)))
    assert alone["noise"] == pytest.approx(np.average(noise, weights=BATCH["weights"]), abs=1e-6)
    others = [evaluated("one device", **item) for item in ({"seed": 1}, {"step": 12}, {"batch": 3})]
    assert len({element["noise"] for element in [alone, *others]}) == 4
    assert {other["loss"] for other in others} == {alone["loss"]}
    # By hand each device has a key of its own, as in training; the rest is the same.
    by_hand = evaluated("by hand")
    assert by_hand["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert by_hand == evaluated("by hand") and by_hand["noise"] != alone["noise"]


@pytest.mark.parametrize("where", ["one device", "by hand"])
def test_a_task_that_asks_for_nothing_is_evaluated_without_a_key(where):
    expected = np.average(BATCH["x"] @ weights(), weights=BATCH["weights"])
    for settings in ({}, {"seed": 1, "step": 5}):
        actual = evaluated(where, kind=Plain, **settings)
        assert actual == {"loss": pytest.approx(expected, abs=1e-6)}


def test_random_streams_of_an_nnx_module_come_of_the_key_in_evaluation():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.rngs, self.w = rngs, nnx.Param(jnp.zeros(()))

    def noise(**keys):
        return float(jax.random.normal(model.module(mdl_vars, **keys).rngs.noise(), ()))

    model = NnxModel(lambda rngs: Noisy(nnx.Rngs(noise=0)))
    mdl_vars = model.init(jax.random.key(0))
    actual = [noise(), *(noise(eval_key=jax.random.key(k)) for k in (1, 2))]
    assert len(set(actual)) == 3 and actual[0] == noise()
    assert actual[1] == noise(eval_key=jax.random.key(1))


def test_a_train_step_leaves_per_example_outputs_out():
    partitioner, _ = on_mesh("compiler")
    key = partitioner.key(0)
    _, outputs = partitioner.train_step(partitioner.init(key), partitioner.global_batch(BATCH), key)
    assert set(outputs["metrics"]) == {"loss"}


def pairs(inputs, **others):
    return {"loss": (jnp.float32(1.0), jnp.float32(1.0)), **others}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda inputs: pairs(inputs, hits=(inputs["weights"], inputs["weights"])),
            r"\(float32\[7\], float32\[7\]\).*'hits'",
        ),
        (
            lambda inputs: pairs(inputs, hits=(jnp.float32(1.0), jnp.ones((1,)))),
            r"Odd\.compute_(eval_)?loss.*\(float32\[\], float32\[1\]\).*'hits'",
        ),
        (lambda inputs: (pairs(inputs), {"mean": jnp.ones(())}), r"'mean'.*float32\[\]"),
        (lambda inputs: (pairs(inputs), {"few": jnp.ones((3, 7))}), r"'few'.*float32\[3, 7\]"),
        (lambda inputs: (pairs(inputs), {}, 3), r"\(a dict, a dict, a int\)"),
    ],
)
def test_what_is_no_scalar_or_no_row_per_example_is_refused_by_name(returned, message):
    class Odd(Task):
        def compute_loss(self, model, inputs, key):
            return returned(inputs)

    learner = Learner(optax.sgd, 0.1, gradient_accumulation_steps=1)
    partitioner = Partitioner(Odd(model_of(), learner), on_mesh("one device")[0].mesh)
    spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCH.items()}
    for step in ("train", "eval"):
        with pytest.raises(ConfigError, match=message):
            partitioner.steps[step].trace(spec)


def test_a_subclass_with_a_compute_loss_of_its_own_is_evaluated_by_that():
    class Twice(LossTask):
        def compute_loss(self, model, inputs, key):
            (value, weight) = super().compute_loss(model, inputs, key)["loss"]
            return {"loss": (2 * value, weight)}

    def loss(params, inputs, key):
        return inputs["x"][:, 0]

    args = {}, jax.tree.map(jnp.asarray, BATCH), jax.random.key(0)
    means = [
        kind(model_of(), loss, Learner(optax.sgd, 0.1)).compute_eval_loss(*args)
        for kind in (LossTask, Twice)
    ]
    assert float(means[1]["loss"][0]) == 2 * float(means[0][0]["loss"][0])


EXPERIMENTS = '''
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite import Experiment, MeshConfig, RunConfig, register
from praxis_lite.inputs import InMemory
from praxis_lite.core.learner.learner import Learner
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask


def arrays(num_rows=17):
    x = np.linspace(-1.0, 1.0, num_rows * 3).reshape(num_rows, 3).astype(np.float32)
    return {"x": x, "y": (3 * x[:, 0]).astype(np.float32)}


def init(key):
    return {"w": jnp.zeros(3)}


def loss(params, inputs, key):
    found = inputs["x"] @ params["w"]
    error = jnp.square(found - inputs["y"])
    return error, {"is_positive": found > 0, "norm": jnp.sum(jnp.square(params["w"]))}


@register
class Rows(Experiment):
    """A line through 17 points, in batches of five."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 1))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.sgd), learning_rate=0.1)
        return fdl.Config(LossTask, fdl.Config(FunctionModel, init), loss, learner)

    def datasets(self):
        return {
            name: fdl.Config(InMemory, arrays, batch_size=5, shuffle=name == "train")
            for name in ("train", "heldout")
        }

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=2)
'''


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    (home() / "jobzoo/rows.py").write_text(EXPERIMENTS)
    job = JobDir(tmp_path_factory.mktemp("rows") / "job")
    succeed("--exp=jobzoo.rows.Rows", f"--job_log_dir={job.path}")
    return job


def test_eval_writes_a_json_line_per_true_row_in_the_datasets_order(job):
    assert not (job.path / "eval").exists(), "training writes means alone"
    done = succeed("--mode=eval", f"--job_log_dir={job.path}")
    path = job.eval_jsonl("heldout", 2)
    assert f"evaluated 17 examples of heldout with the weights of step 2: {path}" in done.out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # 17 rows in batches of five: the last batch has three rows of filler.
    assert [sorted(line) for line in lines] == [["is_positive", "loss"]] * 17
    mean = json.loads(job.eval_metrics_jsonl.read_text().splitlines()[-1])
    assert np.mean([line["loss"] for line in lines]) == pytest.approx(mean["loss"], rel=1e-6)
    losses = [line["loss"] for line in lines]
    # The fewer steps, the closer to the line y = 3 x0 from far off: large at the ends.
    assert losses[0] > losses[4] > losses[8] < losses[12] < losses[16]
    assert {line["is_positive"] for line in lines} == {True, False}
    # On another mesh, it writes the same examples.
    setting = "mesh.ici_mesh_shape=1,1,1"
    succeed("--mode=eval", f"--job_log_dir={job.path}", "--set", setting)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    for item, other in zip(again, lines, strict=True):
        assert item == pytest.approx(other, rel=1e-6)


def test_a_loss_of_its_own_for_evaluation_gets_a_key_that_the_evaluator_folds(tmp_path):
    def loss(params, inputs, key):
        assert key is None
        return inputs["x"] @ params["w"]

    def eval_loss(params, inputs, key):
        return jax.random.normal(key, inputs["weights"].shape)

    task = LossTask(model_of(), loss, Learner(optax.sgd, 0.1), eval_loss=eval_loss)
    partitioner = Partitioner(task, on_mesh("one device")[0].mesh)
    data = InMemory(
        {"x": RNG.normal(size=(11, DIMS)).astype(np.float32)}, batch_size=7, shuffle=False
    )
    evaluator = Evaluator(partitioner, {"heldout": data}, None, seed=5)
    losses = {
        step: evaluator.run(step, on_mesh("one device")[1])["heldout"]["loss"] for step in (4, 3)
    }
    rows = []
    for batch, num_rows in ((0, 7), (1, 4)):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 3), batch)
        rows += list(np.asarray(jax.random.normal(key, (7,)))[:num_rows])
    assert losses[3] == pytest.approx(np.mean(rows), rel=1e-5)
    assert losses[4] != losses[3]
