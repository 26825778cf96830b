"""Weights in 4 bits: their numbers by hand, their bytes, their products and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.layers.whole_model.four_bit_weights import NF4, four_bit_packs, to_4_bits
from praxis_lite.layers.whole_model.packed_weights import PackedModel, check_frozen
from tests.support.marks import slow_but


def draw(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_hand(w, qtype, block_size):
    """Returns a matrix [D, F] with blocks of D rounded to the nearest number of the type."""
    table = np.array(NF4 if qtype == "nf4" else np.arange(-7, 8) / 7, np.float64)
    result = np.zeros_like(w)
    for start in range(0, len(w), block_size):
        block = w[start : start + block_size]
        scale = np.abs(block).max(axis=0)
        nearest = np.abs((block / scale)[..., None] - table).argmin(axis=-1)
        result[start : start + block_size] = table[nearest] * scale
    return result


@pytest.mark.parametrize(("qtype", "block_size"), [("nf4", 20), ("int4", 7)])
def test_the_numbers_are_those_by_hand_and_two_are_in_a_byte(qtype, block_size):
    w = draw((2, 3, 131, 5))  # Two stacked dims in front, blocks that do not divide.

    @jax.jit
    def run(w):
        actual = to_4_bits(w, qtype, block_size, -2)
        return actual, actual.astype(jnp.float32)

    actual, values = run(w)
    expected = [[by_hand(x, qtype, block_size) for x in row] for row in w]
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-7)
    num_blocks = -(-131 // block_size)
    assert actual.codes.dtype == jnp.uint8
    assert actual.codes.shape == (2, 3, num_blocks * -(-block_size // 2), 5)
    assert actual.scale.shape == (2, 3, num_blocks, 5)


def test_zeros_stay_zeros_and_the_layers_of_a_stack_are_those_apart():
    w = draw((3, 70, 5))
    w[1] = 0

    @jax.jit
    def run(w):
        stack = to_4_bits(w, "nf4", 64, -2)
        of_stack = [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(3)]
        apart = [to_4_bits(w[i], "nf4", 64, -2) for i in range(3)]
        return [[layer.astype(jnp.float32) for layer in items] for items in (of_stack, apart)]

    of_stack, apart = run(w)
    assert not of_stack[1].any()
    jax.tree.map(np.testing.assert_array_equal, of_stack, apart)


LAYERS = {
    "linear": (functools.partial(layers.Linear, 130, 7), (3, 130)),
    "query": (functools.partial(layers.AttentionProjection, 70, 3, 4), (2, 3, 70)),
    "query_flat": (
        functools.partial(
            layers.AttentionProjection, 70, 3, 4, attention_combine_dims=True, use_bias=False
        ),
        (2, 3, 70),
    ),
    "post": (
        functools.partial(layers.AttentionProjection, 5, 3, 6, is_output_projection=True),
        (2, 3, 6),
    ),
}


@pytest.mark.parametrize("name", slow_but({"linear", "post"}, LAYERS))
def test_a_layer_multiplies_by_its_weight_as_kept_and_keeps_no_floats_for_the_backward_pass(name):
    build, shape = LAYERS[name]
    model = PackedModel(build, functools.partial(four_bit_packs, qtype="nf4"))
    kept, whole = (jax.jit(x.init)(jax.random.key(0)) for x in (model, NnxModel(build)))
    assert jax.tree.structure(model.weight_specs(), is_leaf=lambda x: hasattr(x, "shape")) == (
        jax.tree.structure(kept)
    )
    # The same model with the rounded weight in float32.
    form = model.packed_forms["params/w"]
    rounded = jax.jit(lambda w: form.from_parts(w).astype(jnp.float32))(kept["params"]["w"])
    whole["params"]["w"] = rounded
    x = jnp.asarray(draw(shape))

    def of(model, mdl_vars):
        return jax.jit(lambda mdl_vars: jax.vjp(lambda x: model.module(mdl_vars)(x), x))(mdl_vars)

    (actual, backward), (expected, back_whole) = of(model, kept), of(NnxModel(build), whole)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    pulled = jax.jit(lambda backward, y: backward(y))
    (dx,), (dx_whole,) = pulled(backward, actual), pulled(back_whole, actual)
    np.testing.assert_allclose(dx, dx_whole, rtol=1e-4, atol=1e-4)
    kept_for = [leaf for leaf in jax.tree.leaves(backward) if leaf.dtype == jnp.float32]
    assert all(leaf.size < rounded.size for leaf in kept_for)
    assert any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(backward))


def test_what_makes_logits_stays_and_codes_cannot_be_trained():
    build = functools.partial(layers.FullSoftmax, 37, 13)
    assert PackedModel(build, functools.partial(four_bit_packs, qtype="nf4")).packed_forms == {}
    model = PackedModel(LAYERS["linear"][0], functools.partial(four_bit_packs, qtype="nf4"))
    with pytest.raises(ConfigError, match="w/codes, w/scale would be trained.*uint8.*inclusion"):
        check_frozen(model, Learner(optax.sgd, 0.1))


def test_a_kept_model_is_a_module_with_stored_weights():
    model = PackedModel(LAYERS["linear"][0], functools.partial(four_bit_packs, qtype="int4"))
    assert isinstance(model.abstract_module(), nnx.Module)
    assert model.abstract_module().w.shape == (130, 7)
    assert model.init(jax.random.key(0))["params"]["w"]["codes"].shape == (96, 7)
