"""A policy that keeps "context" keeps all results that attention's backward pass takes up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.core import MeshConfig, make_mesh
from praxis_lite.layers.attention.kernels.choice import attend
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.base.activation_names import offloaded
from praxis_tools.explain import hlo_matmuls
from tests.support.marks import needs_tokamax

POLICY = jax.checkpoint_policies.save_only_these_names("context")
B, N, K = 2, 4, 8
BY_TIME = ("data", "mdl", None, None)


def loss(kernel, how, q):
    settings = AttentionSettings(kernel, 4, how)
    outputs = attend(settings, q, q, q, AttentionMask(None, 0), split=BY_TIME)
    return jnp.sum(jnp.sin(outputs))  # Its gradient needs the outputs, as that of a matmul does.


def gradient(kernel, how, q, *, remat=True):
    """Returns the compiled gradient of q, and the flops of its matmuls."""
    function = functools.partial(loss, kernel, how)
    if remat:
        function = jax.checkpoint(function, policy=POLICY)
    with jax.set_mesh(make_mesh(MeshConfig(ici_mesh_shape=(1, 2, 4)))):
        compiled = jax.jit(jax.grad(function)).lower(q).compile()
    return compiled, hlo_matmuls.flops(compiled)


@pytest.mark.parametrize(
    ("kernel", "how", "is_once"),
    [
        pytest.param("splash", None, True, marks=pytest.mark.slow),
        ("chunked", None, True),
        pytest.param("chunked", "gather", True, marks=pytest.mark.nightly),
        pytest.param("chunked", "ring", True, marks=pytest.mark.nightly),
        pytest.param("chunked", "all_to_all", True, marks=pytest.mark.slow),
        # Their backward pass takes up logits.
        pytest.param("blocked", None, False, marks=pytest.mark.nightly),
        ("einsum", None, False),
    ],
)
def test_the_forward_pass_runs_once_where_its_results_are_kept(kernel, how, is_once):
    q = np.random.default_rng(0).normal(size=(B, 128 if kernel == "splash" else 16, N, K))
    q = q.astype(np.float32)
    kept, flops = gradient(kernel, how, q)
    expected, flops_of_one_pass = gradient(kernel, how, q, remat=False)
    # The forward pass has two of seven products. XLA merges some of a ring's in the pass that keeps
    # everything.
    assert (flops < 1.1 * flops_of_one_pass) == is_once and flops >= flops_of_one_pass > 0
    np.testing.assert_allclose(kept(q), expected(q), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@needs_tokamax
def test_tokamaxs_forward_pass_runs_once_where_its_results_are_kept():
    _, flops = gradient("tokamax", None, np.zeros((B, 128, N, K), np.float32))
    # Of a row: two products forward, and five backward, which are in the program with a mask and
    # without one.
    assert flops == (2 + 2 * 5) * 2 * N * 128 * 128 * K


@pytest.mark.slow
def test_what_goes_to_the_host_is_named_as_it_leaves_and_splash_runs_again():
    """Splash names its results in another order of dims, in which XLA would copy them."""
    q = np.zeros((B, 128, N, K), np.float32)
    with offloaded({"context"}):
        _, flops = gradient("splash", None, q)
    assert flops > gradient("splash", None, q, remat=False)[1]
