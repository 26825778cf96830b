"""Muon against NumPy by hand, and which matrix each weight of the layers is."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from praxis_lite import ConfigError
from praxis_lite.core import Learner, NnxModel, WeightSpec
from praxis_lite.core.sharding.weight_spec import with_declared_weights
from praxis_lite.experiments.moe import PyDocs as MoePyDocs
from praxis_lite.experiments.seq2seq import Reverse
from praxis_lite.layers import RgLruBlock
from praxis_lite.optimizers import muon_matrices
from tests.support.marks import slow_but

SHAPES = {
    "attention": {
        "combined_qkv": {"b": (3, 2, 3), "w": (3, 5, 2, 3)},
        "post": {"b": (5,), "w": (5, 2, 3)},
        "query": {"b": (2, 3), "w": (5, 2, 3)},
    },
    "conv": {"kernel": {"w": (2, 3, 5, 7)}},
    "ff": {"gate": (5, 3), "linear": {"w": (5, 7)}, "wi_0": (3, 5, 7)},
    "softmax": {"logits_ffn": {"linear": {"w": (5, 11)}}},
}
NONE = ((), ())
# As layers say it: the dims that a product sums over, and those that it gives to the outputs.
MATRICES = {
    "attention/combined_qkv/b": NONE,
    "attention/combined_qkv/w": ((1,), (2, 3)),
    "attention/post/w": ((1, 2), (0,)),
    "attention/query/b": NONE,
    "attention/query/w": ((0,), (1, 2)),
    "ff/wi_0": ((1,), (2,)),
    "softmax/logits_ffn/linear/w": NONE,
}
EQUATIONS = {"conv/.*/w": "hwi,hwio->o", "ff/gate": None}
# By hand: the weight as [matrices, inputs, outputs].
AS_MATRICES = {
    "attention/combined_qkv/w": lambda w: w.reshape(3, 5, 6),
    "attention/post/w": lambda w: w.reshape(1, 5, 6).swapaxes(1, 2),
    "attention/query/w": lambda w: w.reshape(1, 5, 6),
    "conv/kernel/w": lambda w: w.reshape(1, 30, 7),
    "ff/linear/w": lambda w: w[None],
    "ff/wi_0": lambda w: w,
}
BETA, DECAY = 0.95, 0.1


def is_shape(x):
    return isinstance(x, tuple)


def tree(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=is_shape
    )


def leaves(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shape)[0]
    }


def specs_of(shapes):
    """Returns the declarations of weights, as their layers make them."""

    def spec(path, shape):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return WeightSpec(shape, jnp.float32, matrix=MATRICES.get(name))

    return jax.tree.map_with_path(spec, shapes, is_leaf=is_shape)


def schedule(count):
    return 0.05 / (1.0 + count)


def orthogonalized(x):
    """Returns the quintic Newton-Schulz iteration of Keller Jordan, five steps, in float64."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def numpy_muon(path, w, grads, consistent_rms):
    w, m = np.float64(w), np.zeros(w.shape)
    for t, g in enumerate(map(np.float64, grads), start=1):
        m = BETA * m + (1 - BETA) * g
        # Nesterov: a step ahead, each term corrected for its start at zero.
        ahead = BETA * m / (1 - BETA ** (t + 1)) + (1 - BETA) * g / (1 - BETA**t)
        update = np.zeros_like(w)
        views = zip(AS_MATRICES[path](ahead), AS_MATRICES[path](update), strict=True)
        for matrix, out in views:
            inputs, outputs = matrix.shape
            scale = np.sqrt(max(1.0, outputs / inputs))
            if consistent_rms:
                scale = consistent_rms * np.sqrt(max(inputs, outputs))
            out[...] = scale * orthogonalized(matrix)
        w = w - schedule(t - 1) * (update + DECAY * w)
    return w


def numpy_nadam(w, grads, b1=0.9, b2=0.98, eps=1e-8):
    w, m, v = np.float64(w), np.zeros(w.shape), np.zeros(w.shape)
    for t, g in enumerate(map(np.float64, grads), start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        w = w - schedule(t - 1) * ahead / (np.sqrt(v / (1 - b2**t)) + eps)
    return w


def config(**settings):
    return fdl.Partial(
        optax.contrib.muon,
        weight_decay=DECAY,
        adam_b2=0.98,
        muon_weight_dimension_numbers=fdl.Config(muon_matrices, equations=EQUATIONS),
        **settings,
    )


@pytest.mark.parametrize("consistent_rms", slow_but([None], [None, 0.2]))
def test_five_steps_equal_numpy(consistent_rms):
    learner = Learner(fdl.build(config(consistent_rms=consistent_rms)), schedule)
    bound = learner.bind(specs_of(SHAPES))
    params, opt_states = tree(0), bound.init(tree(0))
    update = jax.jit(lambda g, o, p: bound.update(g, o, p, jnp.float32(1))[:2])
    grads = [tree(10 + i) for i in range(5)]
    for grad in grads:
        params, opt_states = update(grad, opt_states, params)
    actual, start = leaves(params), leaves(tree(0))
    assert AS_MATRICES.keys() < actual.keys()
    for path, w in start.items():
        local = [leaves(g)[path] for g in grads]
        expected = (
            numpy_muon(path, w, local, consistent_rms)
            if path in AS_MATRICES
            else numpy_nadam(w, local)
        )
        np.testing.assert_allclose(actual[path], expected, atol=5e-6, err_msg=path)


@functools.cache
def first_update():
    """Returns gradients, and what Muon with rate 1 makes of them."""
    optimizer = fdl.build(config())(learning_rate=1.0)
    zeros = jax.tree.map(jnp.zeros_like, tree(0))
    step = lambda g: optimizer.update(g, optimizer.init(g), zeros)[0]  # noqa: E731
    return tree(3), jax.jit(with_declared_weights(step, leaves(specs_of(SHAPES))))(tree(3))


@pytest.mark.parametrize("path", AS_MATRICES)
def test_a_step_is_about_the_nearest_orthogonal_matrix_with_outputs_scaled(path):
    grads, updates = map(leaves, first_update())
    views = zip(AS_MATRICES[path](grads[path]), AS_MATRICES[path](updates[path]), strict=True)
    for grad, update in views:
        left, singular, right = np.linalg.svd(-update, full_matrices=False)
        scaled = singular / np.sqrt(max(1.0, update.shape[1] / update.shape[0]))
        # The iteration's coefficients trade this spread for few steps; 0.05 to 1 go in here.
        assert scaled.min() > 0.6 and scaled.max() < 1.25
        wanted_left, _, wanted_right = np.linalg.svd(grad, full_matrices=False)
        np.testing.assert_allclose(left @ right, wanted_left @ wanted_right, atol=1e-3)


def test_zero_gradients_and_bfloat16_weights_stay_finite():
    optimizer = fdl.build(config(consistent_rms=0.2))(learning_rate=0.1)
    params = {
        "ff": {"w": jnp.ones((5, 3), jnp.bfloat16)},
        "softmax": {"w": jnp.ones(3, jnp.bfloat16)},
    }
    update = jax.jit(optimizer.update)
    for grads in (jax.tree.map(jnp.zeros_like, params), params):
        updates, state = update(grads, optimizer.init(params), params)
        assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(updates))
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, state)))


