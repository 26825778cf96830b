"""The learner against NumPy by hand: optimizers, schedule, clipping, skipped steps, weighting."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError, Task
from praxis_lite.core import (
    AuxiliaryOptimizer,
    Learner,
    MeshConfig,
    Partitioner,
    WeightSpec,
    make_mesh,
)
from praxis_lite.core.learner import update as learner_update
from praxis_lite.core.learner.slots import slot_specs
from praxis_lite.core.sharding.weight_spec import spec_items
from praxis_lite.layers import BaseLayer, Linear
from praxis_lite.layers.base.variables import stacked
from praxis_lite.optimizers import DynamicLossScale, regularized

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


def compiled(learner: Learner):
    """Returns the learner's functions of `run`."""
    bound = learner.bind(SPECS)

    @jax.jit
    def update(grads, opt_states, params, loss):
        trainable, _ = bound.groups.split(grads)
        return bound.update(trainable, opt_states, params, loss)[:3]

    return jax.jit(bound.init), update


def run(learner: Learner, grads=GRADS, losses=None, functions=None) -> list[tuple[Any, Any, dict]]:
    """Returns (params, opt_states, scalars) before and after each step."""
    init, update = functions or compiled(learner)
    params = jax.tree.map(jnp.asarray, tree(1))
    history = [(params, init(params), {})]
    for i, grad in enumerate(grads):
        params, opt_states, _ = history[-1]
        loss = jnp.float32(1.0 if losses is None else losses[i])
        history.append(update(grad, opt_states, params, loss))
    return history


def by_path(tree) -> dict[str, Any]:
    return {"/".join(path): leaf_at(tree, path) for path, _ in spec_items(SPECS)}


def leaf_at(tree, path):
    for part in path:
        tree = tree[part]
    return tree


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
    return [jax.tree.map(lambda x, g=g: x * min(1.0, most / global_norm(g)), g) for g in grads]


SGD = functools.partial(optax.sgd, momentum=0.9)
ADAMW = functools.partial(optax.adamw, b2=0.98, weight_decay=0.1)


def assert_trees_close(actual, expected, rtol=2e-5, atol=2e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "optimizer, reference, clip", [(SGD, numpy_sgd, 0.0), (ADAMW, numpy_adamw, 3.0)]
)
def test_five_steps_equal_numpy(optimizer, reference, clip):
    history = run(Learner(optimizer, schedule, clip_gradient_norm_to_value=clip))
    grads = clipped(GRADS, clip) if clip else GRADS
    assert not clip or 0 < sum(global_norm(g) > clip for g in GRADS) < 5  # Some, not all.
    expected = reference(grads, [schedule(i) for i in range(5)])
    assert_trees_close(history[-1][0], expected)


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


# A condition on a CPU, a choice for each element elsewhere.
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("clip", [0.0, 3.0])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(clip, platform, monkeypatch):
    monkeypatch.setattr(learner_update, "compiled_platform", lambda: platform)
    learner = Learner(ADAMW, schedule, clip_gradient_norm_to_value=clip)
    functions = compiled(learner)
    for value in (np.nan, np.inf):
        spoilt_gradient = [GRADS[0], spoilt(1, value), *GRADS[2:]]
        assert_skipped(run(learner, spoilt_gradient, functions=functions), clip)
        losses = [1.0, value, 1.0, 1.0, 1.0]
        assert_skipped(run(learner, losses=losses, functions=functions), clip)


def assert_skipped(history, clip):
    """Checks a run of AdamW whose second step is skipped."""
    before, skipped = history[1], history[2]
    jax.tree.map(np.testing.assert_array_equal, skipped[0], before[0])  # Bit for bit.
    jax.tree.map(np.testing.assert_array_equal, skipped[1]["slots"], before[1]["slots"])
    assert [int(h[1]["num_skipped_steps"]) for h in history] == [0, 0, 1, 1, 1, 1]
    # The run is the one without that step, its schedule too: it counts updates, not steps.
    rates = [float(h[2]["learning_rate"]) for h in history[1:]]
    np.testing.assert_allclose(rates, [schedule(i) for i in (0, 1, 1, 2, 3)], rtol=1e-6)
    others = [GRADS[i] for i in (0, 2, 3, 4)]
    expected = numpy_adamw(clipped(others, clip) if clip else others, map(schedule, range(4)))
    assert_trees_close(history[-1][0], expected)


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


