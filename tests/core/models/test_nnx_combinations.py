"""Flax NNX's metadata beside this library's layers: who decides, in stacks and one in the other."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite.layers import DotProductAttention, Linear, Repeat, TransformerFeedForward
from tests.support import nnx_stacks
from tests.support.declared_splits import (
    ONE_DEVICE,
    CasesOfRules,
    batch_of,
    losses_of,
    refused,
    splits_of,
    stacks_of,
    xent,
)

# D model dims, F hidden dims; no axis divides them.
D, F, LAYERS = 7, 13, 3
INIT = nnx.initializers.lecun_normal()
RULES = {"logical_axis_rules": (("embed", "data"), ("mlp", "mdl"))}
NO_RULES: dict = {}


class Holder(nnx.Module):
    """A plain NNX module with a layer inside."""

    def __init__(self, make, rngs):
        self.inner = make(rngs)


def holding(make):
    return functools.partial(Holder, make)


def ours(**settings):
    return lambda rngs: Linear(D, F, rngs=rngs, **settings)


SPLIT = ours(weight_split_dims_mapping=(None, "mdl"))


def rules_with(rule, *, is_first=False):
    rules = RULES["logical_axis_rules"]
    return {"logical_axis_rules": (rule, *rules) if is_first else (*rules, rule)}


def flax_linear(names):
    kernel_init = INIT if names is None else nnx.with_partitioning(INIT, names)
    return lambda rngs: nnx.Linear(D, F, use_bias=False, kernel_init=kernel_init, rngs=rngs)


def with_metadata(make, **metadata):
    """Returns the layer with metadata that a user sets by hand afterwards."""

    def changed(rngs):
        layer = make(rngs)
        (layer.w if hasattr(layer, "w") else layer.kernel).set_metadata(**metadata)
        return layer

    return changed


def in_vmap(make, name=None):
    """Returns layers as Flax's users stack them."""
    return nnx.split_rngs(splits=LAYERS)(nnx_stacks.in_vmap(make, name))


def in_jax_vmap(make):
    def stack(rngs):
        keys = jax.random.split(rngs.params(), LAYERS)
        return jax.vmap(lambda key: make(nnx.Rngs(key)))(keys)

    return stack


def in_repeat(make, **settings):
    return lambda rngs: Repeat(lambda rngs: Holder(make, rngs), LAYERS, rngs=rngs, **settings)


