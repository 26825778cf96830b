"""Splash attention of tokamax: its numbers are JAX's, and it stands in where jax has none."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from praxis_lite import ConfigError, layers
from praxis_lite.layers.attention.kernels import splash
from praxis_lite.layers.attention.kernels.choice import Workload, attend, choose_kernel
from praxis_lite.layers.attention.kernels.einsum import LogitOptions, einsum_attention
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.kernels.splash_kernels import TokamaxSplash
from praxis_lite.layers.attention.masks import AttentionMask
from tests.support.marks import needs_tokamax, nightly_but

ON_TPU = Workload("tpu", jnp.bfloat16, 256, 256, 64)
OF_JAX = "jax.experimental.pallas.ops.tpu.splash_attention"


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def answers(attention, dtype, q, k, v, cotangent):
    """Returns outputs and gradients of q, k, v, float32, of an attention in `dtype`."""

    def objective(q, k, v):
        y = attention(*(x.astype(dtype) for x in (q, k, v))).astype(jnp.float32)
        return jnp.sum(y * cotangent), y

    return jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True))(q, k, v)


def of_kernel(name, mask):
    settings = AttentionSettings(name, options=LogitOptions(scale=0.3))
    return lambda q, k, v: attend(settings, q, k, v, mask)


def errors(actual, expected):
    """Returns the largest error of outputs and of each gradient, relative to the largest value."""
    return [
        float(np.abs(a - e).max() / np.abs(e).max())
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    ]


@pytest.mark.slow
@needs_tokamax
def test_numbers_are_those_of_jaxs_splash():
    # Five blocks of 128, causal, in packed rows, heads that share keys.
    segments = np.sort(np.random.default_rng(3).integers(1, 3, (2, 640)))
    mask = AttentionMask(
        None, 0, q_segments_BT=segments, kv_segments_BS=segments, is_to_itself=True
    )
    arrays = [drawn(2, 640, heads, 8, seed=heads) for heads in (4, 2)]
    arrays = arrays[0], arrays[1], drawn(2, 640, 2, 8, seed=7), drawn(2, 640, 4, 8, seed=8)
    exact = answers(of_kernel("einsum", mask), jnp.float32, *arrays)
    for dtype, most in ((jnp.float32, 2e-6), (jnp.bfloat16, 0.0)):
        of_jax, of_tokamax = (
            errors(answers(of_kernel(name, mask), dtype, *arrays), exact)
            for name in splash.SPLASHES
        )
        # In bfloat16 as near to exact numbers; dq is rounded once more for each block of keys.
        for error, jaxs in zip(of_tokamax, of_jax, strict=True):
            assert error < max(most, 1.5 * jaxs)


@pytest.mark.slow
@needs_tokamax
@pytest.mark.parametrize("window", nightly_but({200}, [None, 200]))
def test_the_dq_that_a_tpu_adds_up_in_three_arrays_is_the_einsums(window):
    """Pallas's interpreter of a TPU's memory runs the kernel of a TPU, of one row."""
    mask, options = AttentionMask(window, 0), LogitOptions()
    q, k, v = drawn(640, 4, 8), drawn(640, 2, 8, seed=1), drawn(640, 2, 8, seed=2)
    cotangent = drawn(640, 4, 8, seed=3)
    row = TokamaxSplash((640, 640), 4, mask, options, pltpu.InterpretParams())
    assert row.kernel().kwargs["config"].dq_reduction_steps == 3

    def kernel(q, k, v):
        q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))
        return row.attend(q, k, v, None).transpose(1, 0, 2)

    def by_einsum(q, k, v):
        return einsum_attention(q[None], k[None], v[None], mask, options)[0]

    actual, expected = (
        answers(attention, jnp.float32, q, k, v, cotangent) for attention in (kernel, by_einsum)
    )
    assert max(errors(actual, expected)) < 5e-6


@pytest.fixture
def jax_without_splash(monkeypatch):
    monkeypatch.setitem(sys.modules, OF_JAX, None)


@needs_tokamax
def test_where_jax_has_no_splash_the_name_gives_tokamaxs(jax_without_splash):
    assert splash.splash_of("splash") is TokamaxSplash
    name, reason = choose_kernel("splash", (), ON_TPU)
    assert name == "splash" and "from tokamax, because this jax version has none" in reason
    assert choose_kernel("auto", (), ON_TPU)[0] == "splash"
    layers.DotProductAttention(4, 2, atten_kernel="splash", rngs=nnx.Rngs(0))


@pytest.mark.slow
@needs_tokamax
def test_where_jax_has_no_splash_the_numbers_are_the_same(monkeypatch):
    arrays = [drawn(1, 128, 2, 8, seed=seed) for seed in range(4)]
    run = functools.partial(
        answers, of_kernel("splash", AttentionMask(None, 0)), jnp.float32, *arrays
    )
    expected = run()
    monkeypatch.setitem(sys.modules, OF_JAX, None)
    jax.clear_caches()
    assert max(errors(run(), expected)) < 2e-6


def test_where_there_is_none_at_all_the_error_says_what_to_install(jax_without_splash, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ConfigError, match=r"'splash', as jax .*'praxis_lite\[tokamax\]'"):
        layers.DotProductAttention(4, 2, atten_kernel="splash", rngs=nnx.Rngs(0))
    name, reason = choose_kernel("auto", (), ON_TPU)
    assert name == "einsum" and "no splash kernel is installed" in reason


def test_without_tokamax_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ConfigError, match=r"atten_kernel='tokamax'.*'praxis_lite\[tokamax\]'"):
        layers.DotProductAttention(4, 2, atten_kernel="tokamax", rngs=nnx.Rngs(0))
    assert choose_kernel("splash", (), ON_TPU)[0] == "splash"


@needs_tokamax
@pytest.mark.parametrize(
    "settings", [{"atten_dropout_prob": 0.1}, {"attention_sinks": True}], ids=str
)
def test_what_it_cannot_do_is_refused_before_anything_is_traced(settings):
    with pytest.raises(ConfigError, match=f"'tokamax'.*{next(iter(settings))}.*'einsum'"):
        layers.DotProductAttention(4, 2, atten_kernel="tokamax", **settings, rngs=nnx.Rngs(0))