def spoilt_run(learner, values):
    """Returns a run whose gradients are multiplied by `values`, as many steps."""
    return run(
        learner,
        [jax.tree.map(lambda x, v=v: x * np.float32(v), GRADS[i]) for i, v in enumerate(values)],
    )


def test_without_vectorization_an_optimizer_sees_whole_stacks_as_pax_does_then():
    # The update is the gradient divided by its norm: of a layer, or of the whole array.
    by_norm = functools.partial(
        optax.stateless_with_tree_map, lambda g, _: -g / jnp.sqrt(jnp.sum(g * g))
    )
    learner = Learner(
        lambda learning_rate: by_norm(),
        1.0,
        vectorize_on_repeat_prefix=False,
        clip_gradient_single_norm_to_value=0.3,
    )
    assert set(learner.bind(SPECS).groups.by_name) == {"unstacked"}
    params, _, _ = run(learner, GRADS[:1])[-1]
    expected = jax.tree.map(lambda w, g: w - g / global_norm(g), tree(1), GRADS[0])
    assert_trees_close(params, expected)
    sgd = Learner(
        optax.sgd, 1.0, vectorize_on_repeat_prefix=False, clip_gradient_single_norm_to_value=0.3
    )
    expected = jax.tree.map(lambda w, g: w - g * min(1.0, 0.3 / global_norm(g)), tree(1), GRADS[0])
    assert_trees_close(run(sgd, GRADS[:1])[-1][0], expected)


def test_slots_of_whole_stacks_split_as_their_weights():
    whole = Learner(optax.adafactor, 0.1, vectorize_on_repeat_prefix=False)
    weights = {"w": WeightSpec((3, 257, 131), F32, ("data", "mdl"), ("stage",))}
    specs = {"w": P("stage", "data", "mdl")}
    actual = slot_specs(whole.bind(weights).groups.by_name, weights, specs)["unstacked"]
    state = jax.eval_shape(whole.optimizer.init, {"w": jax.ShapeDtypeStruct((3, 257, 131), F32)})
    # It factors the two largest dims.
    by_shape = {
        slot.shape: spec
        for slot, spec in zip(
            jax.tree.leaves(state),
            jax.tree.leaves(actual, is_leaf=lambda s: isinstance(s, P)),
            strict=True,
        )
    }
    assert by_shape[(3, 131)] == P("stage", "mdl") and by_shape[(3, 257)] == P("stage", "data")


def test_a_gradient_that_is_too_large_is_skipped_and_told_apart():
    limit = 1.0 + max(map(global_norm, GRADS))
    learner = Learner(SGD, schedule, skip_step_gradient_norm_value=limit)
    history = spoilt_run(learner, [1, 1e3, np.nan, 1, 1e3])
    actual = {
        name: [float(h[2][name]) for h in history[1:]]
        for name in ("num_skipped_steps", "num_skipped_in_a_row", "is_gradient_too_large")
    }
    assert actual == {
        "num_skipped_steps": [0, 1, 2, 2, 3],
        "num_skipped_in_a_row": [0, 1, 2, 0, 1],
        "is_gradient_too_large": [0, 1, 0, 0, 1],
    }
    for skipped in (2, 3, 5):
        for before, after in zip(history[skipped - 1][:2], history[skipped][:2], strict=True):
            for name in ("slots", "blocks"):
                if name in before:
                    jax.tree.map(np.testing.assert_array_equal, after[name], before[name])
    assert_trees_close(history[-1][0], numpy_sgd([GRADS[0], GRADS[3]], map(schedule, range(2))))


