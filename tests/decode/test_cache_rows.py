"""Rows of caches of any layout, against NumPy indexing."""

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.decode.cache_rows import batch_dims, put_rows, repeat_rows, take_hyps

L, S, D = 3, 5, 7


def init_cache(num_rows, length):
    """Layers first, batch first, batch last; one that all rows share; none for a layer."""
    return {
        "scanned": jnp.zeros((L, num_rows, length, D)),
        "plain": jnp.zeros((num_rows, D)),
        "last": jnp.zeros((D, num_rows), jnp.int32),
        "shared": jnp.zeros((2, 2)),
        "none": None,
    }


def filled(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    cache = init_cache(num_rows, S)
    return jax.tree.map(lambda x: rng.integers(0, 99, x.shape).astype(x.dtype), cache)


DIMS = {"scanned": 1, "plain": 0, "last": 1, "shared": -1, "none": None}
ROWS = {
    "scanned": lambda x, rows: x[:, rows],
    "plain": lambda x, rows: x[rows],
    "last": lambda x, rows: x[:, rows],
    "shared": lambda x, rows: x,
    "none": lambda x, rows: x,
}


def assert_rows(actual, cache, rows):
    for name, take in ROWS.items():
        np.testing.assert_array_equal(actual[name], take(cache[name], rows), name)


def test_the_dim_of_the_batch_is_found_and_none_where_rows_share():
    assert batch_dims(init_cache) == DIMS


def test_repeated_rows_stand_beside_each_other():
    actual = jax.jit(lambda cache: repeat_rows(cache, DIMS, 3))(filled(4))
    assert_rows(actual, filled(4), np.repeat(np.arange(4), 3))


def test_hypotheses_are_taken_within_their_row():
    hyps = np.asarray([[2, 0, 0], [1, 1, 2]])
    actual = jax.jit(lambda cache, hyps: take_hyps(cache, DIMS, hyps))(filled(6), hyps)
    assert_rows(actual, filled(6), (hyps + np.asarray([[0], [3]])).reshape(-1))


def test_rows_are_put_and_the_others_stay():
    cache, new = filled(4), filled(2, seed=1)
    run = jax.jit(lambda cache, new, rows: put_rows(cache, DIMS, new, rows))
    actual = run(cache, new, np.asarray([2, 0]))
    for name in ("scanned", "plain", "last"):
        for row, (source, number) in enumerate([(new, 1), (cache, 1), (new, 0), (cache, 3)]):
            np.testing.assert_array_equal(
                ROWS[name](actual[name], row), ROWS[name](source[name], number)
            )
    np.testing.assert_array_equal(actual["shared"], new["shared"])
