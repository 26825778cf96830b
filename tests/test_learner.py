"""The learner against NumPy by hand: optimizers, schedule, clipping, skipped steps, weighting."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.errors import ConfigError
from praxis_lite.learner import Learner, group_by_stack
from praxis_lite.metrics import WeightedMean
from praxis_lite.weights import WeightSpec

F32 = jnp.dtype("float32")
# A stack of three layers, a nested stack, and weights of their own.
SPECS = {
    "blocks": {"w": WeightSpec((3, 5, 7), F32, None, (None,))},
    "deep": {"blocks": {"w": WeightSpec((2, 3, 5), F32, None, (None, None))}},
    "logits": {"b": WeightSpec((7,), F32), "w": WeightSpec((7, 2), F32)},
}


def tree(seed: int, scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: (scale * rng.normal(size=spec.shape)).astype(np.float32),
        SPECS,
        is_leaf=lambda x: isinstance(x, WeightSpec),
    )


GRADS = [tree(10 + i, scale=0.1 + i) for i in range(5)]


def run(learner: Learner, grads=GRADS, losses=None) -> list[tuple[Any, Any, dict]]:
    """Returns (params, opt_states, scalars) before and after each step."""
    params = jax.tree.map(jnp.asarray, tree(1))
    history = [(params, jax.jit(lambda params: learner.init(params, SPECS))(params), {})]
    update = jax.jit(
        lambda g, o, p, loss, step: learner.update(g, o, p, SPECS, loss, step)
    )
    for i, grad in enumerate(grads):
        params, opt_states, _ = history[-1]
        loss = jnp.float32(1.0 if losses is None else losses[i])
        history.append(update(grad, opt_states, params, loss, i))
    return history


def global_norm(grads) -> float:
    return np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)))


def schedule(count):
    return 0.1 / (1.0 + count)


def numpy_sgd(grads, rates, momentum=0.9):
    params, trace = tree(1), jax.tree.map(np.zeros_like, tree(1))
    for g, rate in zip(grads, rates, strict=True):
        trace = jax.tree.map(lambda t, g: momentum * t + g, trace, g)
        params = jax.tree.map(lambda p, t, rate=rate: p - rate * t, params, trace)
    return params


def numpy_adamw(grads, rates, b1=0.9, b2=0.98, eps=1e-8, decay=0.1):
    params = tree(1)
    m = v = jax.tree.map(np.zeros_like, params)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, g)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, g)

        def step(p, m, v, t=t, rate=rate):
            adam = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
            return p - rate * (adam + decay * p)

        params = jax.tree.map(step, params, m, v)
    return params


def clipped(grads, most):
    return [
        jax.tree.map(lambda x, g=g: x * min(1.0, most / global_norm(g)), g) for g in grads
    ]


SGD = functools.partial(optax.sgd, momentum=0.9)
ADAMW = functools.partial(optax.adamw, b2=0.98, weight_decay=0.1)


def assert_trees_close(found, wanted, rtol=2e-5, atol=2e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("clip", [0.0, 3.0])
@pytest.mark.parametrize("optimizer, reference", [(SGD, numpy_sgd), (ADAMW, numpy_adamw)])
def test_five_steps_equal_numpy(optimizer, reference, clip):
    history = run(Learner(optimizer, schedule, clip_gradient_norm_to_value=clip))
    grads = clipped(GRADS, clip) if clip else GRADS
    assert not clip or 0 < sum(global_norm(g) > clip for g in GRADS) < 5  # Some, not all.
    wanted = reference(grads, [schedule(i) for i in range(5)])
    assert_trees_close(history[-1][0], wanted)


def test_the_scalars_are_the_global_norm_before_clipping_and_the_rate_of_the_step():
    history = run(Learner(SGD, schedule, clip_gradient_norm_to_value=0.5))
    for i, (_, _, scalars) in enumerate(history[1:]):
        # Over all groups, the stacked ones too, each layer of a stack counted.
        np.testing.assert_allclose(scalars["grad_norm"], global_norm(GRADS[i]), rtol=1e-6)
        np.testing.assert_allclose(scalars["learning_rate"], schedule(i), rtol=1e-6)
        assert int(scalars["num_skipped_steps"]) == 0


def spoilt(i, value):
    grads = jax.tree.map(np.copy, GRADS[i])
    grads["blocks"]["w"][1, 2, 3] = value
    return grads


@pytest.mark.parametrize("clip", [0.0, 3.0])
@pytest.mark.parametrize("what", ["nan gradient", "inf gradient", "nan loss", "inf loss"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(what, clip):
    value = np.nan if "nan" in what else np.inf
    in_gradient = "gradient" in what
    grads = [GRADS[0], spoilt(1, value) if in_gradient else GRADS[1], *GRADS[2:]]
    losses = [1.0, 1.0 if in_gradient else value, 1.0, 1.0, 1.0]
    learner = Learner(ADAMW, schedule, clip_gradient_norm_to_value=clip)
    history = run(learner, grads, losses)
    before, skipped = history[1], history[2]
    jax.tree.map(np.testing.assert_array_equal, skipped[0], before[0])  # Bit for bit.
    jax.tree.map(np.testing.assert_array_equal, skipped[1]["slots"], before[1]["slots"])
    assert [int(h[1]["num_skipped_steps"]) for h in history] == [0, 0, 1, 1, 1, 1]
    # The run is the one without that step, its schedule too: it counts updates, not steps.
    rates = [float(h[2]["learning_rate"]) for h in history[1:]]
    np.testing.assert_allclose(rates, [schedule(i) for i in (0, 1, 1, 2, 3)], rtol=1e-6)
    others = [GRADS[i] for i in (0, 2, 3, 4)]
    wanted = numpy_adamw(clipped(others, clip) if clip else others, map(schedule, range(4)))
    assert_trees_close(history[-1][0], wanted)


def test_a_gradient_of_zero_is_clipped_to_zero_not_to_nan():
    zeros = [jax.tree.map(np.zeros_like, GRADS[0])]
    params, opt_states, scalars = run(
        Learner(optax.sgd, 0.1, clip_gradient_norm_to_value=1.0), zeros
    )[-1]
    jax.tree.map(np.testing.assert_array_equal, params, tree(1))
    assert float(scalars["grad_norm"]) == 0.0 and int(scalars["num_skipped_steps"]) == 0


def test_a_layerwise_optimizer_sees_one_layer_at_a_time():
    """LAMB scales each tensor's update by its norm: layer i of a stack as if it stood alone."""
    params, _, _ = run(Learner(optax.lamb, 0.1), GRADS[:1])[-1]
    optimizer = optax.lamb(0.1)
    update = jax.jit(optimizer.update)
    for i in range(3):
        weight, grad = tree(1)["blocks"]["w"][i], GRADS[0]["blocks"]["w"][i]
        updates, _ = update(grad, optimizer.init(weight), weight)
        np.testing.assert_allclose(params["blocks"]["w"][i], weight + updates, rtol=1e-5)


