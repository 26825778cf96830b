"""What a layer declares of its weights survives stacking, nesting and splitting into trees."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError
from praxis_lite.core import NnxModel, WeightSpec
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.models.nnx_declarations import declared_spec
from praxis_lite.layers import (
    FullSoftmax,
    GroupedQueryAttention,
    Linear,
    Repeat,
    SharedEmbeddingSoftmax,
    Transformer,
    TransformerLm,
    set_sharding_params,
)

AXES = ("replica", "data", "mdl")
SPLIT_LINEAR = functools.partial(Linear, 5, 7, weight_split_dims_mapping=("data", "mdl"))


def specs_of(build) -> dict[str, WeightSpec]:
    return dict(spec_leaves(NnxModel(build).weight_specs()))


def test_a_weight_declares_its_true_shape_dtype_and_split():
    assert specs_of(SPLIT_LINEAR) == {
        "params/w": WeightSpec((5, 7), jnp.dtype("float32"), ("data", "mdl"), matrix=((0,), (1,)))
    }


def test_a_stack_keeps_the_layers_split_and_puts_its_own_entry_before_it():
    spec = specs_of(lambda rngs: Repeat(SPLIT_LINEAR, 3, stack_split="replica", rngs=rngs))
    assert spec == {
        "params/blocks/w": WeightSpec(
            (3, 5, 7),
            jnp.dtype("float32"),
            ("data", "mdl"),
            ("replica",),
            num_unstackable_dims=1,
            matrix=((0,), (1,)),
        )
    }
    weight = spec["params/blocks/w"]
    assert weight.stack_shape == (3,)
    assert weight.partition_spec(AXES, "w") == P("replica", "data", "mdl")


def test_a_stack_of_stacks_lists_its_dims_outermost_first():
    def inner(rngs):
        return Repeat(SPLIT_LINEAR, 3, stack_split=None, rngs=rngs)

    (weight,) = specs_of(lambda rngs: Repeat(inner, 2, stack_split="replica", rngs=rngs)).values()
    assert weight.shape == (2, 3, 5, 7) and weight.stack_shape == (2, 3)
    assert weight.stack_split_dims_mapping == ("replica", None)
    assert weight.partition_spec(AXES, "w") == P("replica", None, "data", "mdl")


def test_a_real_stack_carries_the_same_metadata_as_an_abstract_one():
    module = Repeat(SPLIT_LINEAR, 3, stack_split="replica", rngs=nnx.Rngs(0))
    (weight,) = specs_of(
        lambda rngs: Repeat(SPLIT_LINEAR, 3, stack_split="replica", rngs=rngs)
    ).values()
    assert declared_spec("w", module.blocks.w) == weight


def test_metadata_survives_scan_checkpoint_and_jit():
    module = Repeat(SPLIT_LINEAR, 3, stack_split="replica", rngs=nnx.Rngs(0))

    def body(carry, block):
        assert block.w.get_metadata()["split_dims_mapping"] == ("data", "mdl")
        assert block.w.shape == (5, 7)
        return carry, jnp.sum(block.w[...])

    jax.jit(lambda m: jax.lax.scan(jax.checkpoint(body), 0.0, m.blocks))(module)


def test_a_weight_without_a_mapping_is_replicated_and_a_short_one_is_extended():
    weight = WeightSpec((5, 7, 3), jnp.float32, None)
    assert weight.partition_spec(AXES, "w") == P(None, None, None)
    weight = WeightSpec((2, 5, 7), jnp.float32, ("mdl",), (None,))
    assert weight.partition_spec(AXES, "w") == P(None, "mdl", None)


def test_a_variable_of_no_layer_of_ours_is_replicated():
    weight = nnx.Param(jnp.ones((3, 2)))
    assert declared_spec("w", weight) == WeightSpec((3, 2), jnp.dtype("float32"))


@pytest.mark.parametrize(
    "mapping, stack, message",
    [
        (("data", "mdl", None), ("replica",), "some/w.*3.*2"),
        (("model", None), (), "some/w.*'model'"),
        (("data", "data"), (), r"some/w.*\('data', 'data'\)"),
        (("data", None), ("data",), r"some/w.*\('data', 'data', None\)"),
    ],
)
def test_a_mapping_that_does_not_fit_names_the_weights_path(mapping, stack, message):
    weight = WeightSpec((3,) * len(stack) + (5, 7), jnp.float32, mapping, stack)
    with pytest.raises(ConfigError, match=message):
        weight.partition_spec(AXES, "some/w")


def test_biases_split_as_the_dims_they_are_added_to():
    import fiddle as fdl

    lm = set_sharding_params(fdl.Partial(TransformerLm, 11, 8, 12, 2, 3))
    lm.softmax_tpl.has_bias = True
    lm.transformer_layer_tpl.tr_atten_tpl.use_bias = True
    specs = {
        path: spec.partition_spec(AXES, path) for path, spec in specs_of(fdl.build(lm)).items()
    }
    block = "params/transformer/blocks"
    assert specs[f"{block}/self_attention/query/w"] == P(None, "data", "mdl", None)
    assert specs[f"{block}/self_attention/query/b"] == P(None, "mdl", None)
    assert specs[f"{block}/self_attention/post/b"] == P(None, "data")
    assert specs[f"{block}/ff_layer/ffn_layer1/bias/b"] == P(None, "mdl")
    assert specs[f"{block}/ff_layer/ffn_layer2/linear/w"] == P(None, "mdl", "data")
    assert specs[f"{block}/ff_layer/ffn_layer2/bias/b"] == P(None, "data")
    assert specs["params/softmax/logits_ffn/linear/w"] == P("data", "mdl")
    assert specs["params/softmax/logits_ffn/bias/b"] == P("mdl")


def test_a_constructor_shows_and_takes_the_settings_of_another():
    shared = inspect.signature(SharedEmbeddingSoftmax).parameters
    full = inspect.signature(FullSoftmax).parameters
    assert full.items() <= shared.items()
    assert set(shared) - set(full) == {
        "lookup_style",
        "scale_sqrt_depth",
        "fprop_dtype",
        "lookup_split_dims_mapping",
    }
    grouped = inspect.signature(GroupedQueryAttention).parameters
    assert "window" in grouped and "combine_qkv" not in grouped
    for wrong in ({"windows": 3}, {"combine_qkv": True}):
        with pytest.raises(TypeError, match=f"GroupedQueryAttention: .*'{next(iter(wrong))}'"):
            GroupedQueryAttention(8, 2, **wrong, rngs=nnx.Rngs(0))


def test_weights_of_a_block_are_drawn_at_their_true_shapes_and_differ():
    params = Transformer(8, 12, 2, rngs=nnx.Rngs(3)).self_attention
    query, key = params.query.w[...], params.key.w[...]
    assert query.shape == (8, 2, 4) and jnp.abs(query - key).max() > 0.05
    # Glorot uniform with the fans of a matrix [8, 2 * 4]: bound sqrt(6 / 16).
    assert float(jnp.abs(query).max()) <= (6 / 16) ** 0.5
