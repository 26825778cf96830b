"""Flops of models as they are written: by hand, and as XLA's compiled programs have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.tools.explain import hlo
from praxis_lite.tools.utilization.model_flops import model_flops


def flops(function, *shapes):
    return model_flops(jax.make_jaxpr(function)(*map(jnp.ones, shapes)))


def compiled_flops(function, *shapes):
    return hlo.flops(jax.jit(function).lower(*map(jnp.ones, shapes)).compile())


def test_a_matmul_with_batch_dims_counts_two_per_multiplication():
    actual = flops(lambda x, w: jnp.einsum("btd,bdf->btf", x, w), (3, 7, 5), (3, 5, 11))
    assert (actual.flops, actual.at_least) == (2 * 3 * 7 * 5 * 11, False)


def test_loops_count_as_often_as_they_run_and_branches_as_the_costliest():
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=13)[0]

    def branches(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    def looped(x, w):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)

    each = 2 * 3 * 7 * 7
    assert flops(scanned, (3, 7), (7, 7)).flops == 13 * each
    assert flops(branches, (3, 7), (7, 7)).flops == 2 * each
    actual = flops(looped, (3, 7), (7, 7))
    assert (actual.flops, actual.at_least) == (each, True)
    within = flops(jax.jit(lambda x, w: jax.lax.map(lambda x: looped(x, w), x)), (5, 3, 7), (7, 7))
    assert (within.flops, within.at_least) == (5 * each, True)


def test_what_is_computed_again_counts_once():
    def loss(w, x, wrap):
        layer = wrap(lambda x, w: jnp.tanh(x @ w))
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()

    # A product forward, two backward: the first layer's too, though x is no variable.
    expected = 3 * 5 * 2 * 3 * 7 * 7
    for wrap in (lambda layer: layer, jax.checkpoint):
        gradient = jax.grad(lambda w, x, wrap=wrap: loss(w, x, wrap))
        assert flops(gradient, (5, 7, 7), (3, 7)).flops == expected
    assert compiled_flops(gradient, (5, 7, 7), (3, 7)) == expected + 5 * 2 * 3 * 7 * 7


def test_groups_of_rows_count_each_row_once():
    sizes = np.array([2, 4, 7])

    def loss(x, w):
        return jax.lax.ragged_dot(x, w, sizes).sum()

    assert flops(loss, (13, 5), (3, 5, 11)).flops == 2 * 13 * 5 * 11
    assert flops(jax.grad(loss, (0, 1)), (13, 5), (3, 5, 11)).flops == 3 * 2 * 13 * 5 * 11


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_count_as_in_the_compiled_program(stride):
    def loss(x, w):
        return jnp.square(
            jax.lax.conv_general_dilated(
                x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        ).sum()

    shapes = (2, 9, 11, 3), (3, 3, 3, 5)
    for function in (loss, jax.grad(loss, (0, 1))):
        assert flops(function, *shapes).flops == compiled_flops(function, *shapes)


def test_each_device_of_a_shard_map_counts_its_part():
    mesh = jax.make_mesh((4, 2), ("data", "mdl"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P(None, "mdl")),
        out_specs=P("data", "mdl"),
    )
    assert flops(split, (8, 7), (7, 6)).flops == 2 * 8 * 7 * 6
    partly = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"),
        axis_names={"data"},
    )
    assert flops(jax.jit(partly), (8, 7), (7, 6)).flops == 2 * 8 * 7 * 6