def test_a_single_norm_is_of_each_weight_and_of_each_layer_of_a_stack():
    params, _, scalars = run(
        Learner(optax.sgd, 1.0, clip_gradient_single_norm_to_value=0.3), GRADS[:1]
    )[-1]
    stack_ranks = {path: len(spec.stack_shape) for path, spec in spec_items(SPECS)}
    num_clipped, num_layers = 0, 0
    for path, rank in stack_ranks.items():
        actual, weight, grad = (leaf_at(t, path) for t in (params, tree(1), GRADS[0]))
        for layer in np.ndindex(weight.shape[:rank]):
            norm = global_norm(grad[layer])
            num_layers, num_clipped = num_layers + 1, num_clipped + (norm > 0.3)
            expected = weight[layer] - grad[layer] * min(1.0, 0.3 / norm)
            np.testing.assert_allclose(actual[layer], expected, rtol=1e-5, atol=1e-6)
    assert 0 < num_clipped < num_layers
    # What is reported, and what a step is skipped by, is the norm before clipping.
    np.testing.assert_allclose(scalars["grad_norm"], global_norm(GRADS[0]), rtol=1e-6)


def test_a_value_clips_the_elements_of_every_gradient():
    params, _, _ = run(Learner(optax.sgd, 1.0, clip_gradient_to_value=0.1), GRADS[:1])[-1]
    expected = jax.tree.map(lambda w, g: w - np.clip(g, -0.1, 0.1), tree(1), GRADS[0])
    assert_trees_close(params, expected)


# Matrices of the blocks and the bias by SGD at a rate of its own, the rest by AdamW.
SGD_RATE = 0.03
TWO_OPTIMIZERS = (AuxiliaryOptimizer(".*blocks/w|logits/b", SGD, SGD_RATE, "sgd"),)


@pytest.mark.parametrize("clip", [0.0, 3.0])
def test_two_optimizers_equal_numpy_each_on_its_weights(clip):
    learner = Learner(
        ADAMW, schedule, auxiliary_optimizers=TWO_OPTIMIZERS, clip_gradient_norm_to_value=clip
    )
    history = run(learner)
    # The norm is of all gradients, whatever their optimizer.
    grads = clipped(GRADS, clip) if clip else GRADS
    by_sgd = by_path(numpy_sgd(grads, [SGD_RATE] * 5))
    expected = by_path(numpy_adamw(grads, map(schedule, range(5))))
    local = {"blocks/w", "deep/blocks/w", "logits/b"}
    expected |= {path: by_sgd[path] for path in local}
    assert_trees_close(by_path(history[-1][0]), expected)
    _, opt_states, scalars = history[-1]
    assert set(opt_states["slots"]) == {
        "unstacked", "sgd.unstacked", "sgd.stack_3", "sgd.stack_2x3",
    }  # fmt: skip
    np.testing.assert_allclose(scalars["learning_rate"], schedule(4), rtol=1e-6)
    np.testing.assert_allclose(scalars["learning_rate/sgd"], SGD_RATE, rtol=1e-6)


@pytest.mark.parametrize("kind", ["norm", "single_norm"])
def test_separate_scaling_clips_each_optimizers_gradients_by_their_own_norm(kind):
    aux = AuxiliaryOptimizer(
        "logits", optax.sgd, 0.5, "head", **{f"clip_gradient_{kind}_to_value": 0.2}
    )
    learner = Learner(
        optax.sgd,
        1.0,
        auxiliary_optimizers=[aux],
        apply_separate_scaling=True,
        clip_gradient_norm_to_value=3.0,
    )
    params, _, scalars = run(learner, GRADS[2:3])[-1]
    grads, weights = by_path(GRADS[2]), by_path(tree(1))
    of_head = {path: grads.pop(path) for path in ("logits/b", "logits/w")}
    for path, grad in grads.items():
        factor = 3.0 / global_norm(grads)
        assert factor < 1.0
        np.testing.assert_allclose(
            by_path(params)[path], weights[path] - factor * grad, rtol=1e-5, atol=1e-6
        )
    for path, grad in of_head.items():
        factor = 0.2 / global_norm(of_head if kind == "norm" else grad)
        np.testing.assert_allclose(
            by_path(params)[path], weights[path] - 0.5 * factor * grad, rtol=1e-5, atol=1e-6
        )
    np.testing.assert_allclose(scalars["grad_norm"], global_norm(GRADS[2]), rtol=1e-6)