def matrices_of(model):
    """Returns how each weight of a model is a matrix: (input dims, output dims), or None."""
    specs = NnxModel(model).weight_specs()["params"]
    weights = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape[len(w.stack_shape) :], w.dtype),
        specs,
        is_leaf=lambda x: isinstance(x, WeightSpec),
    )
    dims = jax.tree_util.tree_flatten_with_path(
        with_declared_weights(muon_matrices(), leaves(specs))(weights),
        is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
    )[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): d and tuple(d) for path, d in dims
    }


def test_the_weights_of_a_language_model_with_experts():
    actual = matrices_of(fdl.build(MoePyDocs().task().model))
    block = "transformer/blocks/x_layers_"
    projection, output = ((0,), (1, 2)), ((1, 2), (0,))
    assert {path: d for path, d in actual.items() if d} == {
        **{
            f"{block}{i}/self_attention/{name}/w": dims
            for i in (0, 1)
            for name, dims in {
                "query": projection,
                "key": projection,
                "value": projection,
                "post": output,
            }.items()
        },
        f"{block}0/ff_layer/ffn_layer1/linear/w": ((0,), (1,)),
        f"{block}0/ff_layer/ffn_layer2/linear/w": ((0,), (1,)),
        f"{block}1/ff_layer/gate": ((0,), (1,)),
        f"{block}1/ff_layer/wi_0": ((1,), (2,)),
        f"{block}1/ff_layer/wo_0": ((1,), (2,)),
    }
    assert "softmax/logits_ffn/linear/w" in actual


def test_biases_per_head_and_gates_of_a_recurrence():
    actual = matrices_of(fdl.build(Reverse().task().model))
    assert actual["decoder/blocks/cross_attention/query/b"] is None
    assert actual["decoder/blocks/cross_attention/post/w"] == ((1, 2), (0,))
    actual = matrices_of(lambda rngs: RgLruBlock(input_dim=6, num_heads=2, rngs=rngs))
    assert {path: dims for path, dims in actual.items() if dims} == {
        "linear_x/w": ((0,), (1, 2)),
        "linear_y/w": ((0,), (1, 2)),
        "linear_out/w": ((1, 2), (0,)),
        "rg_lru/a_gate_w": ((1,), (2,)),
        "rg_lru/input_gate_w": ((1,), (2,)),
    }


@pytest.mark.parametrize(
    "equations, message",
    [
        ({"ff(": None}, r"'ff\('"),
        ({"ff": "de->d->e"}, "'de->d->e'"),
        ({"ff": "d,df->d"}, "'d,df->d'"),
        ({"ff": "d,dff->f"}, "'d,dff->f'"),
        ({"ff": "d,def->f"}, "'d,def->f'"),
    ],
)
def test_an_equation_that_makes_no_matrix_is_an_error_where_it_is_configured(equations, message):
    with pytest.raises(ConfigError, match=message):
        muon_matrices(equations)


def test_a_weight_that_has_no_equation_or_one_of_another_rank_is_named():
    with pytest.raises(ConfigError, match=r"conv/kernel/w.*\[2.*3.*5.*7\].*'hwi,hwio->o'"):
        muon_matrices()({"conv": tree(0)["conv"]})
    equations = {"ff/gate/": None, "ff": "d,dnk->nk"}
    with pytest.raises(ConfigError, match=r"'d,dnk->nk'.*'ff'.*3.*ff/gate.*\[5.*3\]"):
        muon_matrices(equations)({"ff": {"gate": jnp.ones((5, 3))}})


def test_a_pattern_that_matches_no_weight_is_an_error_of_the_learner():
    specs = {"w": WeightSpec((5, 3), jnp.float32)}
    matrices = muon_matrices({"wq": None})
    learner = Learner(
        functools.partial(optax.contrib.muon, muon_weight_dimension_numbers=matrices), 0.1
    )
    with pytest.raises(ConfigError, match="'wq'"):
        learner.bind(specs).init({"w": jnp.ones((5, 3))})
