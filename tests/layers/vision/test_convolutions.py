"""Convolutions: the real Pax's numbers, NumPy, numeric gradients, rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_tools.check.asserts.layers import drawn
from tests.support.marks import every
from tests.support.pax_options import assert_equals_pax

partial = functools.partial
CONV = layers.Conv2D
DEPTHWISE = partial(layers.DepthwiseConv1D, (3, 3, 2))
PAX = {
    "conv_same_stride": partial(CONV, (3, 3, 3, 2), (2, 2)),
    "conv_tf_stride": partial(CONV, (3, 3, 3, 2), (2, 2), tf_equivalent_padding=True, bias=True),
    "conv_even_kernel_dilated": partial(CONV, (2, 4, 3, 2), dilations=(2, 1)),
    "conv_causal": partial(CONV, (3, 2, 3, 2), tf_equivalent_padding=True, is_causal=True),
    "conv_valid_bias": partial(CONV, (2, 3, 3, 2), padding="VALID", bias=True),
    "conv_depthwise": partial(CONV, (3, 3, 1, 6)),
    "conv_weight_norm": partial(CONV, (1, 2, 3, 2), weight_norm_tpl=layers.WeightNormL2),
    "conv_bn_act_train": partial(layers.ConvBNAct, (3, 3, 3, 2), activation="gelu"),
    "depthwise_causal": partial(DEPTHWISE, is_causal=True, bias=True),
    "depthwise_dilated": partial(DEPTHWISE, rhs_dilation_rate=2),
}


@pytest.mark.parametrize("name", every(2, PAX))
def test_outputs_and_gradients_equal_pax(name):
    def call(module, x, paddings):
        if name == "depthwise_causal":
            return module(x, paddings)
        return module(x, key=jax.random.key(0)) if "train" in name else module(x)

    assert_equals_pax("vision", name, PAX[name], call)


def test_valid_convolution_equals_numpy():
    rng = np.random.default_rng(1)
    layer = CONV((2, 3, 5, 7), (1, 2), padding="VALID", bias=True, rngs=nnx.Rngs(0))
    layer.b.set_value(jnp.arange(7.0))
    x, w = rng.normal(size=(3, 4, 9, 5)).astype(np.float32), np.asarray(layer.w[...])
    expected = np.zeros((3, 3, 4, 7)) + np.arange(7.0)
    for row in range(3):
        for column in range(4):
            patch = x[:, row : row + 2, 2 * column : 2 * column + 3]
            expected[:, row, column] += np.einsum("bhwc,hwcd->bd", patch, w)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)


def test_a_causal_convolution_sees_no_later_time():
    x = np.random.default_rng(2).normal(size=(1, 7, 3)).astype(np.float32)
    changed = x.copy()
    changed[:, 4] += 1.0
    layer = DEPTHWISE(is_causal=True, rhs_dilation_rate=2, rngs=nnx.Rngs(0))
    moved = np.abs(layer(jnp.asarray(changed)) - layer(jnp.asarray(x))).max(axis=(0, 2))
    np.testing.assert_array_equal(moved > 1e-6, [0, 0, 0, 0, 1, 0, 1])  # A rate of 2.


def test_weight_norm_makes_columns_of_the_stated_length():
    norm = layers.WeightNormL2(3, rngs=nnx.Rngs(0))
    norm.g.set_value(jnp.asarray([0.0, 1.0, -0.5]))
    w = norm(jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 5, 3)), jnp.float32))
    np.testing.assert_allclose(np.sqrt(np.square(w).sum((0, 1, 2))), [1.0, 2.0, 0.5], rtol=1e-6)


X = np.random.default_rng(4).normal(size=(7, 5, 3, 3)).astype(np.float32)
BIASED = partial(CONV, (3, 3, 3, 5), (2, 1), bias=True)
CASES = {
    "conv": (BIASED, X),
    "depthwise_1d": (partial(DEPTHWISE, bias=True, is_causal=True), X[:, :, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_close_to_float32(name):
    build, x = CASES[name]
    model = NnxModel(build)
    layer = model.module(drawn(model))
    half, whole = layer(x.astype(jnp.bfloat16)), layer(jnp.asarray(x))
    assert half.dtype == jnp.bfloat16
    assert 1e-4 < np.abs(np.float32(half) - whole).max() / np.abs(whole).max() < 0.02


WRONG = {
    r"Conv2D\.filter_shape\[0\].*0": lambda r: CONV((0, 3, 3, 2), rngs=r),
    r"Conv2D\.filter_shape.*\(3, 3\).*4": lambda r: CONV((3, 3), rngs=r),
    r"Conv2D\.filter_stride.*2.*2": lambda r: CONV((1, 1, 1, 1), 2, rngs=r),
    r"Conv2D\.padding.*'smae'.*SAME.*VALID": lambda r: CONV((1, 1, 1, 1), padding="smae", rngs=r),
    r"Conv2D\.is_causal.*True.*tf_equivalent_padding=True": lambda r: CONV(
        (1, 1, 1, 1), is_causal=True, rngs=r
    ),
    r"Conv2D\.filter_shape.*\(1, 1, 2, 2\).*\(1, 4, 4, 3\)": lambda r: CONV((1, 1, 2, 2), rngs=r)(
        jnp.ones((1, 4, 4, 3))
    ),
    r"ConvBNAct\.activation.*'rellu'.*relu": lambda r: layers.ConvBNAct(
        (1, 1, 1, 1), activation="rellu", rngs=r
    ),
    r"DepthwiseConv1D\.filter_shape\[2\].*0": lambda r: layers.DepthwiseConv1D((3, 3, 0), rngs=r),
    r"DepthwiseConv1D\.rhs_dilation_rate.*0": lambda r: DEPTHWISE(rhs_dilation_rate=0, rngs=r),
    r"WeightNormL2\.dim.*0": lambda r: layers.WeightNormL2(0, rngs=r),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: WRONG[message](nnx.Rngs(0)))