def test_separate_scaling_skips_a_step_by_the_largest_of_the_norms():
    grads = {**by_path(GRADS[2])}
    of_head = global_norm([grads.pop("logits/b"), grads.pop("logits/w")])
    of_main = global_norm(grads)
    assert of_head < of_main < global_norm(GRADS[2])

    def num_skipped(limit, **settings):
        aux = AuxiliaryOptimizer("logits", optax.sgd, 0.5, "head")
        learner = Learner(
            optax.sgd,
            1.0,
            auxiliary_optimizers=[aux],
            skip_step_gradient_norm_value=limit,
            **settings,
        )
        return int(run(learner, GRADS[2:3])[-1][2]["num_skipped_steps"])

    between = 0.5 * (of_main + global_norm(GRADS[2]))
    assert num_skipped(between) == 1 and num_skipped(between, apply_separate_scaling=True) == 0
    assert num_skipped(0.5 * (of_head + of_main), apply_separate_scaling=True) == 1


def test_a_schedule_of_an_auxiliary_optimizer_counts_updates_too():
    aux = AuxiliaryOptimizer(".*b", SGD, lambda count: 0.5 + count, "biases")
    history = spoilt_run(Learner(SGD, 0.1, auxiliary_optimizers=[aux]), [1, np.inf, 1])
    actual = [float(h[2]["learning_rate/biases"]) for h in history[1:]]
    assert actual == [0.5, 1.5, 1.5]
    expected = numpy_sgd([GRADS[0], GRADS[2]], [0.5, 1.5])
    assert_trees_close(history[-1][0]["logits"]["b"], expected["logits"]["b"])


@pytest.mark.parametrize(
    "choice",
    [
        {"bprop_variable_exclusion": ("blocks/.*", "logits/w")},
        {"bprop_variable_inclusion": ["deep/.*", "logits/b"]},
    ],
)
def test_what_is_frozen_stays_and_has_no_slot_and_no_part_in_the_norm(choice):
    frozen = {"blocks/w", "logits/w"}
    learner = Learner(SGD, schedule, clip_gradient_norm_to_value=0.7, ema_decay=0.5, **choice)
    history = run(learner)
    trained = [{"deep": g["deep"], "b": g["logits"]["b"]} for g in GRADS]
    params, opt_states, scalars = history[-1]
    np.testing.assert_allclose(scalars["grad_norm"], global_norm(trained[-1]), rtol=1e-6)
    grads = [
        jax.tree.map(lambda x, t=t: x * min(1.0, 0.7 / global_norm(t)), g)
        for g, t in zip(GRADS, trained, strict=True)
    ]
    expected = by_path(numpy_sgd(grads, map(schedule, range(5))))
    for path, actual in by_path(params).items():
        if path in frozen:
            np.testing.assert_array_equal(actual, by_path(tree(1))[path])
        else:
            np.testing.assert_allclose(actual, expected[path], rtol=2e-5, atol=2e-6)
    # One momentum, of what is trained, and counts of the schedule: one, and one per layer.
    slots = jax.tree.leaves(opt_states["slots"])
    assert sum(x.size for x in slots if x.dtype == F32) == 2 * 3 * 5 + 7
    assert sum(x.size for x in slots if x.dtype != F32) == 1 + 2 * 3
    shapes = jax.tree.map(jnp.shape, opt_states["ema"], is_leaf=lambda x: hasattr(x, "shape"))
    assert shapes == {"deep": {"blocks": {"w": (2, 3, 5)}}, "logits": {"b": (7,)}}


