"""Jaxprs inside jaxprs are visited, rewritten and evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.extend.core import primitives

from praxis_lite.core.jaxprs import (
    all_eqns,
    evaluate_jaxpr,
    expand_high_level,
    is_widening_cast,
    rewrite_jaxpr,
)


def nested(x):
    """Returns five sines, one in each kind of place; of them the scan runs one three times."""
    called = jax.jit(jnp.sin)
    x = jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=3)[0]
    x = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    x = jax.lax.fori_loop(0, x.shape[0] * 2, lambda i, x: jnp.sin(x), x)
    x = jax.checkpoint(jnp.sin)(x)
    return called(called(x)) + 0.5


X = np.linspace(0.1, 1.0, 7, dtype=np.float32)


def to_cosines(eqn):
    params = {"accuracy": None}
    is_sine = eqn.primitive is primitives.sin_p
    return [eqn.replace(primitive=primitives.cos_p, params=params) if is_sine else eqn]


def names(jaxpr):
    return [eqn.primitive.name for eqn in all_eqns(jaxpr.eqns)]


@pytest.fixture(params=[False, True], ids=["today", "next"])
def new_forms(request):
    """Sets the forms of remat and custom rules that JAX is going to make its own."""
    names = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
    before = {name: getattr(jax.config, name) for name in names if hasattr(jax.config, name)}
    for name in before:
        jax.config.update(name, request.param)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_rule_reaches_loops_branches_and_calls(new_forms):
    def cosines(x):
        for _ in range(3):
            x = jnp.cos(x)
        return jnp.cos(jnp.cos(jnp.cos(many(jnp.cos(x))))) + 0.5

    def many(x):
        for _ in range(2 * len(X)):
            x = jnp.cos(x)
        return x

    program = jax.make_jaxpr(nested)(X)
    assert names(program).count("sin") >= 5
    changed = rewrite_jaxpr(program, to_cosines)
    assert "sin" not in names(changed)
    np.testing.assert_allclose(core.jaxpr_as_fun(changed)(X)[0], cosines(X), rtol=1e-6)


def test_a_program_that_no_rule_changes_is_the_very_same():
    program = jax.make_jaxpr(nested)(X)
    assert rewrite_jaxpr(program, lambda eqn: [eqn]) is program


def test_a_program_that_is_called_twice_is_rewritten_once():
    program = jax.make_jaxpr(nested)(X)
    seen = [0, 0]
    for place, jaxpr in enumerate((program, rewrite_jaxpr(program, to_cosines))):
        eqns = [
            eqn for eqn in map(expand_high_level, jaxpr.eqns) if eqn.primitive is primitives.jit_p
        ]
        calls = [eqn.params["jaxpr"] for eqn in eqns]
        seen[place] = len({id(getattr(inner, "jaxpr", inner)) for inner in calls}), len(calls)
    assert seen[0] == seen[1]
    assert seen[0][0] < seen[0][1]


def test_values_of_a_users_own_go_where_a_programs_numbers_go():
    """Sets of the arguments that each result depends on."""

    def program(a, b, c):
        return a * b + 1.0, jnp.sin(c), jnp.asarray(2.0) + a * 0 + 3.0

    args = (2.0, 3.0, 5.0)
    traced = jax.make_jaxpr(program)(*args)
    depends = evaluate_jaxpr(
        traced,
        map(frozenset, "abc"),
        lambda eqn, reads: [frozenset().union(*reads)],
        lambda value, aval: frozenset(),
    )
    assert depends == [{"a", "b"}, {"c"}, {"a"}]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("bfloat16", "float32", True),
        ("float16", "bfloat16", False),
        ("float32", "bfloat16", False),
        ("int32", "float32", False),
    ],
)
def test_a_cast_widens_that_loses_no_number(old, new, expected):
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(new))(jnp.zeros(3, old)).eqns
    assert is_widening_cast(eqn) is expected