def test_groups_hold_every_weight_once_by_the_shape_of_its_stack():
    groups = group_by_stack(tree(1), SPECS)
    assert {name: shape for name, (shape, _) in groups.items()} == {
        "stack_3": (3,), "stack_2x3": (2, 3), "unstacked": (),
    }
    assert set(groups["unstacked"][1]["logits"]) == {"b", "w"}
    assert groups["stack_2x3"][1]["deep"]["blocks"]["w"].shape == (2, 3, 5)
    leaves = [leaf for _, group in groups.values() for leaf in jax.tree.leaves(group)]
    assert len(leaves) == 4


def test_a_negative_clip_names_the_setting():
    with pytest.raises(ConfigError, match=r"Learner\.clip_gradient_norm_to_value is -1"):
        Learner(optax.sgd, 0.1, clip_gradient_norm_to_value=-1)


def test_filler_rows_leave_the_weighted_mean_of_an_evaluation_as_it_is():
    from tasks.image_classification import ClassificationTask

    rng = np.random.default_rng(8)
    logits, labels = rng.normal(size=(11, 3)), rng.integers(0, 3, 11)
    log_z = np.log(np.exp(logits).sum(-1))
    xent = log_z - logits[np.arange(11), labels]
    task = ClassificationTask(lambda rngs: None, Learner(optax.sgd, 0.1))
    mean = WeightedMean()
    for start in (0, 4, 8):
        rows = slice(start, start + 4)
        fill = 4 - len(labels[rows])
        batch = {
            "inputs": jnp.asarray(np.pad(logits[rows], ((0, fill), (0, 0))), jnp.float32),
            "labels": jnp.asarray(np.pad(labels[rows], (0, fill)), jnp.int32),
            "weights": jnp.asarray([1.0] * (4 - fill) + [0.0] * fill),
        }
        mean.add(jax.device_get(task.compute_loss(lambda x: x, batch, None)))
    assert mean.result()["loss"] == pytest.approx(xent.mean(), rel=1e-6)
    assert mean.result()["accuracy"] == pytest.approx((logits.argmax(-1) == labels).mean())
    assert mean.weights()["loss"] == 11