def test_a_gradient_of_a_frozen_weight_that_is_not_finite_does_not_exist():
    learner = Learner(SGD, 0.1, bprop_variable_exclusion="blocks/.*")
    assert int(run(learner, [spoilt(0, np.nan)])[-1][1]["num_skipped_steps"]) == 0


def numpy_ema(params, decay):
    """Returns the average after each step, of the weights before each."""
    averages = [params[0]]
    for count, p in enumerate(params[:-1]):
        rate = min(decay, (1 + count) / (10 + count))
        averages.append(jax.tree.map(lambda e, p, r=rate: r * e + (1 - r) * p, averages[-1], p))
    return averages


def test_the_average_is_of_the_weights_before_each_update_with_a_decay_that_grows():
    history = run(Learner(SGD, schedule, ema_decay=0.3))  # 0.1, 2/11, 0.25, 0.3, 0.3
    weights = [jax.tree.map(np.float64, h[0]) for h in history]
    for actual, expected in zip(history, numpy_ema(weights, 0.3), strict=True):
        assert_trees_close(actual[1]["ema"], expected)


def test_a_skipped_step_does_not_advance_the_average():
    learner = Learner(SGD, schedule, ema_decay=0.3)
    history = spoilt_run(learner, [1, 1, np.nan, 1, 1])
    jax.tree.map(np.testing.assert_array_equal, history[3][1]["ema"], history[2][1]["ema"])
    result = [jax.tree.map(np.float64, history[i][0]) for i in (0, 1, 2, 4, 5)]
    assert_trees_close(history[-1][1]["ema"], numpy_ema(result, 0.3)[-1])


def test_evaluation_has_the_average_of_what_is_trained_and_the_rest_as_it_is():
    learner = Learner(SGD, schedule, ema_decay=0.3, bprop_variable_exclusion="logits/w")
    params, opt_states, _ = run(learner, GRADS[:3])[-1]
    assert learner.eval_opt_states(opt_states, use_ema=False) == {}
    assert learner.bind(SPECS).eval_params(params, opt_states, use_ema=False) is params
    read = learner.eval_opt_states(opt_states, use_ema=True)
    assert set(read) == {"ema"}
    actual = by_path(learner.bind(SPECS).eval_params(params, read, use_ema=True))
    np.testing.assert_array_equal(actual.pop("logits/w"), params["logits"]["w"])
    for path, average in actual.items():
        np.testing.assert_array_equal(average, leaf_at(opt_states["ema"], path.split("/")))
        assert np.abs(average - by_path(params)[path]).max() > 0.01
    without = Learner(SGD, 0.1)
    with pytest.raises(ConfigError, match=r"Learner\.ema_decay.*0.*ema_decay"):
        without.bind(SPECS).eval_params(params, opt_states, use_ema=True)


def test_evaluation_has_the_average_of_a_schedule_free_optimizer():
    """x = (y - (1 - b1) z) / b1, of each layer of a stack and of that optimizer's weights only."""
    schedule_free = functools.partial(optax.contrib.schedule_free_sgd, b1=0.7)
    aux = AuxiliaryOptimizer("logits", SGD, 0.1, "head")
    learner = Learner(schedule_free, 0.1, auxiliary_optimizers=[aux])
    params, opt_states, _ = run(learner, GRADS[:3])[-1]
    read = learner.eval_opt_states(opt_states, use_ema=False)
    assert set(read) == {"slots"}
    actual = learner.bind(SPECS).eval_params(params, read, use_ema=False)
    jax.tree.map(np.testing.assert_array_equal, actual["logits"], params["logits"])
    for group, name in (("stack_3", "blocks"), ("stack_2x3", "deep")):
        z = opt_states["slots"][group].z[name]
        expected = jax.tree.map(lambda y, z: (y - 0.3 * z) / 0.7, params[name], z)
        assert_trees_close(actual[name], expected, rtol=1e-4, atol=1e-5)


