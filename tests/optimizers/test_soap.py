"""SOAP against NumPy by hand, on what Adam finds hard, and where its arithmetic is delicate."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import Learner, WeightSpec
from praxis_lite.optimizers import scale_by_soap, soap

B1, B2, EPS, DECAY, FREQUENCY, MAX_DIM = 0.9, 0.8, 1e-8, 0.1, 2, 6
# Of "wide" the 11 columns are not rotated. No covariance is singular: its basis is no choice.
SHAPES = {"square": (5, 5), "wide": (5, 11), "heads": (3, 4, 5), "bias": (7,), "row": (1, 11)}


def tree(seed, shapes=None):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in (shapes or SHAPES).items()}


def schedule(count):
    return 0.1 / (1.0 + count)


def unfolded(x, dim):
    return np.moveaxis(x, dim, 0).reshape(x.shape[dim], -1)


def times(x, matrix, dim):
    """Returns `x` with each vector along `dim` multiplied by `matrix`."""
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    return np.moveaxis((matrix @ unfolded(x, dim)).reshape(-1, *rest), 0, dim)


def numpy_soap(w, grads):
    """Vyas et al. 2024, algorithms 3 and 4, in float64, of one weight."""
    w = np.float64(w)
    dims = [d for d, n in enumerate(w.shape) if 1 < n <= MAX_DIM] if w.ndim > 1 else []
    m, v = np.zeros_like(w), np.zeros_like(w)
    covariance = {d: np.zeros((w.shape[d], w.shape[d])) for d in dims}
    basis = {}

    def rotated(x, back=False):
        for d in dims:
            x = times(x, basis[d] if back else basis[d].T, d)
        return x

    for t, g in enumerate(map(np.float64, grads)):
        update = np.zeros_like(w)
        if t > 0:
            m = B1 * m + (1 - B1) * g
            v = B2 * v + (1 - B2) * rotated(g) ** 2
            adam = rotated(m) / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
            update = rotated(adam, back=True)
        w = w - schedule(t) * (update + DECAY * w)
        for d in dims:
            covariance[d] = B2 * covariance[d] + (1 - B2) * unfolded(g, d) @ unfolded(g, d).T
            if t == 0:
                basis[d] = np.linalg.eigh(covariance[d])[1][:, ::-1]
            elif t % FREQUENCY == 0:
                eigenvalues = np.diag(basis[d].T @ covariance[d] @ basis[d])
                order = np.argsort(-eigenvalues)
                v = np.take(v, order, axis=d)
                basis[d] = np.linalg.qr(covariance[d] @ basis[d][:, order])[0]
    return w


def test_seven_steps_equal_numpy():
    config = fdl.Partial(
        soap,
        b1=B1,
        b2=B2,
        weight_decay=DECAY,
        precondition_frequency=FREQUENCY,
        max_precond_dim=MAX_DIM,
    )
    specs = {name: WeightSpec(shape, jnp.float32) for name, shape in SHAPES.items()}
    learner = Learner(fdl.build(config), schedule)
    params = tree(0)
    bound = learner.bind(specs)
    opt_states = bound.init(params)
    update = jax.jit(lambda g, o, p: bound.update(g, o, p, jnp.float32(1))[:2])
    grads = [tree(10 + i) for i in range(7)]
    for grad in grads:
        params, opt_states = update(grad, opt_states, params)
    for name, start in tree(0).items():
        expected = numpy_soap(start, [g[name] for g in grads])
        np.testing.assert_allclose(params[name], expected, atol=2e-5, err_msg=name)
    state = opt_states["slots"]["unstacked"][0]
    for basis in jax.tree.leaves(state.bases):
        if len(basis) > 1:
            np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-6)


def test_slots_are_two_of_the_weights_shape_and_two_squares_per_dim():
    state = scale_by_soap(max_precond_dim=MAX_DIM).init(tree(0))
    for slots in (state.covariances, state.bases):
        assert jax.tree.map(jnp.shape, slots) == {
            "square": ((5, 5), (5, 5)),
            "wide": ((5, 5), (1, 1)),
            "heads": ((3, 3), (4, 4), (5, 5)),
            "bias": (),
            "row": ((1, 1), (1, 1)),
        }
    assert jax.tree.map(jnp.shape, state.mu) == jax.tree.map(jnp.shape, state.nu) == SHAPES


def decompositions(jaxpr, *, in_cond=False):
    """Yields, for each eigh and QR that a jaxpr has, whether it is inside a cond."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("eigh", "qr"):
            yield in_cond
        is_cond = in_cond or eqn.primitive.name == "cond"
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from decompositions(getattr(inner, "jaxpr", inner), in_cond=is_cond)


