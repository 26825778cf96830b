"""Initial values: the draws of the real Pax, and the statistics that each method promises."""

import functools
import math

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.config.config_json import dump_config, load_config
from praxis_lite.core import NnxModel
from praxis_lite.layers import WeightInit
from praxis_lite.layers.initializers import fans
from tests.support.goldens import golden_arrays, pax_cases

TRUNCATED = 0.87962566  # Standard deviation of a normal cut at +-2.
SHAPES = {"matrix": (151, 211), "projection": (13, 17, 151)}


def test_draws_equal_those_of_pax():
    golden = golden_arrays("pax/weight_init.npz")
    jax.config.update("jax_threefry_partitionable", False)
    try:
        for name, settings in pax_cases()["weight_init"]["inits"].items():
            init = getattr(WeightInit, name.split("_")[0])(settings["scale"])
            assert init == WeightInit(settings["method"], settings["scale"])
            drawn = np.asarray(init(jax.random.PRNGKey(7), settings["shape"]))
            np.testing.assert_allclose(
                drawn.ravel()[:8], golden[f"out/head/{name}"], rtol=2e-6, err_msg=name
            )
            actual = [drawn.mean(), drawn.std(), drawn.min(), drawn.max()]
            np.testing.assert_allclose(
                actual, golden[f"out/{name}"], rtol=1e-5, atol=1e-6, err_msg=name
            )
    finally:
        jax.config.update("jax_threefry_partitionable", True)


def deviations(shape: tuple[int, ...]) -> dict[str, float]:
    """Returns the standard deviation of each method at scale 1, from its description."""
    dim0, window = shape[0], math.prod(shape[:-2])
    fan_in, fan_out = window * shape[-2], window * shape[-1]
    uniform = 3**-0.5
    return {
        "Gaussian": 1.0,
        "GaussianSqrtDim": dim0**-0.5,
        "GaussianSqrtFanIn": fan_in**-0.5,
        "GaussianSqrtFanOut": fan_out**-0.5,
        "GaussianSqrtFanAvg": ((fan_in + fan_out) / 2) ** -0.5,
        "TruncatedGaussian": TRUNCATED,
        "TruncatedGaussianSqrtDim": TRUNCATED * dim0**-0.5,
        "TruncatedGaussianSqrtFanIn": TRUNCATED * fan_in**-0.5,
        "TruncatedGaussianSqrtFanOut": TRUNCATED * fan_out**-0.5,
        "Uniform": uniform,
        "UniformSqrtDim": uniform * dim0**-0.5,
        "UniformSqrtFanAvg": ((fan_in + fan_out) / 2) ** -0.5,
        "UniformUnitScaling": math.prod(shape[:-1]) ** -0.5,
        "Xavier": ((fan_in + fan_out) / 2) ** -0.5,
        "XavierWithFixupParams": ((fan_in + fan_out) / 2) ** -0.5,
    }


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_mean_and_deviation_are_those_of_the_formula(shape):
    for name, deviation in deviations(shape).items():
        drawn = np.asarray(getattr(WeightInit, name)(0.3)(jax.random.key(3), shape), np.float64)
        # 32k draws: the standard error of a deviation is below 1%, of the mean 0.6% of it.
        np.testing.assert_allclose(drawn.std(), 0.3 * deviation, rtol=0.025, err_msg=name)
        assert abs(drawn.mean()) < 0.025 * 0.3 * deviation, name
        if "Truncated" in name:
            assert np.abs(drawn).max() <= 2 * 0.3 * deviation / TRUNCATED * (1 + 1e-6), name


def test_every_method_of_the_table_has_a_function_and_a_formula():
    functions = {name for name in vars(WeightInit) if name[0].isupper()}
    assert functions == set(deviations((2, 3))) | {"Constant", "ScaledDeltaOrthogonal"}


def test_fixup_shrinks_with_depth():
    init = WeightInit.XavierWithFixupParams(2.0, depth=16.0, layers_per_residual_block=2.0)
    assert init == WeightInit.Xavier(1.0)  # 2 * 16 ** (-1 / 4)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5, 4, 4), (3, 3, 3, 2, 6)], ids=str)
