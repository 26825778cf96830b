"""Where numbers stop being finite: through loops, branches, calls and keys, of any program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from praxis_tools.nan_finder.origins import Origin, OriginSearch


@jax.custom_vjp
def inverse_in_the_backward_pass(x):
    return x


inverse_in_the_backward_pass.defvjp(lambda x: (x, x), lambda x, g: (g / x,))


def program(faults, key):
    """Returns one number per fault, each of which is harmless at 1 and bad at 0."""
    in_while, in_branch, in_nest, in_key, in_bfloat16, in_gradient = faults

    def turn(state):
        index, total, key = state
        key, used = jax.random.split(key)
        x = jnp.where(index == 4, in_while, 1.0)
        return index + 1, total + jnp.log(x) + 0 * jax.random.uniform(used), key

    _, from_while, _ = lax.while_loop(lambda state: state[0] < 7, turn, (0, 0.0, key))

    from_branch = lax.cond(in_branch < 1, lambda x: 1 / x, lambda x: x, in_branch)

    def outer(total, i):
        def inner(total, j):
            x = jnp.where((i == 1) & (j == 2), in_nest, 1.0)
            return total + lax.rsqrt(x), x

        total, xs = lax.scan(inner, total, jnp.arange(5), reverse=True)
        return total, xs.sum()

    from_nest, _ = lax.scan(outer, 0.0, jnp.arange(3))

    def draw(key, _):
        key, used = jax.random.split(key)
        return key, jax.random.uniform(used, (2,))

    _, drawn = lax.scan(draw, key, None, length=3)
    from_key = jnp.sum(drawn / in_key)

    big = jnp.bfloat16(3e38) * (2 - in_bfloat16).astype(jnp.bfloat16)
    from_bfloat16 = jax.checkpoint(lambda x: x.astype(jnp.float32))(big)

    from_gradient = jax.grad(lambda x: jax.jit(inverse_in_the_backward_pass)(x))(in_gradient)
    return from_while, from_branch, from_nest, from_key, from_bfloat16, from_gradient


@pytest.fixture(scope="module")
def search():
    args = jnp.ones(6), jax.random.key(0)
    return OriginSearch(jax.jit(program).trace(*args).jaxpr, range(6))


def test_nothing_is_found_where_all_is_finite(search):
    assert search((jnp.ones(6), jax.random.key(0)), only_nan=False) == [None] * 6


@pytest.mark.parametrize(
    ("fault", "operation", "iterations"),
    [
        (0, "log", (4,)),
        (1, "div", ()),
        (2, "rsqrt", (1, 2)),
        (3, "div", ()),
        (4, "mul", ()),
        (5, "div", ()),
    ],
    ids=["while", "branch", "nested scans", "keys", "bfloat16", "custom gradient"],
)
def test_an_infinity_is_found_where_it_was_made(search, fault, operation, iterations):
    args = jnp.ones(6).at[fault].set(0.0), jax.random.key(0)
    actual = search(args, only_nan=False)
    assert [origin is not None for origin in actual] == [i == fault for i in range(6)]
    origin = actual[fault]
    assert (origin.operation.primitive, origin.iterations) == (operation, iterations)
    assert search(args, only_nan=True) == [None] * 6


def test_what_was_not_finite_at_the_start_is_an_argument(search):
    args = jnp.ones(6).at[2].set(np.nan), jax.random.key(0)
    actual = search(args, only_nan=True)
    # The faults are elements of one array: only what really depends on the bad one is bad.
    assert [origin is not None for origin in actual] == [False, False, True, False, False, False]
    assert actual[2].operation.argument == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_outputs_of_several_devices_are_traced_to_the_one_that_made_them(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def on_a_device(x):
        logs = jnp.log(x)
        masked = jnp.where(x < 9, logs, -jnp.inf)
        total, _ = lax.scan(lambda total, x: (total + x, None), masked[0] * 0, masked)
        total = lax.cond(total > 1e9, lambda total: 2 * total, lambda total: total, total)
        return lax.psum(total, "data")

    mapped = jax.shard_map(
        on_a_device,
        mesh=mesh,
        in_specs=spec,
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=check_vma,
    )
    x = jnp.ones(4)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        search = OriginSearch(jax.jit(mapped).trace(x).jaxpr, [0])
    placed = jax.sharding.NamedSharding(mesh, spec)

    def found(x):
        return search([jax.device_put(x, placed)], only_nan=False)[0]

    assert found(x) is None
    assert found(x.at[2].set(-1.0)).operation.primitive == "log"
    assert found(x.at[2].set(9.0)) == Origin(None)  # The constant.
    summed = found(jnp.full(4, 1.0).at[1].set(jnp.inf))
    assert summed.operation.argument == 0


def test_a_row_that_is_finite_has_nothing_of_the_other_rows():
    def made(x):
        _, ys = lax.scan(lambda total, x: (total, jnp.log(x)), 0.0, x)

        def add(total, row):
            index, y = row
            return total + jnp.where(index == 0, 1 / y, 0.0), None

        return lax.scan(add, 0.0, (jnp.arange(3), ys))[0]

    x = jnp.array([1.0, -1.0, 7.0])  # Logarithms: 0, NaN, finite.
    (actual,) = OriginSearch(jax.jit(made).trace(x).jaxpr, [0])([x], only_nan=False)
    assert (actual.operation.primitive, actual.iterations) == ("div", (0,))
