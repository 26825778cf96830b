"""Tensor parallelism by hand: numbers of one device, what is sent, and what is refused."""

import collections
import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import SHARDING_PRESETS, DotProductAttention, TransformerFeedForward
from praxis_lite.layers.base.variables import variables
from praxis_lite.layers.whole_model.adapters import lora
from praxis_lite.layers.whole_model.quantization import QuantizationRule, quantized
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.check.asserts.layers import assert_near
from praxis_tools.explain import hlo
from tests.layers.whole_model import preset_runs
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.marks import slow_or_nightly

DIMS, PER_HEAD = 16, 4
SPLITS = {
    "rows": (("data", "mdl"), None, None),
    "time": ("data", "mdl", None),
    "no": ("data", None, None),
}


def half_blocks(how, residual, num_heads, num_kv_heads, hidden_dims, **attention):
    """Returns attention and a feed-forward layer with random weights, equal for every `how`."""
    make_atten = functools.partial(
        DotProductAttention,
        DIMS,
        num_heads,
        dim_per_head=PER_HEAD,
        num_kv_heads=num_kv_heads,
        use_rotary_position_emb=True,
        tensor_parallel=how,
        weight_split_dims_mapping=("data", "mdl", None),
        activation_split_dims_mapping=("data", None, "mdl", None),
        output_split_dims_mapping=SPLITS[residual],
        **attention,
    )
    # Of a hidden dim that is filler a sigmoid makes 0.5.
    make_ff = functools.partial(
        TransformerFeedForward,
        DIMS,
        hidden_dims,
        activation="sigmoid",
        use_gated_activation=True,
        tensor_parallel=how,
        weight_split_dims_mapping=("data", "mdl"),
        hidden_split_dims_mapping=("data", None, "mdl"),
        activation_split_dims_mapping=SPLITS[residual],
    )
    rng = np.random.default_rng(3)
    # No init is compiled.
    atten, ff = (
        nnx.eval_shape(lambda make=make: make(rngs=nnx.Rngs(0))) for make in (make_atten, make_ff)
    )
    for layer in (atten, ff):
        for variable in variables(layer):
            drawn = rng.normal(scale=0.2, size=variable.get_value().shape)
            variable.set_value(jnp.asarray(drawn, jnp.float32))
    return atten, ff


def outputs_and_gradients(half, rows, length, mesh, encoded=False):
    """Returns the outputs of one or both half blocks, their gradients, and the compiled program."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(rows, length, DIMS)).astype(np.float32)
    other = rng.normal(size=(rows, length + 1, DIMS)).astype(np.float32)
    segments = np.cumsum(rng.integers(0, 2, (rows, length)), axis=1).astype(np.int32)
    paddings = (rng.random((rows, length)) < 0.2).astype(np.float32)
    cotangent = rng.normal(size=x.shape).astype(np.float32)

    def run(half, x, other):
        atten, ff = half
        what = {"encoded": other} if encoded else {"segment_ids": segments}
        x = x + atten(x, **what)[0]
        return ff(x, paddings=paddings)

    def pulled(half, x, other):
        outputs, pull = jax.vjp(run, half, x, other)
        return outputs, pull(cotangent)

    if mesh is None:
        return jax.tree.leaves(jax.device_get(jax.jit(pulled)(half, x, other))), None
    with jax.set_mesh(mesh):
        compiled = jax.jit(pulled).lower(half, x, other).compile()
        return jax.tree.leaves(jax.device_get(compiled(half, x, other))), compiled


RING, WEIGHTS, GATHER, RING_OF_FEW_ROWS, *OTHERS = CASES = [
    # Heads, of keys; hidden dims; rows and time; what `mdl` splits between half blocks.
    ("ring", (1, 2, 4), (8, 4, 32, 8, 6), "rows"),
    ("weights", (1, 2, 3), (6, 1, 29, 7, 7), "rows"),
    ("gather", (1, 2, 3), (5, 5, 29, 7, 7), "time"),
    ("ring", (2, 2, 2), (6, 3, 30, 3, 6), "rows"),
    ("two_way_ring", (1, 2, 3), (6, 3, 29, 13, 7), "rows"),
    ("ring", (1, 2, 3), (6, 2, 29, 7, 5), "rows"),
    ("ring", (1, 2, 4), (6, 1, 30, 7, 5), "rows"),
    ("two_way_ring", (1, 2, 4), (8, 4, 32, 8, 6), "rows"),
    ("gather", (1, 2, 4), (6, 3, 30, 7, 7), "no"),
]


@pytest.mark.parametrize(
    "case", slow_or_nightly([RING], [WEIGHTS, GATHER, RING_OF_FEW_ROWS], CASES), ids=str
)
def test_outputs_and_gradients_are_those_of_one_device(case, mesh_of):
    how, shape, sizes, residual = case
    num_heads, num_kv_heads, hidden_dims, rows, length = sizes
    expected, actual = (
        outputs_and_gradients(
            half_blocks(item, residual, num_heads, num_kv_heads, hidden_dims), rows, length, mesh
        )[0]
        for item, mesh in ((None, None), (how, mesh_of(*shape)))
    )
    assert_near(actual, expected, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention",
    [
        {"proj_tpl": lora(layers.AttentionProjection, rank=2)},
        {"is_cross_attention": True},
        pytest.param(
            {"atten_kernel": "blocked", "window": 3, "combine_qkv": True}, marks=pytest.mark.nightly
        ),
        pytest.param(
            {"attention_sinks": True, "output_proj_use_nhd_shape": True},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {
                "ln_tpl": layers.RmsNorm,
                "atten_logit_cap": 5.0,
                "internal_enable_query_scale": False,
            },
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_so_is_attention_of_any_kind(attention, mesh_of):
    crosses = "is_cross_attention" in attention
    expected, actual = (
        outputs_and_gradients(
            half_blocks(item, "rows", 6, 6, 20, **attention), 8, 6, mesh, encoded=crosses
        )[0]
        for item, mesh in ((None, None), ("ring", mesh_of(1, 2, 3)))
    )
    assert_near(actual, expected, tolerance=1e-5)


def sent(how, residual="rows"):
    """Returns by kind what a forward pass of the feed-forward layer sends: [(bytes, group)]."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 2, 4)))
    _, ff = half_blocks(how, residual, 8, 8, 32)
    x = jax.ShapeDtypeStruct((8, 6, DIMS), jnp.float32)
    spec = jax.sharding.PartitionSpec(*SPLITS[residual])
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda ff, x: ff(x), in_shardings=(None, spec), out_shardings=spec)
        actual = hlo.collectives(compiled.lower(ff, x).compile())
    kinds = collections.defaultdict(list)
    for item in actual:
        kinds[item.kind] += [(item.bytes, item.group_size)] * item.count
    return kinds