def test_a_loss_scale_hears_of_gradients_that_are_not_finite_and_only_of_these():
    scale = DynamicLossScale(initial_scale=8.0, growth_interval=2)
    limit = 1.0 + max(map(global_norm, GRADS))
    learner = Learner(SGD, 0.1, loss_scale=scale, skip_step_gradient_norm_value=limit)
    history = spoilt_run(learner, [np.inf, 1, 1e3, 1, np.nan])
    # Halved; doubled after two finite steps in a row, one of them skipped as too large; halved.
    assert [float(h[1]["loss_scale"]["scale"]) for h in history] == [8, 4, 4, 8, 8, 4]
    assert [float(h[2]["loss_scale"]) for h in history[1:]] == [8, 4, 4, 8, 8]
    assert int(history[-1][1]["num_skipped_steps"]) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_gradient_norm_to_value": -1}, r"Learner\.clip_gradient_norm_to_value.*-1"),
        ({"ema_decay": 1.0}, r"Learner\.ema_decay.*1\.0.*\[0, 1\)"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps.* 0;"),
        ({"gradient_accumulation_steps": 2.0}, r"gradient_accumulation_steps.*2\.0"),
        ({"slot_mesh_axes": "data"}, r"slot_mesh_axes.*'data'.*\('data',\)"),
        ({"stacked_slot_mesh_axes": "data"}, r"stacked_slot_mesh_axes.*'data'.*\('data',\)"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        Learner(optax.sgd, 0.1, **settings)


def test_slots_keep_the_dtypes_that_they_began_with():
    """Gradients are float32; the momentum of a bfloat16 weight begins as the weight."""
    specs = {"w": WeightSpec((5,), jnp.dtype("bfloat16"))}
    learner = Learner(SGD, 0.1, ema_decay=0.9)
    bound = learner.bind(specs)

    def dtypes(tree):
        return jax.tree.map(lambda x: x.dtype, tree)

    def update(params, opt_states):
        grads = {"w": jnp.ones((5,), jnp.float32)}
        return bound.update(grads, opt_states, params, jnp.float32(1.0))[:2]

    params = {"w": jnp.ones((5,), jnp.bfloat16)}
    opt_states = jax.jit(bound.init)(params)
    assert dtypes(jax.eval_shape(update, params, opt_states)) == dtypes((params, opt_states))
    assert opt_states["slots"]["unstacked"][0].trace["w"].dtype == jnp.bfloat16


def test_the_state_can_be_donated_with_copies_of_the_weights_in_it():
    ewc = functools.partial(regularized, optimizer=optax.sgd, ewc_regularizer_weight=0.5)
    learner = Learner(ewc, 0.1, ema_decay=0.9)
    params = jax.tree.map(jnp.asarray, tree(1))
    bound = learner.bind(SPECS)
    opt_states = bound.init(params)  # Outside jit, which would make copies.

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_states, grads):
        return bound.update(grads, opt_states, params, jnp.float32(1.0))[:2]

    jax.block_until_ready(update(params, opt_states, GRADS[0]))


class Regression(Task):
    def compute_loss(self, model, inputs, key):
        del key
        return {"loss": (jnp.mean(jnp.square(model(inputs["x"]))), jnp.float32(1.0))}


def test_slot_mesh_axes_state_a_layout_of_every_gradient_and_new_weight(mesh_of):
    learner = Learner(SGD, 0.1, slot_mesh_axes=("data",), bprop_variable_exclusion="logits/b")
    params = jax.tree.map(jnp.asarray, tree(1))

    def updated(bound):
        def update(params, opt_states, grads):
            grads, _ = bound.groups.split(grads)
            return bound.update(grads, opt_states, params, jnp.float32(1.0))[0]

        opt_states = jax.jit(bound.init)(params)
        return jax.make_jaxpr(update)(params, opt_states, jax.tree.map(jnp.asarray, GRADS[0]))

    assert "sharding_constraint" not in str(updated(learner.bind(SPECS)))
    mesh = mesh_of(1, 4, 2).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        program = updated(learner.bind(SPECS, mesh.shape))
    assert str(program).count("sharding_constraint[") == 2 * 3


class Split(BaseLayer):
    """A linear layer, a stack of two and a head; no axis of the meshes divides a dim."""

    def __init__(self, *, rngs):
        split = functools.partial(Linear, weight_split_dims_mapping=("data", "mdl"))
        self.first = split(5, 7, rngs=rngs)
        keys = jax.random.split(rngs.params(), 2)
        self.blocks = stacked(jax.vmap(lambda key: split(7, 7, rngs=nnx.Rngs(key)))(keys), None)
        self.head = Linear(7, 3, weight_split_dims_mapping=(None, "mdl"), rngs=rngs)

    def __call__(self, x):
        x = jax.lax.scan(lambda x, block: (jnp.tanh(block(x)), None), self.first(x), self.blocks)
        return self.head(x[0])


@functools.cache
def trained_on(shape):
    """Returns the layout, and on the host the state and the averages, after steps with a NaN."""
    learner = Learner(
        optax.lamb, 0.1,
        auxiliary_optimizers=[
            AuxiliaryOptimizer(
                "head", functools.partial(regularized, optimizer=SGD, ewc_regularizer_weight=0.5),
                0.03, "head", clip_gradient_norm_to_value=0.01,
            )
        ],
        apply_separate_scaling=True,
        bprop_variable_exclusion="first/.*",
        clip_gradient_single_norm_to_value=0.02,
        ema_decay=0.4,
        slot_mesh_axes=("replica", "data"),
    )  # fmt: skip
    mesh = make_mesh(MeshConfig(ici_mesh_shape=shape))
    partitioner = Partitioner(Regression(Split, learner), mesh)
    state = partitioner.init(partitioner.key(0))
    x = np.random.default_rng(2).normal(size=(4, 11, 5)).astype(np.float32)
    x[2, 0, 0] = np.nan
    for batch in x:
        inputs = partitioner.global_batch({"x": batch})
        state, _ = partitioner.train_step(state, inputs, partitioner.key(1))
    params = partitioner.eval_mdl_vars(state, use_ema=True)["params"]
    return partitioner.layout, jax.device_get(state), jax.device_get(params)


def test_everything_together_on_a_mesh_equals_one_device():
    _, expected, wanted_params = trained_on((1, 1, 1))
    layout, state, params = trained_on((1, 4, 2))
    assert int(expected.opt_states["num_skipped_steps"]) == 1
    specs = {leaf.path: leaf.spec for leaf in layout.leaves()}
    momentum = specs["opt_states/slots/stack_2/0/mu/blocks/w"]
    assert momentum == specs["opt_states/ema/blocks/w"]
    assert specs["opt_states/ema/head/w"] != specs["mdl_vars/params/head/w"]  # Over data, too.
    assert not any("first" in path for path in specs if path.startswith("opt_states"))
    num_padded = 0
    for leaf, actual, true in zip(
        layout.leaves(), jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    ):
        padded = np.zeros(actual.shape, actual.dtype)
        padded[tuple(map(slice, true.shape))] = true
        num_padded += padded.shape != true.shape
        np.testing.assert_allclose(actual, padded, rtol=2e-4, atol=2e-6, err_msg=leaf.path)
    assert num_padded > 5
    # Averages as the weights lie, padded, too; the frozen layer is the one trained with.
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, state.mdl_vars["params"])
    for actual, true in zip(jax.tree.leaves(params), jax.tree.leaves(wanted_params), strict=True):
        padded = np.zeros(actual.shape, actual.dtype)
        padded[tuple(map(slice, true.shape))] = true
        np.testing.assert_allclose(actual, padded, rtol=2e-4, atol=2e-6)
    np.testing.assert_array_equal(params["first"]["w"], state.mdl_vars["params"]["first"]["w"])


@pytest.mark.parametrize("rate", [-1e-3, -0.0001, float("nan"), 1e7])
def test_a_rate_that_nothing_is_learned_at_is_refused(rate):
    with pytest.raises(ConfigError, match=r"Learner.learning_rate.*0.*1e\+06"):
        Learner(optax.sgd, rate)
