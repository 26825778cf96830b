"""Rows by their experts' matrices: each kernel against NumPy, with gradients, for every load."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.layers import TransformerFeedForwardMoe
from praxis_lite.layers.moe.grouped_matmul import Workload, choose_kernel, grouped_matmul
from tests.support.marks import needs_tokamax

# Rows, inputs, outputs: not whole tiles, and with 530 rows and 1,030 dims more than one each way.
SMALL, LARGE = (37, 13, 7), (530, 1030, 11)
LOADS = {
    "even": [10, 9, 9, 9],
    "uneven": [1, 30, 0, 4],  # The last rows are no one's.
    "one has all": [0, 0, 37, 0],
    "no rows": [0, 0, 0, 0],
}


def drawn(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_numpy(x, w, rows, grad):
    """Returns the products, and the gradients of rows and matrices."""
    y, of_x, of_w = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    first = 0
    for expert, num in enumerate(rows):
        of_it = slice(first, first + num)
        y[of_it] = x[of_it] @ w[expert]
        of_x[of_it] = grad[of_it] @ w[expert].T
        of_w[expert] = x[of_it].T @ grad[of_it]
        first += num
    return y, of_x, of_w


@functools.cache
def program(kernel):
    def run(x, w, rows, grad):
        y, pulled_back = jax.vjp(lambda x, w: grouped_matmul(kernel, x, w, rows, len(x)), x, w)
        return y, *pulled_back(grad)

    return jax.jit(run)


def assert_as_numpy(kernel, sizes, rows):
    num_rows, K, N = sizes
    x, w, grad = drawn((num_rows, K), 0), drawn((len(rows), K, N), 1), drawn((num_rows, N), 2)
    actual = program(kernel)(x, w, jnp.asarray(rows, jnp.int32), grad)
    expected = by_numpy(*(a.astype(np.float64) for a in (x, w)), rows, grad.astype(np.float64))
    for name, a, e in zip(("products", "rows", "matrices"), actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=2e-6 * np.sqrt(max(sizes)) * 4, err_msg=name)


SLOW_TOKAMAX = pytest.param("tokamax", marks=[needs_tokamax, pytest.mark.slow])


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kernel", ["ragged_dot", "megablox", SLOW_TOKAMAX])
def test_products_and_gradients_equal_numpy(kernel, load):
    assert_as_numpy(kernel, SMALL, LOADS[load])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[3, 509, 0, 18], [100, 0, 300, 7]], ids=str)
@pytest.mark.parametrize("kernel", ["megablox", SLOW_TOKAMAX])
def test_sizes_beyond_a_tile_equal_numpy(kernel, rows):
    assert_as_numpy(kernel, LARGE, rows)


@pytest.mark.parametrize("kernel", ["megablox", SLOW_TOKAMAX])
def test_rows_that_are_no_ones_may_be_anything(kernel):
    """A kernel leaves memory as it was: what is not a number there must not reach the gradients."""
    rows = jnp.asarray([1, 30, 0, 4], jnp.int32)
    x, w, grad = drawn((37, 13), 0), drawn((4, 13, 7), 1), drawn((37, 7), 2)
    expected = program(kernel)(x, w, rows, grad)
    x[35:], grad[35:] = np.nan, np.nan
    for a, e in zip(program(kernel)(x, w, rows, grad), expected, strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize(
    ("setting", "platform", "dtype", "varying", "expected"),
    [
        ("auto", "tpu", jnp.bfloat16, (), "megablox"),
        ("auto", "tpu", jnp.float16, (), "ragged_dot"),
        ("auto", "tpu", jnp.bfloat16, ("data",), "ragged_dot"),
        ("auto", "cpu", jnp.bfloat16, (), "ragged_dot"),
        ("auto", "gpu", jnp.bfloat16, (), "ragged_dot"),
        ("megablox", "cpu", jnp.float32, (), "megablox"),
        ("ragged_dot", "tpu", jnp.bfloat16, (), "ragged_dot"),
        ("ragged_dot", "tpu", jnp.float16, ("data",), "ragged_dot"),
        pytest.param("tokamax", "tpu", jnp.bfloat16, (), "tokamax", marks=needs_tokamax),
    ],
)
def test_the_kernel_of_a_platform(setting, platform, dtype, varying, expected):
    assert choose_kernel(setting, Workload(platform, dtype, frozenset(varying)))[0] == expected


@pytest.mark.parametrize(
    ("setting", "dtype", "varying", "message"),
    [
        ("megablox", jnp.float16, (), "expert_kernel.*float16.*ragged_dot"),
        ("megablox", jnp.float32, ("data",), "over data.*ragged_dot"),
        pytest.param(
            "tokamax", jnp.float16, (), "'tokamax'.*float16.*ragged_dot", marks=needs_tokamax
        ),
        ("megablocks", jnp.float32, (), "megablocks.*megablox"),
    ],
)
def test_a_kernel_that_cannot_is_refused(setting, dtype, varying, message):
    with pytest.raises(ConfigError, match=message):
        choose_kernel(setting, Workload("tpu", dtype, frozenset(varying)))


def test_without_tokamax_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ConfigError, match=r"expert_kernel.*'praxis_lite\[tokamax\]'"):
        TransformerFeedForwardMoe(
            4, 8, num_experts=2, dropless=True, expert_kernel="tokamax", rngs=nnx.Rngs(0)
        )
