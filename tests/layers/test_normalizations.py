"""Norms: the real Pax's numbers, statistics of the real elements, scanned, trained on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, NnxModel, Partitioner
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.layers import BaseLayer
from praxis_lite.tasks.image_classification import ClassificationTask
from praxis_tools.check.asserts.layers import assert_near, drawn
from tests.support.goldens import pax_options
from tests.support.marks import every
from tests.support.pax_options import assert_equals_pax

partial = functools.partial
BATCH = partial(layers.BatchNorm, 6)
GROUP = partial(layers.GroupNorm, 6)
PAX = {
    "layer_direct": partial(layers.LayerNorm, 6, direct_scale=True),
    "layer_no_bias": partial(layers.LayerNorm, 6, use_bias=False, epsilon=0.1),
    "rms_offset": partial(layers.RmsNorm, 6, direct_scale=False, epsilon=0.1),
    "batch_train": partial(BATCH, decay=0.9),
    "batch_train_paddings": partial(BATCH, decay=0.9),
    "batch_train_moving": partial(BATCH, decay=0.8, use_moving_avg_in_training=True),
    "batch_train_forced": partial(BATCH, force_eval_mode=True),
    "batch_train_rank4": BATCH,
    "batch_eval": partial(BATCH, decay=0.9),
    "batch_eval_paddings": partial(BATCH, decay=0.9),
    "group_rank3": partial(GROUP, num_groups=2, input_rank=3),
    "group_rank4": partial(GROUP, num_groups=3, input_rank=4, epsilon=0.1),
    "group_paddings": partial(GROUP, num_groups=2, input_rank=3),
    "group_padded_output": partial(
        GROUP, num_groups=2, input_rank=3, set_padded_output_to_zero=False
    ),
    "group_cumulative": partial(GROUP, num_groups=2, input_rank=3, cumulative=True),
    "group_more_groups_than_channels": partial(GROUP, input_rank=3, use_bias=False),
    "group_min_size": partial(GROUP, num_groups=6, min_group_size=2, input_rank=3, use_scale=False),
}
WITH_PADDINGS = {
    "batch_train_paddings",
    "batch_eval_paddings",
    "group_paddings",
    "group_padded_output",
    "group_cumulative",
}


def test_every_case_of_the_real_pax_is_compared():
    assert set(PAX) == set(pax_options("norms")) - {""}


@pytest.mark.parametrize("name", every(2, PAX))
def test_outputs_gradients_and_new_statistics_equal_pax(name):
    key = jax.random.key(0) if "train" in name else None

    def call(module, x, paddings):
        return module(x, paddings if name in WITH_PADDINGS else None, key=key)

    assert_equals_pax("norms", name, PAX[name], call)


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_a_norm_without_weights_equals_numpy(name):
    x = np.random.default_rng(1).normal(size=(3, 5, 7)).astype(np.float32) + 2.0
    layer = {
        "layer": partial(layers.LayerNorm, use_scale=False, use_bias=False, epsilon=0.2),
        "rms": partial(layers.RmsNormNoScale, epsilon=0.2),
    }[name](7, rngs=nnx.Rngs(0))
    mean = x.mean(-1, keepdims=True) if name == "layer" else 0.0
    expected = (x - mean) / np.sqrt(np.square(x - mean).mean(-1, keepdims=True) + 0.2)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)
    assert not jax.tree.leaves(NnxModel(lambda rngs: layer).init(jax.random.key(0)))


def test_direct_or_not_a_fresh_norm_scales_by_one():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 7)), jnp.float32)
    for norm in (layers.LayerNorm, layers.RmsNorm):
        direct, offset = (norm(7, direct_scale=d, rngs=nnx.Rngs(0)) for d in (True, False))
        np.testing.assert_array_equal(direct(x), offset(x))
        assert float(direct.scale[0]) == 1.0 and float(offset.scale[0]) == 0.0


def test_identity_norm_returns_its_inputs():
    x = jnp.ones((2, 3))
    assert layers.IdentityNorm(3, rngs=nnx.Rngs(0))(x, key=jax.random.key(0)) is x


# Examples, channels and groups of these.
NUM_EXAMPLES, DIM, NUM_GROUPS = 13, 9, 3
X = (np.random.default_rng(3).normal(size=(NUM_EXAMPLES, 5, DIM)) * 2 + 1).astype(np.float32)
PADDINGS = (np.random.default_rng(8).uniform(size=(NUM_EXAMPLES, 5)) < 0.3).astype(np.float32)
NORMS = {
    "batch": partial(layers.BatchNorm, DIM, decay=0.7),
    "group": partial(layers.GroupNorm, DIM, num_groups=NUM_GROUPS, input_rank=3),
    "layer": partial(layers.LayerNorm, DIM, direct_scale=True),
    "rms": partial(layers.RmsNorm, DIM, direct_scale=False),
}


def normed(norm: str, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns outputs and statistics of a step of training."""
    model = NnxModel(NORMS[norm])
    module = model.module(drawn(model))
    return module(x, PADDINGS, key=jax.random.key(0)), mdl_vars_of(module)["non_trainable"]


