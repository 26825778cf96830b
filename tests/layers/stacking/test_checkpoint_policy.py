"""Activations by their names: kept on the device, in the host's memory, or computed again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core.jaxprs import all_eqns, open_jaxpr
from praxis_lite.layers import (
    Pipeline,
    Repeat,
    StackedTransformer,
    Transformer,
    TransformerFeedForward,
    TransformerFeedForwardMoe,
)
from praxis_lite.layers.base import activation_names
from tests.support import offload_runs
from tests.support.marks import nightly_but, slow_or_nightly

MODEL, HIDDEN, HEADS, ROWS, LENGTH = 6, 11, 3, 4, 5
BLOCK = functools.partial(Transformer, MODEL, HIDDEN, HEADS)
EXPERTS = functools.partial(
    Transformer,
    MODEL,
    HIDDEN,
    HEADS,
    tr_fflayer_tpl=functools.partial(
        TransformerFeedForwardMoe, num_experts=2, gating_func="top_k", num_experts_per_token=1
    ),
)
X = (ROWS, LENGTH, MODEL)
HEADS_OF = (ROWS, LENGTH, HEADS, MODEL // HEADS)
# The policies of MaxText's published runs are made of these; theirs are decoder_layer_input,
# mlpwi_0 and mlpwi_1 (or mlpwi), mlpwo, where ours are iteration_input, ffn1 and ffn1_gate, ffn2.
SHAPES = {
    "iteration_input": X,
    "query_proj": HEADS_OF,
    "key_proj": HEADS_OF,
    "value_proj": HEADS_OF,
    "context": HEADS_OF,
    "out_proj": X,
    "ffn1": (ROWS, LENGTH, HIDDEN),
    "ffn1_gate": (ROWS, LENGTH, HIDDEN),
}


def gradient_of(make, policy, **settings):
    """Returns the program of a stack's gradients by its weights and inputs."""
    layer = nnx.eval_shape(lambda: make(checkpoint_policy=policy, rngs=nnx.Rngs(0), **settings))

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x)[0]))

    return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1), allow_int=True))(layer, jnp.ones(X))


def sent_to_host(jaxpr):
    """Returns the shapes of the arrays that a program copies to the host, sorted."""
    return sorted(
        eqn.invars[0].aval.shape
        for eqn in all_eqns(open_jaxpr(jaxpr).eqns)
        if eqn.primitive.name == "device_put" and "Host" in str(eqn.params["devices"])
    )


GATED = functools.partial(
    Transformer,
    MODEL,
    HIDDEN,
    HEADS,
    tr_fflayer_tpl=functools.partial(TransformerFeedForward, use_gated_activation=True),
)


@pytest.mark.parametrize(
    "names",
    slow_or_nightly(
        [("iteration_input",), tuple(SHAPES)],
        [("query_proj",), ("ffn1_gate",)],
        [*((name,) for name in SHAPES), tuple(SHAPES)],
    ),
    ids=str,
)
def test_just_the_activations_that_are_offloaded_go_to_the_host(names):
    make = functools.partial(Repeat, GATED, 2)
    policy = dict.fromkeys(names, "offload")
    actual = sent_to_host(gradient_of(make, policy))
    assert actual == sorted(SHAPES[name] for name in names)
    others = {name: ("device", "remat")[i % 2] for i, name in enumerate(SHAPES)}
    assert sent_to_host(gradient_of(make, others | policy)) == actual
    assert sent_to_host(gradient_of(make, others)) == []


def test_what_goes_to_the_host_has_its_dims_in_order_in_memory(monkeypatch):
    """Else XLA for TPUs may write one order and read another (`activation_names.named`)."""
    monkeypatch.setattr(activation_names, "compiled_platform", lambda: "tpu")
    policy = dict.fromkeys(SHAPES, "offload") | {"context": "device"}
    jaxpr = gradient_of(functools.partial(Repeat, GATED, 2), policy)
    orders = [
        (eqn.invars[0].aval.shape, eqn.params["layout"].major_to_minor)
        for eqn in all_eqns(open_jaxpr(jaxpr).eqns)
        if eqn.primitive.name == "layout_constraint"
    ]
    offloaded = {SHAPES[name] for name, place in policy.items() if place == "offload"}
    assert {shape for shape, _ in orders} == offloaded
    assert all(order == tuple(range(len(shape))) for shape, order in orders)
    kept = gradient_of(functools.partial(Repeat, GATED, 2), dict.fromkeys(SHAPES, "device"))
    assert "layout_constraint" not in str(kept)


@pytest.mark.parametrize("name", ["expert_ffn1", "expert_ffn2"])
def test_products_of_experts_have_names(name):
    (shape,) = sent_to_host(gradient_of(functools.partial(Repeat, EXPERTS, 2), {name: "offload"}))
    assert shape[-1] == {"expert_ffn1": HIDDEN, "expert_ffn2": MODEL}[name]


PIPELINE = functools.partial(Pipeline, BLOCK, 4, num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (functools.partial(Repeat, BLOCK, 3, unroll=True), [X] * 3),
        (functools.partial(StackedTransformer, BLOCK, 2, remat=True), [X] * 2),
        # A tick's stages side by side; of one device all microbatches through a layer.
        (functools.partial(PIPELINE, pipelined=True), [(2, ROWS // 2, LENGTH, MODEL)]),
        (functools.partial(PIPELINE, pipelined=False), [(2, ROWS // 2, LENGTH, MODEL)]),
    ],
    ids=["unrolled", "stacked", "in ticks", "in a row"],
)
def test_the_input_of_what_is_computed_again_has_a_name_in_each_kind_of_stack(make, expected):
    assert sent_to_host(gradient_of(make, {"iteration_input": "offload"})) == expected


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(Repeat, BLOCK, 2),
        functools.partial(PIPELINE, pipelined=True),
        functools.partial(PIPELINE, pipelined=False),
        functools.partial(StackedTransformer, BLOCK, 2, remat=True),
    ],
    ids=["Repeat", "ticks", "row", "stacked"],
)
def test_a_name_that_no_layer_has_is_refused_with_those_that_exist(make):
    with pytest.raises(ConfigError, match=r"_policy.*'quer_proj'.*context.*mean query_proj"):
        gradient_of(make, {"quer_proj": "offload", "context": "device"})


def test_a_name_that_one_layer_of_several_has_is_taken():
    make = functools.partial(StackedTransformer, [BLOCK, EXPERTS], 2, remat=True)
    assert len(sent_to_host(gradient_of(make, {"expert_ffn1": "offload"}))) == 1


def test_a_place_that_is_none_is_refused_where_the_layer_is_made():
    with pytest.raises(ConfigError, match=r"Repeat.checkpoint_policy\['context'\].*'ofload'"):
        Repeat(BLOCK, 2, checkpoint_policy={"context": "ofload"}, rngs=nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("place", nightly_but({"offload"}, ["offload", "remat"]))
def test_on_a_mesh_losses_gradients_and_weights_are_the_same_bit_for_bit(place):
    """Two steps of a model of uneven sizes on 8 devices, Adam's mean of gradients included."""
    expected_losses, expected, _ = offload_runs.trained(kept())
    losses, state, _ = offload_runs.trained(offload_runs.partitioner(offload_runs.placed(place)))
    np.testing.assert_array_equal(losses, expected_losses)
    for (path, actual), leaf in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(actual, leaf, err_msg=jax.tree_util.keystr(path))


@functools.cache
def kept():
    return offload_runs.partitioner(offload_runs.placed("device"))
