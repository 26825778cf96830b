"""bfloat16 slots: the rounding against its probabilities by hand, training against float32."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite import ConfigError
from praxis_lite.optimizers import low_precision_slots
from praxis_lite.optimizers.low_precision_slots import round_stochastically

BF16 = jnp.dtype("bfloat16")
rounded = jax.jit(round_stochastically)


def neighbors(x):
    """Returns float64 bfloat16 numbers next to float32 x, nearer to 0 first, by their bits."""
    bits = np.float32(x).view(np.uint32)
    inner = bits & np.uint32(0xFFFF0000)
    return [float(b.view(np.float32)) for b in (inner, inner + np.uint32(0x10000))]


@pytest.mark.parametrize("x", [
    1.001, -1.001, 1.0 + 2.0**-9, 3.14159, -1e-20, 123456.7, 1.9999, 1e38,
    1.2e-38,  # Rounds to the least normal number, or to a denormal one.
    -3.3e-40,  # Denormal.
])  # fmt: skip
def test_a_number_goes_up_as_often_as_it_is_near(x):
    x, num_draws = np.float32(x), 40_000
    inner, outer = neighbors(x)
    share = (float(x) - inner) / (outer - inner)
    drawn = rounded(jnp.full((num_draws,), x), jax.random.key(3))
    # As integers, for XLA's float comparisons take denormals for 0.
    bits = np.asarray(drawn).view(np.uint16)
    inner_bits = np.float32(x).view(np.uint32) >> 16
    assert set(np.unique(bits)) <= {inner_bits, inner_bits + 1}
    actual = np.mean(bits == inner_bits + 1)
    assert abs(actual - share) < 4.5 * np.sqrt(share * (1 - share) / num_draws) + 1e-9
    if 0.1 < share < 0.9:
        mean = np.asarray(drawn).astype(np.float64).mean()
        assert abs(mean - x) < abs(outer - inner) * 4.5 * 0.5 / np.sqrt(num_draws)


def test_what_bfloat16_has_stays_as_it_is():
    # Every bfloat16 number there is, but for NaN.
    every = np.arange(2**16, dtype=np.uint16)
    every = every[(every & 0x7FFF) <= 0x7F80]
    as_float32 = (every.astype(np.uint32) << 16).view(np.float32)
    assert np.isinf(as_float32).sum() == 2
    for seed in range(3):
        actual = rounded(jnp.asarray(as_float32), jax.random.key(seed))
        np.testing.assert_array_equal(np.asarray(actual).view(np.uint16), every)


def test_nan_stays_nan():
    bits = np.array([0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001], np.uint32)
    for seed in range(5):
        assert np.isnan(np.float32(rounded(bits.view(np.float32), jax.random.key(seed)))).all()


ADAMW = functools.partial(optax.adamw, b2=0.999)
PARAMS = {"blocks": {"w": (5, 7)}, "head": {"b": (7,), "scale": (), "w": (7, 13)}}


def tree_of(shapes, seed=0, stack=()):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=stack + shape), jnp.float32),
        shapes, is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_slots_of_rank_one_and_more_take_half_the_bytes():
    params = tree_of(PARAMS)
    low = jax.eval_shape(low_precision_slots(0.1, optimizer=ADAMW).init, params)
    full = jax.eval_shape(ADAMW(0.1).init, params)
    num_weights = 5 * 7 + 7 + 7 * 13
    # Two moments; those of the scalar, and the counts (Adam's and ours), as they were.
    assert num_bytes(full) == 2 * 4 * (num_weights + 1) + 4
    assert num_bytes(low) == 2 * 2 * num_weights + 2 * 4 + 2 * 4
    assert jax.tree.structure(low.slots) == jax.tree.structure(full)
    assert low.slots[0].nu["head"]["w"].dtype == BF16
    assert low.slots[0].nu["head"]["scale"].dtype == jnp.float32
    assert low.slots[0].count.dtype == jnp.int32


def test_an_optimizers_own_bfloat16_slots_are_its_own():
    optimizer = functools.partial(optax.adamw, mu_dtype="bfloat16")
    params, grads = tree_of(PARAMS), tree_of(PARAMS, 1)

    @jax.jit
    def after_two_steps(params, grads):
        states = []
        for tx in (low_precision_slots(0.1, optimizer=optimizer), optimizer(0.1)):
            _, state = tx.update(grads, tx.init(params), params)
            states.append(tx.update(grads, state, params)[1])
        return states

    actual, expected = after_two_steps(params, grads)
    # Not made float32 between the steps, which would be more precise than what was asked for.
    jax.tree.map(np.testing.assert_array_equal, actual.slots[0].mu, expected[0].mu)


@functools.cache
def two_steps():
    """Returns a jitted function of params and grads to the states after one step and two."""
    optimizer = low_precision_slots(0.1, optimizer=ADAMW)

    def steps(params, grads):
        updates, first = optimizer.update(grads, optimizer.init(params), params)
        params = optax.apply_updates(params, updates)
        return first, optimizer.update(grads, first, params)[1]

    return jax.jit(steps)


def test_a_step_is_the_float32_step_and_its_slots_rounded_to_a_neighbor():
    params, grads = tree_of(PARAMS), tree_of(PARAMS, 1)
    first, second = two_steps()(params, grads)
    assert (int(first.count), int(second.count)) == (1, 2)
    nu = first.slots[0].nu
    for leaf, grad in zip(jax.tree.leaves(nu), jax.tree.leaves(grads), strict=True):
        expected = np.float32(0.001) * np.square(np.asarray(grad))
        assert np.all(np.abs(np.float32(leaf) - expected) <= expected / 128)
    # Half of them up: neither all to the nearest nor all cut off.
    exact = 0.001 * np.square(np.asarray(grads["head"]["w"], np.float64))
    assert 20 < np.sum(np.float64(nu["head"]["w"]) > exact) < 71  # Of 91.


def test_the_same_run_rounds_the_same_and_each_step_and_slot_its_own_way():
    params = {name: jnp.zeros((8, 12)) for name in ("a", "b")}
    grads = jax.tree.map(lambda w: jnp.full_like(w, 0.7), params)
    runs = [two_steps()(params, grads) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *runs)

    def went_up(slot):
        # All elements of a slot are equal before they are rounded for the first time.
        return np.float32(slot) > np.float32(slot).mean()

    first, second = (state.slots[0] for state in runs[0])
    ups = {"a": went_up(first.nu["a"]), "b": went_up(first.nu["b"]), "mu": went_up(first.mu["a"]),
           "later": went_up(second.nu["a"])}  # fmt: skip
    assert all(5 < up.sum() < 91 for up in ups.values())
    for item, other in itertools.combinations(ups, 2):
        assert (ups[item] != ups[other]).sum() > 5, (item, other)


def test_a_mesh_rounds_as_one_device_does(mesh_of):
    params, grads = (tree_of({"a": (8, 12), "b": (8, 12)}, seed) for seed in (0, 1))
    sharding = NamedSharding(mesh_of(1, 4, 2), PartitionSpec("data", "mdl"))
    expected = two_steps()(params, grads)
    actual = two_steps()(*jax.device_put((params, grads), sharding))
    assert len(actual[1].slots[0].nu["a"].sharding.device_set) == 8
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
def test_a_stack_is_rounded_layer_by_layer():
    optimizer = low_precision_slots(0.1, optimizer=ADAMW)
    params, grads = tree_of(PARAMS, 0, (3,)), tree_of(PARAMS, 1, (3,))
    state = jax.jit(jax.vmap(optimizer.init))(params)
    assert state.slots[0].nu["head"]["w"].dtype == BF16
    assert state.slots[0].nu["head"]["scale"].dtype == jnp.float32  # Of rank 0 in its layer.
    _, actual = jax.jit(jax.vmap(optimizer.update))(grads, state, params)
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: x[i], (params, grads))
        expected, _ = two_steps()(*layer)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), actual, expected)


def test_rounded_to_the_nearest_adamw_stalls_and_rounded_at_random_it_follows_float32():
    full = ADAMW(0.01)
    low = low_precision_slots(0.01, optimizer=ADAMW)

    def cast(state, dtype):
        return jax.tree.map(lambda x: x.astype(dtype) if x.ndim else x, state)

    def update_nearest(grads, state, params):
        updates, state = full.update(grads, cast(state, jnp.float32), params)
        return updates, cast(state, BF16)

    target = tree_of({"w": (17, 13)}, 5)
    params = jax.tree.map(jnp.zeros_like, target)

    @jax.jit
    def train(states):
        def step(carry, key):
            # A noisy quadratic: the gradients shrink to their noise, a hundredth when squared.
            noise = 0.1 * jax.random.normal(key, (17, 13))
            trained = []
            for update, (params, state) in zip(
                (full.update, update_nearest, low.update), carry, strict=True
            ):
                grads = jax.tree.map(lambda w, t: w - t + noise, params, target)
                updates, state = update(grads, state, params)
                trained.append((optax.apply_updates(params, updates), state))
            return trained, None

        keys = jax.random.split(jax.random.key(1), 1500)
        return jax.lax.scan(step, [(params, state) for state in states], keys)[0]

    trained = train([full.init(params), cast(full.init(params), BF16), low.init(params)])
    w, w_nearest, w_low = (np.float64(params["w"]) for params, _ in trained)
    states = trained[0][1], trained[1][1], trained[2][1].slots
    nu, nu_nearest, nu_low = (np.float64(state[0].nu["w"]) for state in states)
    assert nu_nearest.mean() > 2 * nu.mean()
    assert abs(nu_low.mean() / nu.mean() - 1) < 0.02  # Unbiased, and each not far off.
    assert np.abs(nu_low / nu - 1).mean() < 0.1
    assert np.abs(w_low - w).mean() < 0.2 * np.abs(w_nearest - w).mean()


def test_another_dtype_is_refused():
    with pytest.raises(ConfigError, match="'float16'.*'bfloat16'"):
        low_precision_slots(0.1, optimizer=ADAMW, dtype="float16")
