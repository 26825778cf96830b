"""float16 with a dynamic loss scale against float32; where reductions stay float32."""

import functools
from collections.abc import Iterator

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, Task
from praxis_lite.core import Learner
from praxis_lite.core.partitioner import steps
from praxis_lite.layers import BaseLayer, SharedEmbeddingSoftmax, rotary_lm
from praxis_lite.layers.base.base_layer import ones
from praxis_lite.optimizers import DynamicLossScale
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.core.partitioner.test_accumulation import lm_batch
from tests.support.float16 import needs_float16
from tests.support.marks import slow_but


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(growth_interval=0), "growth_interval.*0"),
        (dict(growth_interval=1.5), "growth_interval.*1.5"),
        (dict(growth_factor=1.0), "growth_factor.*1.0.*1"),
        (dict(backoff_factor=1.0), "backoff_factor.*1.0.*0.*1"),
        (dict(min_scale=0.0), "min_scale.*0.0"),
        (dict(max_scale=0.5), r"max_scale.*0.5.*min_scale.*\(1.0\)"),
        (dict(initial_scale=2.0**25), "initial_scale.*33554432.0.*max_scale"),
        (dict(initial_scale=float("nan")), "initial_scale.*nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ConfigError, match=rf"DynamicLossScale\.{message}"):
        DynamicLossScale(**settings)


def test_the_scale_halves_on_overflow_and_grows_after_as_many_good_steps_as_said():
    loss_scale = DynamicLossScale(
        initial_scale=8.0, growth_interval=3, growth_factor=4.0, min_scale=2.0, max_scale=64.0
    )
    is_finite = [1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    scales = [8, 8, 4, 2, 2, 2, 2, 8, 8, 8, 4, 4, 4, 16, 16, 16, 64, 64, 64, 64]
    counts = [1, 2, 0, 0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    state, update = loss_scale.init(), jax.jit(loss_scale.update)
    assert (state["scale"].dtype, state["num_good_steps"].dtype) == (jnp.float32, jnp.int32)
    actual = []
    for item in is_finite:
        state = update(state, jnp.bool_(item))
        actual.append((int(state["scale"]), int(state["num_good_steps"])))
    assert actual == list(zip(scales, counts, strict=True))
    assert (state["scale"].dtype, state["num_good_steps"].dtype) == (jnp.float32, jnp.int32)


class Weights(BaseLayer):
    """Five weights and a mean of what it saw."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = self.weight((5,), init=ones, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros(()))


class Product(Task):
    """The mean over rows of sum(w x), times `factor`; its gradient passes through float16."""

    def compute_loss(self, model, inputs, key):
        x, num_rows = inputs["x"].astype(jnp.float16), jnp.float32(len(inputs["x"]))
        products = jnp.broadcast_to(model.w[...][None], x.shape).astype(jnp.float16) * x
        model.seen.set_value(model.seen[...] + 1.0)
        loss = jnp.sum(products.astype(jnp.float32)) * inputs["factor"] / num_rows
        return {"loss": (loss, num_rows)}


X = np.array([[1.0, 2.0, 4.0, -8.0, 0.5], [1.0, 2.0, 4.0, -8.0, 1.5]] * 4, np.float32)


def product_steps(factor, loss_scale, accumulation_steps, num_steps):
    """Returns the states before and after each step."""
    learner = Learner(
        functools.partial(optax.sgd, momentum=0.5),
        1.0,
        loss_scale=loss_scale,
        gradient_accumulation_steps=accumulation_steps,
    )
    task, key = Product(Weights, learner), jax.random.key(0)
    batch = {"x": X, "factor": np.float32(factor)}
    step = jax.jit(lambda state: steps.train_step(task, state, batch, key)[0])
    states = [jax.jit(lambda: steps.init_state(task, key))()]
    for _ in range(num_steps):
        states.append(step(states[-1]))
    return jax.device_get(states)


@needs_float16
@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_small_gradients_vanish_without_a_scale_and_are_exact_with_one(accumulation_steps):
    tiny = 2.0**-30  # float16 ends at 2^-24.
    for loss_scale, gradient in ((None, 0.0), (DynamicLossScale(), X.mean(0) * tiny)):
        state = product_steps(tiny, loss_scale, accumulation_steps, 1)[-1]
        (momentum,) = jax.tree.leaves(state.opt_states["slots"])
        np.testing.assert_array_equal(momentum, np.broadcast_to(gradient, momentum.shape))
        assert state.opt_states["num_skipped_steps"] == 0


# The largest gradient of a row is 8 scale / 8 rows, or / 2 in a microbatch; float16 ends at 65504.
@needs_float16
@pytest.mark.parametrize(
    ("accumulation_steps", "log_scales", "is_skipped", "updates"),
    [
        (1, [17, 16, 15, 15, 16, 15, 15], [1, 1, 0, 0, 1, 0], 1 + 1.5 + 1.75),
        (4, [17, 16, 15, 14, 13, 13, 14], [1, 1, 1, 1, 0, 0], 1 + 1.5),
    ],
)
def test_a_step_that_overflows_changes_nothing_but_the_scale(
    accumulation_steps, log_scales, is_skipped, updates
):
    loss_scale = DynamicLossScale(initial_scale=2.0**17, growth_interval=2)
    states = product_steps(1.0, loss_scale, accumulation_steps, len(is_skipped))
    scales = [s.opt_states["loss_scale"]["scale"] for s in states]
    np.testing.assert_array_equal(np.log2(scales), log_scales)
    num_skipped = [s.opt_states["num_skipped_steps"] for s in states]
    np.testing.assert_array_equal(np.diff(num_skipped), is_skipped)

    def kept(state):  # Statistics too.
        return jax.tree.leaves((state.mdl_vars, state.opt_states["slots"]))

    for old, new, was_skipped in zip(states, states[1:], is_skipped, strict=False):
        same = [np.array_equal(a, b) for a, b in zip(kept(old), kept(new), strict=True)]
        assert all(same) if was_skipped else not any(same)
    # As if the skipped steps had not been; the momentum is 0.5.
    weights = states[-1].mdl_vars["params"]["w"]
    np.testing.assert_array_equal(weights, 1 - updates * X.mean(0))


def lm_task(fprop_dtype, **settings):
    softmax = fdl.Partial(SharedEmbeddingSoftmax, z_loss_weight=1e-2, label_smoothing_prob=0.1)
    lm = rotary_lm(
        vocab_size=37,
        model_dims=13,
        hidden_dims=29,
        num_heads=3,
        dim_per_head=6,
        num_layers=2,
        softmax_tpl=softmax,
        fprop_dtype=fprop_dtype,
    )
    learner = Learner(functools.partial(optax.sgd, momentum=0.9), 0.1, **settings)
    return LanguageModelTask(fdl.build(lm), learner)


@functools.cache
def initial_state():
    task = lm_task(jnp.float32, loss_scale=DynamicLossScale())
    return jax.jit(lambda: steps.init_state(task, jax.random.key(0)))()


def trained(fprop_dtype):
    """Returns the losses of five steps on one batch, and the state after them."""
    task = lm_task(fprop_dtype, loss_scale=DynamicLossScale())
    key, batch = jax.random.key(0), lm_batch(0)
    step = jax.jit(lambda state: steps.train_step(task, state, batch, key))
    state, losses = initial_state(), []
    for _ in range(5):
        state, outputs = step(state)
        losses.append(float(outputs["metrics"]["loss"][0]))
    return losses, jax.device_get(state)


@pytest.mark.slow
@needs_float16
def test_a_language_model_in_float16_trains_as_in_float32():
    """Packed rows, hidden keys, empty rows: what stands for "unseen" is finite in float16."""
    losses, state = trained(jnp.float16)
    wanted_losses, wanted = trained(jnp.float32)
    assert state.opt_states["num_skipped_steps"] == 0
    assert wanted_losses[-1] < wanted_losses[0] - 0.05
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-3)
    kept = (state.mdl_vars, state.opt_states["slots"])
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {np.dtype("float32")}
    for a, b in zip(jax.tree.leaves(state.mdl_vars), jax.tree.leaves(wanted.mdl_vars), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)


def equations(jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """Yields the equations of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


SUMS = ("reduce_sum", "scatter-add", "cumsum", "reduce_window_sum")


@pytest.mark.parametrize("fprop_dtype", slow_but([jnp.float16], [jnp.bfloat16, jnp.float16]))
def test_sums_are_in_float32_whatever_the_activations_are(fprop_dtype):
    """Losses, norms, gradients of biases and embeddings: 256 + 1 is 256 in bfloat16."""
    task = lm_task(fprop_dtype)
    key, batch = jax.random.key(0), lm_batch(0)
    state = jax.eval_shape(lambda: steps.init_state(task, key))
    step = jax.make_jaxpr(lambda state: steps.train_step(task, state, batch, key))(state)
    in_low_precision = {"dot_general": 0}
    for equation in equations(step.jaxpr):
        name = equation.primitive.name
        if any(x.aval.dtype == fprop_dtype for x in equation.outvars):
            in_low_precision[name] = in_low_precision.get(name, 0) + 1
    assert in_low_precision["dot_general"] > 10
    assert not set(SUMS) & in_low_precision.keys()
