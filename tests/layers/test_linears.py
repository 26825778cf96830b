"""Dense layers: every activation of Pax, biases, einsums; sharded as unsharded, bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.layers.activations import ACTIVATIONS, activation_fn
from tests.support.goldens import pax_options

PAX = pax_options("softmaxes")
OF_PAX = {name.removeprefix("act_"): case for name, case in PAX.items() if name.startswith("act_")}
POINTS = jnp.asarray(PAX[""]["in"]["pts"])


@functools.cache
def at_points():
    """Returns each activation's values and gradients, from one program."""

    def both(name, x):
        function = activation_fn(name, None)
        return function(x), jax.grad(lambda x: jnp.sum(function(x)))(x)

    return jax.jit(lambda x: {name: both(name, x) for name in OF_PAX})(POINTS)


@pytest.mark.parametrize("name", OF_PAX)
def test_activations_and_their_gradients_equal_pax(name):
    """By Pax's class name; GELU_exact is Pax's GELU(approximate=False)."""
    values, grads = at_points()[name]
    # The goldens' tolerance: where tanh is nearly -1, GELU's gradient is a difference of roundings.
    np.testing.assert_allclose(values, OF_PAX[name]["out"]["y"], rtol=5e-5, atol=1e-5)
    np.testing.assert_allclose(grads, OF_PAX[name]["gin"]["x"], rtol=5e-5, atol=1e-5)


def test_every_activation_was_compared():
    compared = {activation_fn(name, None) for name in OF_PAX}
    assert compared == set(ACTIVATIONS.values())


def test_an_activation_may_be_a_function_and_keeps_bfloat16():
    steep = functools.partial(jax.nn.leaky_relu, negative_slope=0.5)
    layer = layers.FeedForward(3, 5, activation=steep, bias_init=-100.0, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(jnp.zeros((2, 3))), np.full((2, 5), -50.0))
    for function in ACTIVATIONS.values():
        assert jax.eval_shape(function, jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_feed_forward_names_its_product_for_remat():
    layer = layers.FeedForward(3, 5, checkpoint_str="hidden", rngs=nnx.Rngs(0))
    assert "name=hidden" in str(jax.make_jaxpr(lambda x: layer(x))(jnp.zeros((2, 3))))


EINSUMS = {
    "into_heads": ("...d,dnk->...nk", (5, 2, 3), (4, 7, 5)),
    "out_of_heads": ("btnk,dnk->btd", (5, 2, 3), (4, 7, 2, 3)),
    "per_expert": ("ebd,edf->ebf", (2, 5, 3), (2, 4, 5)),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum_equals_numpy_with_a_bias_of_the_dims_that_the_weight_gives(name):
    equation, weight_shape, input_shape = EINSUMS[name]
    rng = np.random.default_rng(0)
    layer = layers.Einsum(
        equation,
        weight_shape,
        has_bias=True,
        bias_init=jax.nn.initializers.normal(),
        rngs=nnx.Rngs(0),
    )
    x = rng.normal(size=input_shape).astype(np.float32)
    w, b = np.asarray(layer.w[...], np.float64), np.asarray(layer.b[...])
    expected = {
        "into_heads": lambda: np.tensordot(x, w, axes=([2], [0])) + b,
        "out_of_heads": lambda: np.tensordot(x, w, axes=([2, 3], [1, 2])) + b,
        "per_expert": lambda: np.stack([x[e] @ w[e] + b[e] for e in range(2)]),
    }[name]()
    run = jax.jit(lambda x: layer(x))
    np.testing.assert_allclose(run(x), expected, rtol=1e-5, atol=1e-5)
    assert jax.eval_shape(run, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_einsum_draws_with_the_fans_of_its_equation():
    for equation, shape, fans in (
        ("...d,dnk->...nk", (40, 5, 8), 80),
        ("...nk,dnk->...d", (40, 5, 8), 80),
        ("ebd,edf->ebf", (7, 40, 40), 80),
    ):
        w = layers.Einsum(equation, shape, rngs=nnx.Rngs(0)).w[...]
        bound = (6 / fans) ** 0.5
        assert 0.98 * bound < float(jnp.abs(w).max()) <= bound, equation


def test_splits_of_einsum_biases_follow_the_weight():
    specs = dict(
        spec_leaves(
            NnxModel(
                functools.partial(
                    layers.Einsum,
                    "ebd,edf->ebf",
                    (2, 5, 3),
                    has_bias=True,
                    weight_split_dims_mapping=("data", None, "mdl"),
                )
            ).weight_specs()
        )
    )
    assert specs["params/b"].shape == (2, 3)
    assert specs["params/b"].split_dims_mapping == ("data", "mdl")


@pytest.mark.parametrize(
    "equation, weight_shape, message",
    [
        ("...d,df->f", (3, 5), "equation.*'...d,df->f'"),
        ("bd,df", (3, 5), "equation.*'bd,df'"),
        ("bd,df->bg", (3, 5), "'bd,df->bg'"),
        ("bd,ef->bf", (3, 5), "'bd,ef->bf'"),
        ("bdd,df->bf", (3, 5), "'bdd'"),
        ("bd,df->bf", (3, 5, 7), r"weight_shape.*\(3, 5, 7\).*2.*'df'"),
        ("bd,df->bf", (3, 0), r"weight_shape\[1\].*0"),
    ],
)
def test_an_equation_that_does_not_fit_is_named(equation, weight_shape, message):
    with pytest.raises(ConfigError, match=r"Einsum\..*" + message):
        layers.Einsum(equation, weight_shape, rngs=nnx.Rngs(0))
