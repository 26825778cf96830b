"""The classification task against NumPy, and an MLP that learns on an uneven mesh."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.classify import Spirals, spirals
from praxis_lite.learner import Learner
from praxis_lite.metrics import WeightedMean
from praxis_lite.partitioner import Partitioner
from praxis_lite.sharding import make_mesh
from tasks.image_classification import ClassificationTask


def test_loss_and_accuracy_are_means_over_weighted_examples():
    rng = np.random.default_rng(16)
    logits, labels = rng.normal(size=(5, 3)), rng.integers(0, 3, 5)
    weights = np.asarray([1.0, 0.5, 1.0, 0.0, 2.0])
    batch = {"inputs": jnp.asarray(logits, jnp.float32), "labels": labels, "weights": weights}
    task = ClassificationTask(lambda rngs: None, Learner(optax.sgd, 0.1))
    metrics = task.compute_loss(lambda x: x, batch, None)
    xent = np.log(np.exp(logits).sum(-1)) - logits[np.arange(5), labels]
    correct = logits.argmax(-1) == labels
    for name, per_example in (("loss", xent), ("accuracy", correct)):
        value, weight = metrics[name]
        assert float(value) == pytest.approx((per_example * weights).sum() / 4.5, rel=1e-6)
        assert float(weight) == 4.5


def test_the_spirals_are_learned_on_a_mesh_that_divides_no_width():
    job = fdl.build(Spirals().config())
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    padding = {leaf.path: leaf.padding_share for leaf in partitioner.layout.leaves()}
    assert padding["mdl_vars/params/hidden/1/linear/w"] > 0  # 61 over 2.
    state, key = partitioner.init(partitioner.key(0)), partitioner.key(0)
    batches = job.datasets["train"].batches()
    for _ in range(job.run.num_train_steps):
        batch = partitioner.global_batch(next(batches))
        state, _ = partitioner.train_step(state, batch, key)
    mean = WeightedMean()
    for inputs in job.datasets["heldout"].batches():
        metrics = partitioner.eval_step(state.mdl_vars, partitioner.global_batch(inputs))
        mean.add(jax.device_get(metrics))
    assert mean.weights()["accuracy"] == 501
    assert mean.result()["accuracy"] > 0.95
    # A straight line would not do: the classes are no better than chance to a linear model.
    train, heldout = spirals(4000, 0), spirals(501, 1)
    linear = np.linalg.lstsq(train["inputs"], np.eye(3)[train["labels"]], rcond=None)[0]
    assert ((heldout["inputs"] @ linear).argmax(-1) == heldout["labels"]).mean() < 0.6
