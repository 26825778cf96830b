"""Pooling: the real Pax's numbers with paddings, NumPy, dtypes, wrong settings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from tests.support.goldens import pax_options
from tests.support.marks import slow_but
from tests.support.pax_options import assert_equals_pax

partial = functools.partial
PAX = {
    f"pool_{kind.lower()}_{padding.lower()}_{stride[0]}_paddings": partial(
        layers.Pooling, (3, 2), stride, pooling_type=kind, padding=padding
    )
    for kind in ("MAX", "AVG")
    for padding, stride in (("SAME", (2, 1)), ("VALID", (1, 2)), ("SAME", (1, 1)))
} | {
    "pool1d_max_paddings": partial(layers.Pooling1D, 2, 3, pooling_type="MAX"),
    "pool1d_avg_paddings": partial(layers.Pooling1D, 2, 3),
    "pool1d_default": partial(layers.Pooling1D, 2),
    "global_max": partial(layers.GlobalPooling, (1, 2), pooling_type="MAX", keepdims=True),
    "global_avg": partial(layers.GlobalPooling, (1, 2)),
}


QUICK = {"pool_max_same_2_paddings", "pool_avg_valid_1_paddings", "global_avg"}


@pytest.mark.parametrize("name", slow_but(QUICK, PAX))
def test_outputs_gradients_and_paddings_equal_pax(name):
    case, given = pax_options("vision")[name], {}

    def call(module, x, paddings):
        if "global" in name:
            return module(x)
        if "paddings" not in name:
            return module(x, None)[0]
        given.update(x=np.zeros(x.shape, np.float32), paddings=paddings)
        return module(x, paddings)[0]

    assert_equals_pax("vision", name, PAX[name], call)
    if given:
        run = jax.jit(lambda x, paddings: PAX[name](rngs=nnx.Rngs(0))(x, paddings)[1])
        np.testing.assert_array_equal(run(**given), case["out"]["paddings"])


@pytest.mark.parametrize("kind", ["MAX", "AVG"])
def test_windows_equal_numpy(kind):
    x = np.random.default_rng(1).normal(size=(2, 5, 7, 3)).astype(np.float32)
    actual, paddings = layers.Pooling((3, 2), (2, 3), pooling_type=kind)(jnp.asarray(x))
    assert paddings is None
    assert actual.shape == (2, 3, 3, 3)
    # SAME: 2 rows more than there are, one before and one after; one column more, after.
    for row in range(3):
        for column in range(3):
            top, left = max(0, 2 * row - 1), 3 * column
            window = x[:, top : 2 * row + 2, left : left + 2]
            expected = window.max((1, 2)) if kind == "MAX" else window.mean((1, 2))
            np.testing.assert_allclose(actual[:, row, column], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["MAX", "AVG"])
def test_global_pooling_leaves_padding_out(kind):
    x = np.random.default_rng(2).normal(size=(3, 5, 7)).astype(np.float32)
    paddings = np.zeros((3, 5, 1), np.float32)
    paddings[1, 3:] = 1.0
    layer = layers.GlobalPooling((1,), pooling_type=kind)
    actual = layer(jnp.asarray(x), compatible_paddings=jnp.asarray(paddings))
    pool = np.max if kind == "MAX" else np.mean
    expected = [pool(row[:length], axis=0) for row, length in zip(x, (5, 3, 5), strict=True)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_integers_have_maxima_and_bfloat16_means_are_summed_in_float32():
    x = jnp.asarray(np.random.default_rng(3).integers(-9, 9, (1, 4, 4, 2)))
    actual, _ = layers.Pooling((2, 2), (2, 2))(x)
    np.testing.assert_array_equal(actual[0, 0, 0], np.asarray(x)[0, :2, :2].max((0, 1)))
    # 1000 ones in bfloat16 add up to 256.
    ones = jnp.ones((1, 40, 25, 1), jnp.bfloat16)
    for mean in (
        layers.GlobalPooling((1, 2))(ones),
        layers.Pooling((40, 25), (1, 1), pooling_type="AVG", padding="VALID")(ones)[0],
    ):
        assert mean.dtype == jnp.bfloat16
        assert float(mean.reshape(())) == 1.0


WRONG = {
    r"Pooling\.pooling_type.*'MEAN'.*MAX.*AVG": lambda: layers.Pooling(
        (2, 2), (1, 1), pooling_type="MEAN"
    ),
    r"Pooling\.pooling_type.*'max'.*MAX": lambda: layers.Pooling(
        (2, 2), (1, 1), pooling_type="max"
    ),
    r"Pooling\.padding.*'FULL'": lambda: layers.Pooling((2, 2), (1, 1), padding="FULL"),
    r"Pooling\.window_shape\[1\].*0": lambda: layers.Pooling((2, 0), (1, 1)),
    r"Pooling\.window_stride.*\(1,\)": lambda: layers.Pooling((2, 2), (1,)),
    r"GlobalPooling\.pooling_dims.*\(-1,\)": lambda: layers.GlobalPooling((-1,)),
    r"GlobalPooling\.pooling_dims.*\(\)": lambda: layers.GlobalPooling(()),
    r"GlobalPooling\.pooling_type.*'SUM'": lambda: layers.GlobalPooling((1,), pooling_type="SUM"),
    r"Pooling1D\.stride.*0": lambda: layers.Pooling1D(0),
    r"Pooling1D\.window.*-1": lambda: layers.Pooling1D(1, -1),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        WRONG[message]()


def test_a_pooling_layer_is_a_template():
    assert layers.GlobalPooling((1,), rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape == (2,)
