"""Products in any order; DoRA against PEFT, and weights in 4 bits against bitsandbytes."""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.layers import QuantizationRule, lora, quantized
from praxis_lite.layers.base.dense import Product
from praxis_tools.check.asserts.layers import assert_near, run_layers
from tests.support.float16 import needs_float16
from tests.support.goldens import golden

partial = functools.partial
needs_qwix = pytest.mark.skipif(
    find_spec("qwix") is None, reason="Qwix is not installed: pip install qwix"
)


def draw(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn(module):
    """Draws every weight of adapters that is zeros at first."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param) and path[-1] in ("lora_b", "lora_m"):
            node.set_value(jnp.asarray(0.3 * draw(node.shape, seed=node.size)))
    return module


def rounded(model, qtype, **settings):
    return partial(quantized, model=model, rules=(QuantizationRule("", qtype, **settings),))


def test_dora_computes_and_learns_as_peft():
    numbers = {k: v for k, v in golden("peft/dora.json").items() if k != "made_by"}
    case = {k: np.array(v, np.float32) for k, v in numbers.items()}
    build = partial(layers.Einsum, "...d,df->...f", (5, 7), has_bias=True)
    layer = lora(build, rank=2, alpha=3.0, use_dora=True)(rngs=nnx.Rngs(0))
    length = np.linalg.norm(case["w"], axis=1)
    weights = {
        "w": case["w"].T,
        "b": case["bias"],
        "lora_a": case["a"].T,
        "lora_b": case["b"].T,
        "lora_m": case["magnitude"] - length,
    }
    for name, value in weights.items():
        getattr(layer, name).set_value(jnp.asarray(value))

    @jax.jit
    def run(layer, x, g):
        actual, backward = jax.vjp(lambda layer, x: layer(x), layer, x)
        return actual, *backward(g)

    actual, of_layer, of_x = run(layer, case["x"], case["g"])
    np.testing.assert_allclose(actual, case["y"], rtol=1e-5, atol=1e-6)
    for actual, expected in (
        (of_x, case["dx"]),
        (of_layer.lora_a[...].T, case["da"]),
        (of_layer.lora_b[...].T, case["db"]),
        (of_layer.lora_m[...], case["dmagnitude"]),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@needs_qwix
def test_nf4_rounds_as_bitsandbytes_to_the_bit():
    case = golden("peft/nf4.json")
    layer = rounded(partial(layers.Linear, 128, 6), "nf4")(rngs=nnx.Rngs(0))
    layer.w.set_value(jnp.asarray(np.array(case["w"], np.float32).T))
    actual = jax.jit(lambda layer: layer.product.kernel(layer).T)(layer)
    np.testing.assert_array_equal(actual, np.float32(case["nf4"]))


def in_int4(w, size):
    """Returns a matrix [D, F] in blocks of D rounded to -7 to 7 times a scale each, by hand."""
    result = np.zeros_like(w)
    for start in range(0, len(w), size):
        block = w[start : start + size]
        scale = np.abs(block).max(axis=0) / 7
        result[start : start + size] = np.round(block / scale) * scale
    return result


@needs_qwix
def test_int4_rounds_blocks_of_inputs_and_the_backward_pass_is_of_the_rounded():
    layer = rounded(partial(layers.Linear, 130, 5), "int4", block_size=20)(rngs=nnx.Rngs(0))
    expected = in_int4(np.asarray(layer.w[...]), 20)
    x, g = draw((3, 130)), draw((3, 5), 1)

    @jax.jit
    def run(layer, x, g):
        actual, backward = jax.vjp(lambda layer, x: layer(x), layer, x)
        return actual, *backward(g)

    actual, of_layer, of_x = run(layer, x, g)
    np.testing.assert_allclose(actual, x @ expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_x, g @ expected.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_layer.w[...], x.T @ g, rtol=1e-4, atol=1e-4)


@needs_qwix
def test_heads_are_rounded_in_blocks_of_the_last_dim_that_is_summed():
    build = partial(layers.AttentionProjection, 6, 2, 70, is_output_projection=True)
    layer = rounded(build, "int4")(rngs=nnx.Rngs(0))
    w = np.asarray(layer.w[...])  # [D, N, K], of which N and K are summed.
    expected = np.stack([in_int4(w[:, n].T, 64).T for n in range(2)], axis=1)
    actual = jax.jit(lambda layer: layer.product.kernel(layer))(layer)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


BASES = {
    "linear": (partial(layers.Linear, 70, 7), (3, 70)),
    "query": (partial(layers.AttentionProjection, 70, 3, 4), (2, 3, 70)),
    "post": (partial(layers.AttentionProjection, 5, 3, 4, is_output_projection=True), (2, 3, 4)),
    "combined": (partial(layers.CombinedQKVProjectionLayer, 5, 3, 4), (2, 5)),
    "letters_of_the_rank": (partial(layers.Einsum, "...rs,drs->...d", (5, 3, 4)), (2, 3, 4)),
}


# Each kind of layer once, blocks and channels, and both kinds of adapters.
ORDERS = [
    ("linear", "nf4", False),
    ("combined", "int8", True),
    pytest.param("post", "int4", True, marks=pytest.mark.slow),
    pytest.param("query", "float8_e4m3fn", False, marks=[needs_float16, pytest.mark.slow]),
    pytest.param("letters_of_the_rank", "int8", True, marks=pytest.mark.slow),
]


@needs_qwix
@pytest.mark.parametrize(("name", "qtype", "use_dora"), ORDERS)
def test_the_order_in_which_products_are_put_does_not_matter(name, qtype, use_dora):
    build, shape = BASES[name]
    adapter = {"rank": 2, "alpha": 3.0, "use_dora": use_dora}
    around = drawn(lora(rounded(build, qtype), **adapter)(rngs=nnx.Rngs(0)))
    inside = drawn(rounded(lora(build, **adapter), qtype)(rngs=nnx.Rngs(0)))
    assert around.product == inside.product != Product()
    x, run = jnp.asarray(draw(shape)), jax.jit(lambda layer, x: layer(x))
    outputs = run(around, x)
    jax.tree.map(np.testing.assert_array_equal, outputs, run(inside, x))
    # The base is rounded, and the thin product is there.
    exact = drawn(lora(build, **adapter)(rngs=nnx.Rngs(0)))
    alone = rounded(build, qtype)(rngs=nnx.Rngs(0))
    for actual, of_exact, of_base in zip(
        *map(jax.tree.leaves, (outputs, run(exact, x), run(alone, x))), strict=True
    ):
        size = np.abs(of_exact).max()
        assert 0 < np.abs(actual - of_exact).max() < 0.25 * size
        assert np.abs(actual - of_base).max() > 0.01 * size


@needs_qwix
def test_a_later_rounding_takes_the_place_of_an_earlier_one():
    layer = rounded(rounded(partial(layers.Linear, 5, 7), "int8"), "nf4")(rngs=nnx.Rngs(0))
    expected = rounded(partial(layers.Linear, 5, 7), "nf4")(rngs=nnx.Rngs(0))
    assert layer.product == expected.product


SPLIT_DNK = {"weight_split_dims_mapping": ("data", "mdl", None)}
# Sizes that a mesh does not divide, and blocks that do not lie in a device's part.
ON_MESHES = {
    name: (lora(rounded(build, "nf4"), rank=2, use_dora=True), lambda module, x, key: module(x), x)
    for name, build, x in (
        ("query", partial(layers.AttentionProjection, 130, 3, 5, **SPLIT_DNK), draw((7, 130))),
        (
            "post",
            partial(layers.AttentionProjection, 5, 3, 70, is_output_projection=True, **SPLIT_DNK),
            draw((7, 3, 70)),
        ),
    )
}


@needs_qwix
@pytest.mark.slow
def test_weights_in_4_bits_with_adapters_are_on_a_mesh_what_they_are_on_one_device():
    actual, expected = (run_layers(ON_MESHES, shape) for shape in ((1, 4, 2), None))
    assert_near(actual, expected)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"qtype": "int5"}, r"qtype.*'int5'.*int4, nf4.*int4\?"),
        ({"qtype": "int4", "bwd_qtype": "int8"}, "'int4' rounds only weights.*Omit bwd_qtype"),
        ({"qtype": "int8", "block_size": 64}, "block_size is 64.*'int4' or 'nf4'"),
        ({"qtype": "nf4", "block_size": 0}, "block_size is 0.*positive integer"),
        ({"qtype": "int8", "bwd_qtype": "nf4"}, "bwd_qtype is 'nf4'"),
    ],
)
def test_settings_of_4_bits_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationRule("", **settings)