NAMED, AXES = flax_linear(("embed", "mlp")), flax_linear(("data", "mdl"))
# By case: the layer inside, the job's rules, the split of its weight.
DECIDED = {
    # A layer of ours in a plain module decides as anywhere; in a stack of Flax's, of its own dims.
    "ours": (SPLIT, NO_RULES, (None, "mdl")),
    "ours, PartitionSpec": (ours(weight_split_dims_mapping=P("data")), NO_RULES, ("data", None)),
    "ours in nnx.vmap": (in_vmap(SPLIT), NO_RULES, (None, None, "mdl")),
    "ours in nnx.vmap, named": (in_vmap(SPLIT, "layers"), NO_RULES, (None, None, "mdl")),
    "ours in jax.vmap": (in_jax_vmap(SPLIT), NO_RULES, (None, None, "mdl")),
    "silent in nnx.vmap": (in_vmap(ours()), NO_RULES, (None, None, None)),
    "ours in nnx.vmap in nnx.vmap": (in_vmap(in_vmap(SPLIT)), NO_RULES, (None, None, None, "mdl")),
    "Repeat in nnx.vmap": (
        in_vmap(in_repeat(SPLIT, stack_split="data")),
        NO_RULES,
        (None, "data", None, "mdl"),
    ),
    # Metadata by hand counts where the layer says nothing; its mapping comes first, of None too.
    "by hand": (with_metadata(ours(), out_sharding=("data", "mdl")), NO_RULES, ("data", "mdl")),
    "by hand, named": (
        with_metadata(ours(), out_sharding=("embed", "mlp")),
        RULES,
        ("data", "mdl"),
    ),
    "by hand, rules of its own": (
        with_metadata(ours(), out_sharding=("mlp",), sharding_rules=(("mlp", "data"),)),
        RULES,
        ("data", None),
    ),
    "by hand over ours": (with_metadata(SPLIT, out_sharding=("data",)), NO_RULES, (None, "mdl")),
    "by hand over whole": (
        with_metadata(ours(weight_split_dims_mapping=()), out_sharding=("data", "mdl")),
        NO_RULES,
        (None, None),
    ),
    "our key by hand": (
        with_metadata(ours(), split_dims_mapping=P("mdl")),
        NO_RULES,
        ("mdl", None),
    ),
    "by hand in nnx.vmap": (
        in_vmap(with_metadata(ours(), out_sharding=("data", "mdl")), "layers"),
        NO_RULES,
        (None, "data", "mdl"),
    ),
    "by hand on a stack": (
        with_metadata(in_vmap(ours()), out_sharding=("replica", None, "mdl")),
        NO_RULES,
        ("replica", None, "mdl"),
    ),
    # Names of our dims are for presets and mappings, not for the job's rules.
    "rules over our dims": (
        lambda rngs: TransformerFeedForward(D, F, rngs=rngs).ffn_layer1.linear,
        RULES,
        (None, None),
    ),
    # Flax's layers, in Flax's stacks and in ours.
    "named": (NAMED, RULES, ("data", "mdl")),
    "named in nnx.vmap": (in_vmap(NAMED, "layers"), RULES, (None, "data", "mdl")),
    "named, a rule for the stack": (
        in_vmap(NAMED, "layers"),
        rules_with(("layers", "data"), is_first=True),
        ("data", None, "mdl"),
    ),
    "named stack, rule comes last": (
        in_vmap(NAMED, "layers"),
        rules_with(("layers", "data")),
        (None, "data", "mdl"),
    ),
    "a stack named as an axis": (
        in_vmap(flax_linear((None, "mlp")), "data"),
        RULES,
        ("data", None, "mdl"),
    ),
    "axes in nnx.vmap": (in_vmap(AXES, "layers"), NO_RULES, (None, "data", "mdl")),
    "named in Repeat": (in_repeat(NAMED), RULES, (None, "data", "mdl")),
    "named in a split Repeat": (in_repeat(NAMED, stack_split="data"), RULES, ("data", None, "mdl")),
    "axes in Repeat by index": (
        in_repeat(flax_linear((None, "mdl")), stack_split=1),
        NO_RULES,
        ("data", None, "mdl"),
    ),
    "a name that is an axis": (flax_linear(("mdl", "embed")), RULES, ("mdl", "data")),
    "an axis of a rule is gone": (flax_linear(("mdl", "mlp")), RULES, (None, "mdl")),
    "no metadata": (flax_linear(None), RULES, (None, None)),
}


SPLITS = CasesOfRules(splits_of, DECIDED)


@pytest.mark.parametrize("case", DECIDED)
def test_a_weight_splits_as_the_first_says_that_says_something(case):
    actual, expected = SPLITS.of(case), DECIDED[case][-1]
    assert list(actual.values()) == [expected], actual


STACKED = {
    "ours": (SPLIT, RULES, "unstacked"),
    "ours in nnx.vmap": (in_vmap(SPLIT), RULES, "stack_3"),
    "silent in jax.vmap": (in_jax_vmap(ours()), RULES, "stack_3"),
    "Repeat in nnx.vmap": (in_vmap(in_repeat(SPLIT)), RULES, "stack_3x3"),
    "by hand in nnx.vmap": (
        in_vmap(with_metadata(ours(), out_sharding=("data",)), "layers"),
        RULES,
        "stack_3",
    ),
    "by hand on a stack": (
        with_metadata(in_vmap(ours()), out_sharding=("replica", None, "mdl")),
        RULES,
        "stack_3",
    ),
    "named": (in_vmap(NAMED, "layers"), RULES, "stack_3"),
    "no metadata": (in_vmap(flax_linear(None)), RULES, "unstacked"),  # Nothing tells it.
}


