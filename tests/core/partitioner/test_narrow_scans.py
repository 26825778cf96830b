"""Scans cast what they stack after the loop: the same numbers, in half the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.extend.core import primitives

from praxis_lite.core.xla_workarounds.narrow_scans import narrow_scans


def stacked_dtypes(jaxpr):
    """Returns the dtypes that scans stack, of all scans in a program."""
    actual = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitives.scan_p:
            body = eqn.params["jaxpr"]
            body = getattr(body, "jaxpr", body)
            pairs = zip(body.outvars, eqn.outvars, strict=True)
            actual += [str(b.aval.dtype) for a, b in pairs if b.aval.ndim > a.aval.ndim]
        for inner in core.jaxprs_in_params(eqn.params):
            actual += stacked_dtypes(inner)
    return actual


def layers_gradient(w, x, dtype, remat=lambda f: f):
    """Returns the gradient of float32 weights that layers compute with in another dtype."""

    @remat
    def layer(x, w):
        return jnp.tanh(x @ w.astype(dtype)), None

    def loss(w):
        return jnp.sum(jax.lax.scan(layer, x.astype(dtype), w)[0].astype(jnp.float32))

    return jax.grad(loss)(w)


@pytest.mark.parametrize("remat", [jax.checkpoint, jax.jit])
def test_gradients_stay_narrow_until_after_the_loop(remat):
    rng = np.random.default_rng(0)
    w = rng.normal(scale=0.3, size=(3, 8, 8)).astype(np.float32)
    x = rng.normal(size=(4, 8)).astype(np.float32)

    def gradient(w, x):
        return layers_gradient(w, x, "bfloat16", remat)

    before = jax.make_jaxpr(gradient)(w, x)
    after = before.replace(jaxpr=narrow_scans(before.jaxpr))
    assert "float32" in stacked_dtypes(before.jaxpr)
    assert set(stacked_dtypes(after.jaxpr)) == {"bfloat16"}
    # Or XLA may leave out a rounding that is followed by a cast back, in the one and not the other.
    exactly = {"xla_allow_excess_precision": False}
    actual, expected = (
        jax.jit(core.jaxpr_as_fun(item), compiler_options=exactly)(w, x)[0]
        for item in (after, before)
    )
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)


def test_a_value_that_the_loop_also_uses_wide_is_there_both_ways():
    def run(x):
        def body(total, x):
            wide = (x * 2).astype(jnp.bfloat16).astype(jnp.float32)
            return total + wide, (wide, wide * 0.1)

        return jax.lax.scan(body, jnp.float32(0), x)

    x = np.linspace(0, 1, 7, dtype=np.float32)
    before = jax.make_jaxpr(run)(x)
    after = before.replace(jaxpr=narrow_scans(before.jaxpr))
    assert sorted(stacked_dtypes(after.jaxpr)) == ["bfloat16", "float32"]
    actual, expected = (core.jaxpr_as_fun(item)(x) for item in (after, before))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_program_with_nothing_to_cast_is_the_very_same():
    jaxpr = jax.make_jaxpr(lambda w, x: layers_gradient(w, x, "float32"))(
        np.ones((2, 3, 3), np.float32), np.ones((2, 3), np.float32)
    ).jaxpr
    assert narrow_scans(jaxpr) is jaxpr
