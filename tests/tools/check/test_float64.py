"""A program in float64: against NumPy, with the draws and the structure of the one in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.core import MeshConfig, make_mesh
from praxis_tools.check.runs.float64 import fingerprint, in_float64

X = np.random.default_rng(0).normal(size=(7, 13)).astype(np.float32)


def wide(function, *args, **settings):
    """Returns the results of `function` in float64, for arguments of float32."""
    result = in_float64(function, *args, **settings)
    with jax.enable_x64(True):
        given = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, args)
        return jax.device_get(jax.jit(result)(*given))


def loop(x):
    """Returns numbers made of x [T, D] by a scan, a while loop, a branch and casts to few bits."""

    def step(carry, row):
        carry = carry * 0.9 + jnp.tanh(row.astype(jnp.bfloat16)).astype(jnp.float32)
        return carry, jnp.sum(carry)

    carry, sums = jax.lax.scan(step, jnp.zeros(x.shape[1]), x)
    carry = jax.lax.while_loop(lambda c: jnp.sum(c) < 100.0, lambda c: c * 1.5 + 1.0, carry)
    carry = jax.lax.cond(carry[0] > 0, lambda c: c / 3.0, lambda c: c, carry)
    return carry, sums


def loop_by_numpy(x):
    """Returns the same in float64."""
    carry, sums = np.zeros(x.shape[1]), []
    for row in x.astype(np.float64):
        carry = carry * np.float64(np.float32(0.9)) + np.tanh(row)
        sums.append(carry.sum())
    while carry.sum() < 100.0:
        carry = carry * 1.5 + 1.0
    return (carry / 3.0 if carry[0] > 0 else carry), np.array(sums)


def test_loops_branches_and_casts_are_those_of_numpy_in_float64():
    actual = wide(loop, X)
    for got, right in zip(actual, loop_by_numpy(X), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, right, rtol=1e-13)


def test_a_gradient_and_an_update_are_those_of_numpy_in_float64():
    optimizer = optax.adamw(0.1, weight_decay=0.3)

    def step(w):
        grads = jax.grad(lambda w: jnp.mean(jnp.square(X @ w)) + jnp.sum(jax.nn.relu(w)))(w)
        updates, _ = optimizer.update(grads, optimizer.init(w), w)
        return optax.apply_updates(w, updates)

    w = X[0]
    right = w.astype(np.float64)
    x = X.astype(np.float64)
    g = 2 * x.T @ (x @ right) / len(x) + (right > 0)
    numbers = {k: np.float64(np.float32(v)) for k, v in dict(b1=0.9, b2=0.999, eps=1e-8).items()}
    mu, nu = (1 - numbers["b1"]) * g, (1 - numbers["b2"]) * g * g
    mu, nu = mu / (1 - numbers["b1"]), nu / (1 - numbers["b2"])
    rate, decay = np.float64(np.float32(0.1)), np.float64(np.float32(0.3))
    right = right - rate * (mu / (np.sqrt(nu) + numbers["eps"]) + decay * right)
    # The constants of optax are float32 here and there: 1e-8 of a step of 0.1, and not 1e-17.
    np.testing.assert_allclose(wide(step, w), right, rtol=0, atol=1e-8)


def test_the_fingerprint_of_a_layer_depends_on_the_order_of_its_values():
    def by_numpy(x):
        i, j = np.indices(x.shape)
        return x.sum(), (x * np.cos(i + 0.5) * np.cos(j * 8 / 7 + 0.5)).sum()

    orders = [X.astype(np.float64), X[::-1].astype(np.float64), X[:, ::-1].astype(np.float64)]
    with jax.enable_x64(True):
        actual = jax.device_get(jax.jit(jax.vmap(fingerprint))(np.stack(orders)))
    np.testing.assert_allclose(actual, [by_numpy(x) for x in orders], rtol=1e-12)
    assert np.ptp(actual[:, 0]) < 1e-12 and len(np.unique(actual[:, 1].round(1))) == 3


def test_draws_are_those_of_float32_or_none_at_all():
    def drawn(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0.0)

    key = jax.random.key(3)
    plain = jax.device_get(jax.jit(drawn)(X, key))
    assert 0 < (plain == 0).sum() < plain.size
    np.testing.assert_array_equal(wide(drawn, X, key), plain.astype(np.float64))
    np.testing.assert_array_equal(wide(drawn, X, key, without_randomness=True), X)
    assert in_float64(drawn, X, key).draws
    assert not in_float64(loop, X).draws


def test_collectives_by_hand_are_in_float64_too():
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(4,), axis_names=("data",)))

    def mean(x):
        return jax.shard_map(
            lambda x: jax.lax.pmean(jnp.exp(x).mean(0), "data"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            axis_names={"data"},
        )(x)

    x = np.concatenate([X, X[:1]])
    np.testing.assert_allclose(wide(mean, x), np.exp(x.astype(np.float64)).mean(0), rtol=1e-14)


def test_layers_are_told_apart_in_a_scan_and_by_the_users_line():
    def two_layers(x):
        def step(x, _):
            with jax.named_scope("first"):
                x = jnp.sin(x)
            with jax.named_scope("second"):
                return jnp.cos(x), None

        x = jax.lax.scan(step, x, None, length=3)[0]
        return x * 2.0

    _, seen = wide(two_layers, X, by_layer=True)
    layers = [name.split("|")[1] for name in sorted(seen)]
    assert layers[:6] == ["first", "second"] * 3
    assert layers[-1].startswith("test_float64.py:")
    x = X.astype(np.float64)
    sums = []
    for _ in range(3):
        sums.append(np.sin(x).sum())
        x = np.cos(np.sin(x))
    actual = [seen[f"{2 * turn:06d}|first"][0] for turn in range(3)]
    np.testing.assert_allclose(actual, sums, rtol=1e-12)


def test_layers_of_each_device_are_told_apart_in_a_shard_map():
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(4,), axis_names=("data",)))

    def body(x):
        with jax.named_scope("first"):
            x = jnp.sin(x)
        with jax.named_scope("second"):
            return jax.lax.psum(x.sum(), "data")

    x = np.concatenate([X, X[:1]])
    function = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P())
    _, seen = wide(function, x, by_layer=True)
    sums = np.sin(x.astype(np.float64)).reshape(4, -1).sum(1)
    actual = [item[0] for name, item in sorted(seen.items()) if name.endswith("|first")]
    np.testing.assert_allclose(actual, sums, rtol=1e-12)


@pytest.mark.parametrize("name", ["scatter_add", "sort", "cumsum", "conv", "cholesky"])
def test_operations_with_programs_of_their_own(name):
    square = X[:, :7] @ X[:, :7].T + 9 * np.eye(7, dtype=np.float32)
    function, expected = {
        "scatter_add": (
            lambda x: jnp.zeros((3, 13)).at[jnp.arange(7) % 3].add(x),
            lambda x: np.stack([x[i::3].sum(0) for i in range(3)]),
        ),
        "sort": (lambda x: jnp.sort(x, axis=1), lambda x: np.sort(x, axis=1)),
        "cumsum": (lambda x: jnp.cumsum(x, axis=1), lambda x: np.cumsum(x, axis=1)),
        "conv": (
            lambda x: jax.vmap(lambda row: jnp.convolve(row, row[:3], "valid"))(x),
            lambda x: np.stack([np.convolve(row, row[:3], "valid") for row in x]),
        ),
        "cholesky": (
            lambda x: jnp.linalg.cholesky(square * x[0, 0]),
            lambda x: np.linalg.cholesky(square.astype(np.float64) * x[0, 0]),
        ),
    }[name]
    x = np.abs(X)
    np.testing.assert_allclose(wide(function, x), expected(x.astype(np.float64)), rtol=1e-12)