def test_batch_statistics_equal_numpy_over_the_true_elements():
    true = X[PADDINGS == 0]
    before = drawn(NnxModel(NORMS["batch"]))["non_trainable"]
    _, actual = normed("batch", X)
    for name, value in (("moving_mean", true.mean(0)), ("moving_variance", true.var(0))):
        np.testing.assert_allclose(actual[name], 0.7 * before[name] + 0.3 * value, rtol=2e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_bfloat16_is_close_to_float32_and_statistics_stay_float32(norm):
    x = X.astype(jnp.bfloat16)
    (half, statistics), (whole, expected) = normed(norm, x), normed(norm, np.float32(x))
    assert half.dtype == jnp.bfloat16
    # All is float32 but the inputs, the same here, and one rounding of the outputs, to 8 bits.
    np.testing.assert_allclose(np.float32(half), whole, rtol=2**-8, atol=1e-6)
    assert np.abs(np.float32(half) - whole).max() > 1e-4
    assert_near(statistics, expected)
    assert {a.dtype for a in jax.tree.leaves(statistics)} <= {jnp.dtype("float32")}


class NormBlock(BaseLayer):
    """A residual batch norm with the signature that Repeat wants."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.ff = layers.FeedForward(7, 7, activation="tanh", rngs=rngs)
        self.norm = layers.BatchNorm(7, decay=0.6, rngs=rngs)

    def __call__(self, x, *, key=None, cache=None, **_):
        return x + self.ff(self.norm(x, key=key)), cache


def test_scanned_batch_norms_equal_unrolled_ones_statistics_too():
    scanned, unrolled = (
        NnxModel(partial(layers.Repeat, NormBlock, 3, unroll=unroll)) for unroll in (False, True)
    )
    mdl_vars = drawn(scanned)
    x = jnp.asarray(np.random.default_rng(5).normal(size=(5, 7)), jnp.float32)

    def unstacked(tree):
        blocks = [jax.tree.map(lambda a, i=i: a[i], tree["blocks"]) for i in range(3)]
        return {"blocks": {str(i): block for i, block in enumerate(blocks)}}

    def run(model, mdl_vars):
        def objective(params):
            module = model.module({**mdl_vars, "params": params})
            outputs = module(x, key=jax.random.key(0))[0]
            return jnp.sum(jnp.sin(outputs)), (outputs, mdl_vars_of(module)["non_trainable"])

        return jax.jit(jax.grad(objective, has_aux=True))(mdl_vars["params"])

    grads, (outputs, statistics) = run(scanned, mdl_vars)
    actual = run(unrolled, {kind: unstacked(tree) for kind, tree in mdl_vars.items()})
    assert_near(actual, (unstacked(grads), (outputs, unstacked(statistics))))
    moved = (
        statistics["blocks"]["norm"]["moving_mean"]
        - mdl_vars["non_trainable"]["blocks"]["norm"]["moving_mean"]
    )
    assert (np.abs(moved).max(axis=1) > 1e-2).all()  # Of every layer.


class NormClassifier(BaseLayer):
    """A batch norm before class logits."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = layers.BatchNorm(7, decay=0.6, weight_split_dims_mapping=("mdl",), rngs=rngs)
        self.logits = layers.Linear(7, 3, weight_split_dims_mapping=("mdl", None), rngs=rngs)

    def __call__(self, inputs, *, key=None):
        return self.logits(self.norm(inputs, key=key))


def test_training_moves_statistics_and_evaluation_uses_them(mesh_of):
    task = ClassificationTask(NormClassifier, Learner(partial(optax.adamw), 0.01))
    partitioner = Partitioner(task, mesh_of(1, 4, 2))
    rng = np.random.default_rng(6)
    # 13 examples on 8 devices: the padding rows must not be counted.
    x = (rng.normal(size=(13, 7)) * 3 + 2).astype(np.float32)
    host_batch = {"inputs": x, "labels": rng.integers(0, 3, 13), "weights": np.ones(13, np.float32)}
    batch = partitioner.global_batch(host_batch)
    state, key = partitioner.init(partitioner.key(0)), partitioner.key(0)
    state, _ = partitioner.train_step(state, batch, key)
    norm = jax.device_get(state.mdl_vars["non_trainable"]["norm"])
    np.testing.assert_allclose(norm["moving_mean"][:7], 0.4 * x.mean(0), rtol=1e-5, atol=1e-6)
    expected = 0.6 + 0.4 * x.var(0)
    np.testing.assert_allclose(norm["moving_variance"][:7], expected, rtol=1e-5)
    # No slot of the optimizer belongs to them.
    slots = jax.tree_util.tree_leaves_with_path(state.opt_states)
    assert not [path for path, _ in slots if "moving" in jax.tree_util.keystr(path)]
    actual = partitioner.eval_step(state.mdl_vars, batch)["loss"][0]
    weights = jax.device_get(state.mdl_vars["params"])
    normed = (x - norm["moving_mean"][:7]) / np.sqrt(norm["moving_variance"][:7] + 1e-3)
    normed = normed * (1 + weights["norm"]["gamma"][:7]) + weights["norm"]["beta"][:7]
    logits = normed @ weights["logits"]["w"][:7]
    expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(13), host_batch["labels"]]
    assert float(actual) == pytest.approx(expected.mean(), rel=1e-5)
    after = jax.device_get(state.mdl_vars["non_trainable"]["norm"])
    assert_near(after, norm, tolerance=0.0)