@pytest.mark.parametrize("num_stacks", [0, 1, 2])
def test_matrices_are_decomposed_only_when_due_in_a_stack_too(num_stacks):
    optimizer = scale_by_soap()
    init, update = optimizer.init, optimizer.update
    for _ in range(num_stacks):
        init, update = jax.vmap(init), jax.vmap(update)
    grads = {"w": jnp.ones((3,) * num_stacks + (5, 7))}
    actual = list(decompositions(jax.make_jaxpr(update)(grads, init(grads)).jaxpr))
    assert len(actual) == 6 and all(actual)


@pytest.mark.slow
def test_a_regression_on_correlated_inputs_is_solved_faster_than_by_adam():
    rng = np.random.default_rng(3)
    rotation = np.linalg.qr(rng.normal(size=(13, 13)))[0]
    mixing = jnp.asarray(np.geomspace(1.0, 0.03, 13)[:, None] * rotation.T)
    expected = jnp.ones((13, 5))

    def mean_loss(w):
        return 0.5 * jnp.mean((mixing @ (w - expected)) ** 2)

    def grad(w, key):
        inputs = jax.random.normal(key, (64, 13)) @ mixing
        return inputs.T @ (inputs @ (w - expected)) / 64

    def best(make):
        def final(rate):
            optimizer, start = make(optax.cosine_decay_schedule(rate, 200)), jnp.zeros((13, 5))

            def step(carry, key):
                w, state = carry
                updates, state = optimizer.update(grad(w, key), state, w)
                return (optax.apply_updates(w, updates), state), None

            keys = jax.random.split(jax.random.key(0), 200)
            return mean_loss(jax.lax.scan(step, (start, optimizer.init(start)), keys)[0][0])

        final = jax.jit(final)
        return min(float(final(rate)) for rate in (0.01, 0.03, 0.1, 0.3))

    of_soap, of_adam = best(functools.partial(soap, weight_decay=0.0)), best(optax.adam)
    assert of_soap < 0.2 * of_adam, (of_soap, of_adam)


# Gradients lie along few of the dims' directions; some rows never have one, others late.
LOW_RANK = {"tall": (29, 13), "tokens": (13, 5), "heads": (7, 3, 5)}


def low_rank_grads(i, noise=0.0):
    grads = tree(20 + i, LOW_RANK)
    for name, g in grads.items():
        g[3] = 0.0
        if i < 4 and name != "heads":
            g[5:7] = 0.0
        g *= 1.0 + noise * np.random.default_rng(i).normal(size=g.shape)
        grads[name] = np.float32(g)
    return grads


@pytest.mark.slow
def test_what_rounding_does_to_a_gradient_does_not_show_in_the_weights():
    """Else each mesh, which adds up in another order, would train other weights."""
    optimizer = soap(0.1, weight_decay=0.0, precondition_frequency=2)
    update = jax.jit(optimizer.update)
    ends = []
    for noise in (0.0, 1e-7):
        params = tree(0, LOW_RANK)
        state = optimizer.init(params)
        for i in range(7):
            updates, state = update(low_rank_grads(i, noise), state, params)
            params = optax.apply_updates(params, updates)
        ends.append(params)
    for name, start in tree(0, LOW_RANK).items():
        np.testing.assert_allclose(ends[0][name], ends[1][name], atol=1e-3, err_msg=name)
        moved = np.abs(ends[0][name] - start).max(axis=tuple(range(1, start.ndim)))
        assert np.delete(moved, 3).min() > 0.05, name
        if name == "heads":  # Where all other directions have a gradient, the row stays.
            assert moved[3] < 1e-5


def test_bfloat16_weights_and_zero_gradients_stay_finite():
    optimizer = soap(0.1, weight_decay=0.0, precondition_frequency=1)
    params = {"w": jnp.ones((5, 3), jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(3):
        updates, state = update(jax.tree.map(jnp.zeros_like, params), state, params)
        assert all(x.dtype == jnp.bfloat16 and not x.any() for x in updates.values())
    slots = [x for x in jax.tree.leaves(state) if x.ndim]
    assert all(x.dtype == jnp.float32 and jnp.isfinite(x).all() for x in slots)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"b1": 1.0}, r"soap.*b1.*1\.0.*\[0, 1\)"),
        ({"b2": -0.1}, r"soap.*b2.*-0\.1"),
        ({"eps": -1.0}, r"soap.*eps.*-1\.0"),
        ({"precondition_frequency": 0}, "soap.*precondition_frequency.*0"),
        ({"max_precond_dim": 0.5}, r"soap.*max_precond_dim.*0\.5"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        soap(0.1, **settings)
