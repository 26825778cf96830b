"""What this design rests on in JAX, each as small as it can be: what fails here has moved.

Meshes have Auto axes because Explicit ones refuse what does not divide, and state is padded because
no array outside a program may be split unevenly. Where a refusal here is none any more, these may
go; where something that works no longer does, they must change.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SEVEN = np.arange(7, dtype=np.float32)


def mesh_of(axis_type):
    return jax.make_mesh((4,), ("data",), axis_types=(axis_type,))


def jitted(function, **settings):
    """Returns `function` of seven numbers, run on an Explicit mesh of four devices."""
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        return jax.jit(function, **settings)(SEVEN)


def test_explicit_axes_refuse_an_uneven_slice():
    with pytest.raises(Exception, match="slicing on sharded dims where out dim .7."):
        jitted(lambda x: jax.sharding.reshard(jnp.pad(x, (0, 1)), P("data"))[:7])


def test_explicit_axes_refuse_an_uneven_reshard():
    with pytest.raises(ValueError, match="does not evenly divide the dimension size 7"):
        jitted(lambda x: jax.sharding.reshard(x, P("data")))


def test_device_put_refuses_an_uneven_split():
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        with pytest.raises(ValueError, match="4 times, but .* dimension size (is )?7"):
            jax.device_put(SEVEN, NamedSharding(mesh_of(axis_type), P("data")))


def test_jit_refuses_an_uneven_output():
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        split = NamedSharding(mesh_of(axis_type), P("data"))
        with pytest.raises(ValueError, match="4 times, but .* dimension size (is )?7"):
            jax.jit(lambda x: 2 * x, out_shardings=split)(SEVEN)


def test_auto_axes_refuse_unreduced():
    unreduced = P(unreduced={"data"})
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        for function in (
            lambda x: jax.lax.with_sharding_constraint(x, unreduced),
            lambda x: jnp.einsum("a,a->", x, x, out_sharding=unreduced),
        ):
            with pytest.raises(ValueError, match="can only refer to mesh axes .* type `Explicit`"):
                jax.jit(function)(np.ones(8))


def test_auto_axes_are_not_deprecated():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = mesh_of(AxisType.Auto)
        with jax.set_mesh(mesh):
            jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data")))(np.ones(8))


def test_an_uneven_constraint_inside_jit_is_honoured():
    with jax.set_mesh(mesh_of(AxisType.Auto)):

        def doubled(x):
            return jax.lax.with_sharding_constraint(2 * x, P("data"))[:7]

        actual = jax.jit(doubled)(SEVEN)
        compiled = jax.jit(lambda x: jnp.cos(jax.lax.with_sharding_constraint(x, P("data"))))
        text = compiled.lower(SEVEN).compile().as_text()
    np.testing.assert_array_equal(actual, 2 * SEVEN)
    assert "f32[2]" in text  # Two numbers a device: eight slots for seven.


@functools.cache
def losses_where_data_is(axis_type):
    """Returns three losses of a bare language model whose dims no axis divides but the rows."""
    rng = np.random.default_rng(0)
    names = {"table": (37, 13), "up": (13, 29), "down": (29, 13), "out": (13, 37)}
    params = {
        name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in names.items()
    }
    ids = rng.integers(0, 37, (8, 8))
    mesh = jax.make_mesh((4, 2), ("data", "mdl"), axis_types=(axis_type, AxisType.Auto))

    def loss(params, one_hot):
        # mdl splits neither 13 nor 29 nor 37 evenly.
        splits = {"table": ("mdl", None), "up": (None, "mdl"), "down": ("mdl", None)}
        table, up, down, out = (
            jax.lax.with_sharding_constraint(params[name], P(*splits.get(name, (None, "mdl"))))
            for name in names
        )
        x = one_hot[:, :-1] @ table
        x = x + jnp.tanh(x @ up) @ down
        logprobs = jax.nn.log_softmax(x @ out)
        return -jnp.mean(jnp.sum(logprobs * one_hot[:, 1:], axis=-1))

    def step(params, one_hot):
        value, grads = jax.value_and_grad(loss)(params, one_hot)
        return jax.tree.map(lambda w, g: w - 0.5 * g, params, grads), value

    losses = []
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.eye(37, dtype=np.float32)[ids], NamedSharding(mesh, P("data")))
        step = jax.jit(step)
        for _ in range(3):
            params, value = step(params, rows)
            losses.append(float(value))
    return losses


@pytest.mark.slow
def test_an_uneven_language_model_has_the_same_losses_where_data_is_explicit_and_mdl_auto():
    expected = losses_where_data_is(AxisType.Auto)
    assert expected[2] < expected[0] - 0.1
    np.testing.assert_allclose(losses_where_data_is(AxisType.Explicit), expected, rtol=1e-5)