STACKS = CasesOfRules(stacks_of, STACKED)


@pytest.mark.parametrize("case", STACKED)
def test_an_optimizer_sees_one_layer_of_a_stack_that_something_tells(case):
    actual, expected = STACKS.of(case), STACKED[case][-1]
    assert set(actual.values()) == {expected}


WRONG = {
    "more entries than the layer has dims": (
        in_vmap(ours(weight_split_dims_mapping=(None, None, "mdl"))),
        NO_RULES,
        ["Linear.weight_split_dims_mapping", "3 entries", "rank is 2", "one entry per dim"],
    ),
    "more names than a stack has dims": (
        in_vmap(flax_linear(("embed", "mlp", "kv")), "layers"),
        RULES,
        ["inner/kernel", "'kv'", "4 entries", "3 dims", "Remove 1"],
    ),
    "an unknown name by hand": (
        with_metadata(ours(), out_sharding=("embd", "mlp")),
        RULES,
        ["inner/w", "'embd'", "no rule", "Did you mean embed", "('embd', AXES)"],
    ),
    "a stack's name without a rule": (
        in_vmap(NAMED, "blocks"),
        RULES,
        ["inner/kernel", "'blocks'", "('blocks', AXES)"],
    ),
    "a string for a mapping": (
        ours(weight_split_dims_mapping="mdl"),
        NO_RULES,
        ["Linear.weight_split_dims_mapping", "'mdl'", "('mdl',)"],
    ),
    "our key by hand, a string": (
        with_metadata(ours(), split_dims_mapping="mdl"),
        NO_RULES,
        ["inner/w", "'mdl'", "('mdl',)"],
    ),
    "our key by hand, by name": (
        with_metadata(ours(), split_dims_mapping={"mlp": "mdl"}),
        NO_RULES,
        ["inner/w", "{'mlp': 'mdl'}", "a sequence"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_fits_no_weight_says_what_was_found_and_wanted(case):
    make, rules, words = WRONG[case]
    with refused(words):
        splits_of(holding(make), **rules)


def test_all_weights_of_an_attention_in_a_stack_split_as_one_layers():
    def attention(rngs):
        return DotProductAttention(
            8, 4, num_kv_heads=2, weight_split_dims_mapping={"heads": "mdl"}, rngs=rngs
        )

    actual, alone = (splits_of(holding(make)) for make in (in_vmap(attention), attention))
    assert actual == {path: (None, *spec) for path, spec in alone.items()}


class Mixed(nnx.Module):
    """Flax's layers around stacks of ours, called by `nnx.scan` and by hand."""

    def __init__(self, rngs):
        self.up = nnx.Linear(
            D, D, kernel_init=nnx.with_partitioning(INIT, ("embed", None)), rngs=rngs
        )
        self.blocks = in_vmap(
            lambda rngs: TransformerFeedForward(
                D, F, weight_split_dims_mapping={"mlp": "mdl"}, rngs=rngs
            )
        )(rngs)
        self.out = Linear(D, D, weight_split_dims_mapping=P("data"), rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def scanned(x, block):
            return block(x)

        return self.out(scanned(self.up(x)[:, None], self.blocks)[:, 0])


@pytest.mark.slow
def test_a_model_of_both_kinds_trains_on_a_mesh_as_on_one_device():
    settings = {"optimizer": optax.adafactor, **RULES}
    actual, expected = (
        losses_of(Mixed, xent, batch_of(11, D), *shape, **settings) for shape in ((), (ONE_DEVICE,))
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert actual[1] < actual[0]