WRONG = {
    r"GroupNorm\.num_groups.*4.*6": lambda r: GROUP(num_groups=4, input_rank=3, rngs=r),
    r"GroupNorm\.min_group_size.*4.*6": lambda r: GROUP(
        num_groups=2, min_group_size=4, input_rank=3, rngs=r
    ),
    r"GroupNorm\.num_groups.*0": lambda r: GROUP(num_groups=0, input_rank=3, rngs=r),
    r"GroupNorm\.input_rank.* 2;.*3": lambda r: GROUP(input_rank=2, rngs=r),
    r"GroupNorm\.input_rank.*3.*\(1, 2, 3, 6\)": lambda r: GROUP(input_rank=3, rngs=r)(
        jnp.ones((1, 2, 3, 6))
    ),
    r"BatchNorm\.decay.*1\.5": lambda r: BATCH(decay=1.5, rngs=r),
    r"BatchNorm\.dim.*0": lambda r: layers.BatchNorm(0, rngs=r),
    r"BatchNorm.*paddings.*\(5, 6\)": lambda r: BATCH(rngs=r)(jnp.ones((5, 6)), jnp.ones((5, 6))),
    r"RmsNorm\.epsilon.*-1": lambda r: layers.RmsNorm(6, epsilon=-1, rngs=r),
    r"LayerNorm\.epsilon.*'a'": lambda r: layers.LayerNorm(6, epsilon="a", rngs=r),
    r"RmsNormNoScale\.epsilon.*None": lambda r: layers.RmsNormNoScale(6, epsilon=None),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: WRONG[message](nnx.Rngs(0)))