# Bytes of a device's rows: 8 of 6 tokens over 8 devices. Its weights: over data, and whole there.
PIECE, MATRIX = 4 * 6 * DIMS, 4 * DIMS * 32 // 4


def test_a_ring_sends_each_piece_to_each_other_device_and_its_sum_home():
    actual = sent("ring")
    assert [size for size, _ in actual["collective-permute"]] == [PIECE] * 6
    # Three matrices, and the bias into each hidden dim; the one of outputs is everywhere.
    over_data = [(size, group) for size, group in actual["all-gather"] if group == 2]
    assert sorted(over_data)[-3:] == [(MATRIX, 2)] * 3
    assert all(size < PIECE for size, group in actual["all-gather"] if group != 2)
    assert not actual["reduce-scatter"] and not actual["all-reduce"]


def test_a_ring_in_two_ways_sends_as_much_in_halves():
    actual = sent("two_way_ring")
    assert [size for size, _ in actual["collective-permute"]] == [PIECE // 2] * 12


def test_gather_has_one_gather_and_one_scatter_and_weights_none_of_tokens():
    actual = sent("gather")
    assert (4 * PIECE, 4) in actual["all-gather"]
    assert actual["reduce-scatter"] == [(PIECE, 4)] and not actual["collective-permute"]
    actual = sent("weights")
    assert not actual["reduce-scatter"] and not actual["collective-permute"]
    assert sum(size for size, _ in actual["all-gather"]) > 3 * 4 * MATRIX


def losses(kind, preset, shape, names=None, **settings):
    """Returns three losses of a model that no axis divides, from the same weights."""
    model = preset_runs.UNEVEN()
    for name, value in settings.items():
        setattr(model, name, value)
    task = LanguageModelTask(
        fdl.build(layers.set_sharding_params(model, preset)),
        Learner(optax.sgd, 0.3),
        inputs_split_mapping={f"map_{n}d": (preset["batch"], None)[:n] for n in (1, 2)},
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=names or preset_runs.AXES))
    return preset_runs.losses(kind(task, mesh), preset_runs.batch_of(12, 7, 37))[0]


@functools.cache
def losses_of_one_device():
    return losses(Partitioner, SHARDING_PRESETS["replicated"], (1, 1, 1))