def test_delta_orthogonal_is_an_orthogonal_matrix_amid_zeros(shape):
    drawn = np.asarray(WeightInit.ScaledDeltaOrthogonal(9.0)(jax.random.key(1), shape))
    middle = drawn[tuple((size - 1) // 2 for size in shape[:-2])]
    rows, columns = shape[-2:]
    gain = max(rows / columns, 1.0)
    gram = middle.T @ middle if rows >= columns else middle @ middle.T
    np.testing.assert_allclose(gram, gain * np.eye(min(rows, columns)), atol=1e-5)
    assert (drawn**2).sum() == pytest.approx((middle**2).sum())


def test_fans_of_vectors_matrices_kernels_and_given_axes():
    assert fans((7,)) == (7, 7)
    assert fans((3, 5)) == (3, 5)
    assert fans((2, 3, 5, 7)) == (30, 42)
    assert fans((8, 2, 4), (0,), (1, 2)) == (8, 8)
    attention = WeightInit("xavier", 1.0, (0,), (1, 2))
    drawn = attention(jax.random.key(0), (8, 2, 4))
    assert 0.9 * (6 / 16) ** 0.5 < np.abs(drawn).max() <= (6 / 16) ** 0.5


def test_dtype_and_constants():
    assert WeightInit.Xavier()(jax.random.key(0), (3, 4), jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        WeightInit.Constant(-2.5)(jax.random.key(0), (3,)), np.full(3, -2.5)
    )
    assert WeightInit.Constant(4)(jax.random.key(0), ()).shape == ()


def test_the_default_of_layers_is_pax_default():
    """Pax's params_init is xavier for every layer; biases and norms have their own."""
    rngs = nnx.Rngs(0)
    for weight in (
        layers.Linear(60, 70, rngs=rngs).w,
        layers.FeedForward(60, 70, rngs=rngs).linear.w,
        layers.Embedding(60, 70, rngs=rngs).emb_var,
        layers.TrainablePositionalEmbedding(60, 70, rngs=rngs).emb_var,
        layers.FullSoftmax(60, 70, rngs=rngs).logits_ffn.linear.w,
        layers.NClassMajorSharedEmbeddingSoftmax(60, 70, rngs=rngs).w,
    ):
        bound = (6 / 130) ** 0.5
        assert 0.99 * bound < np.abs(weight[...]).max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize(
    "config",
    [
        fdl.Config(WeightInit.Constant, scale=0.25),
        fdl.Config(WeightInit, "constant", 0.25),
        WeightInit.Constant(0.25),
    ],
    ids=("function", "class", "object"),
)
def test_an_experiment_configures_the_initial_values(config):
    model = fdl.build(fdl.Partial(layers.FeedForward, 3, 5, weight_init=config, bias_init=-1.0))
    params = NnxModel(model).init(jax.random.key(0))["params"]
    np.testing.assert_array_equal(params["linear"]["w"], np.full((3, 5), 0.25))
    np.testing.assert_array_equal(params["bias"]["b"], np.full(5, -1.0))


def test_initial_values_and_adapters_of_an_experiment_survive_config_json():
    config = fdl.Partial(
        layers.FeedForward,
        3,
        5,
        weight_init=fdl.Config(WeightInit.Gaussian, scale=0.02),
        linear_tpl=fdl.Partial(layers.adapted, base_tpl=fdl.Partial(layers.Linear), rank=4),
    )
    assert load_config(dump_config(config, "praxis_lite.experiments.lm.PyDocs")).config == config


def test_a_wrong_method_or_half_of_the_fans_is_named():
    with pytest.raises(ConfigError, match="'gausian'.*gaussian"):
        WeightInit("gausian")
    with pytest.raises(ConfigError, match="fan_in_axes.*fan_out_axes"):
        WeightInit("xavier", fan_in_axes=(0,))


def test_a_stack_draws_each_layer_by_itself():
    build = functools.partial(layers.Linear, 60, 70, weight_init=WeightInit.GaussianSqrtFanIn())
    stack = layers.Repeat(build, 3, rngs=nnx.Rngs(0))
    drawn = np.asarray(stack.blocks.w[...])
    np.testing.assert_allclose(drawn.std(axis=(1, 2)), 60**-0.5, rtol=0.05)
    assert np.abs(drawn[0] - drawn[1]).max() > 0.1