# docs/versions.md; tests/core/sharding/test_jax_canaries.py has the program.
REMAT3_CANNOT = pytest.mark.xfail(
    getattr(jax.config, "jax_remat3", False),
    strict=True,
    reason="jax_remat3 cannot compile a shard_map in another, in a scan",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "word", "policy"),
    [
        pytest.param(explicit_partitioner, "fsdp+ring", "save_out_proj", marks=REMAT3_CANNOT),
        pytest.param(Partitioner, "fsdp+ring", "save_nothing", marks=pytest.mark.nightly),
        (Partitioner, "fsdp+mlp_ring", "save_out_proj"),
        pytest.param(
            explicit_partitioner,
            "fsdp+mlp_ring",
            "save_everything",
            marks=(REMAT3_CANNOT, pytest.mark.nightly),
        ),
    ],
)
def test_steps_of_both_partitioners_are_those_of_one_device(kind, word, policy):
    repeat = fdl.Partial(layers.Repeat, checkpoint_policy=policy)
    preset = SHARDING_PRESETS[word]
    actual = losses(kind, preset, (1, 2, 3), stacked_transformer_tpl=repeat)
    np.testing.assert_allclose(actual, losses_of_one_device(), atol=1e-5)


@pytest.mark.nightly
def test_a_pipelines_stages_keep_their_weights():
    pipeline = fdl.Partial(layers.Pipeline, num_stages=2, num_microbatches=2)
    preset = {
        **SHARDING_PRESETS["fsdp+ring"],
        "embed": None,
        "batch": ("data",),
        "residual_batch": ("data", "mdl"),
    }
    names, settings = ("stage", "data", "mdl"), {"stacked_transformer_tpl": pipeline}
    actual = losses(Partitioner, preset, (2, 2, 2), names, **settings)
    expected = losses(Partitioner, preset, (1, 1, 1), names, **settings)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def feed_forward(how="ring", split=("data", "mdl"), residual=SPLITS["rows"], **settings):
    return TransformerFeedForward(
        4,
        8,
        tensor_parallel=how,
        weight_split_dims_mapping=split,
        activation_split_dims_mapping=residual,
        rngs=nnx.Rngs(0),
        **settings,
    )


def attention(how="ring", residual=SPLITS["rows"], **settings):
    return DotProductAttention(
        4,
        2,
        tensor_parallel=how,
        weight_split_dims_mapping=("data", "mdl", None),
        output_split_dims_mapping=residual,
        rngs=nnx.Rngs(0),
        **settings,
    )


def rounded():
    rules = (QuantizationRule("ffn_layer2"),)
    return quantized(model=lambda rngs: feed_forward(), rules=rules, rngs=nnx.Rngs(0))


WRONG = {
    r"TransformerFeedForward\.tensor_parallel.*'rings'.*ring": (lambda: feed_forward("rings")),
    "tensor_parallel.*'ring'.*relu_dropout_prob.*tensor_parallel=None": (
        lambda: feed_forward(relu_dropout_prob=0.1)
    ),
    "'ring'.*atten_dropout_prob.*relative_bias_tpl": lambda: attention(
        atten_dropout_prob=0.1, relative_bias_tpl=functools.partial(layers.RelativeBias)
    ),
    "TransformerFeedForward.tensor_parallel is 'ring'.*None": (
        lambda: feed_forward(split=("data", None))
    ),
    "ffn_layer1/linear/w.*'mdl'": (
        lambda: [feed_forward(split=("data", "mdl")), _with_axes(("data", "mdl"))][1]
    ),
    "'ring'.*'gather'.*'mdl'.*residual_batch": (lambda: feed_forward(residual=SPLITS["no"])),
    r"DotProductAttention\.tensor_parallel.*'ring'.*None": (
        lambda: attention(residual=SPLITS["time"])
    ),
    r"\('mdl', 'data'\).*'mdl'": (lambda: feed_forward(residual=(("mdl", "data"), None, None))),
    "'ring'.*ffn_layer2/.*None.*'weights'": rounded,
}


def _with_axes(axes):
    layer = feed_forward()
    layer.ffn_layer1.linear.w.set_metadata(split_dims_mapping=(None, axes))
    return layer


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_is_refused_by_name(message, mesh_of):
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):  # noqa: PT012
        layer = WRONG[message]()
        with jax.set_mesh(mesh_of(1, 2, 4)):
            jax.eval_shape(layer, jax.ShapeDtypeStruct((8, 3, 4), jnp.float32))


def test_a_mask_of_heads_is_refused_and_one_of_all_heads_is_not(mesh_of):
    layer, x = attention(), jnp.ones((8, 3, 4))
    with jax.set_mesh(mesh_of(1, 2, 4)):
        jax.eval_shape(lambda mask: layer(x, atten_mask=mask), jnp.zeros((8, 1, 3, 3)))
        with pytest.raises(ConfigError, match="atten_mask"):
            jax.eval_shape(lambda mask: layer(x, atten_mask=mask), jnp.zeros((8, 2, 3, 3)))


def test_without_a_mesh_or_with_one_device_along_the_axis_nothing_is_by_hand(mesh_of):
    layer, x = feed_forward(), jnp.ones((8, 3, 4))
    assert "shard_map" not in str(jax.make_jaxpr(layer)(x))
    with jax.set_mesh(mesh_of(1, 8, 1)):
        assert "shard_map" not in str(jax.make_jaxpr(layer)(x))
