"""Attention whose time is split over devices equals that of one device; how much is sent."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import MeshConfig, make_mesh
from praxis_lite.layers import set_sharding_params
from praxis_lite.layers.attention.kernels.choice import attend
from praxis_lite.layers.attention.kernels.context_parallel import CONTEXT_PARALLEL
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.ring_groups import Ring
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_tools.explain import hlo
from tests.layers.whole_model import preset_runs
from tests.support.marks import needs_tokamax, nightly_but, slow_or_nightly

B, T, S, K = 3, 13, 7, 4
SHORT = T
rng = np.random.default_rng(0)
SEGMENTS = np.sort(rng.integers(0, 3, (B, T)))
PACKED = {"q_segments_BT": SEGMENTS, "kv_segments_BS": SEGMENTS}
VISIBLE = rng.integers(0, 2, (B, T)).astype(bool)
VISIBLE[0] = False
TIME = ("data", "mdl", None, None)  # Of [B, T, N, K].
# Heads, heads of keys, the mask, options of the logits, if there are sinks, keys, the split. Four
# devices divide neither the 13 tokens nor the 6 heads.
CASES = {
    "causal": (6, 3, {"right_context": 0}, {}, False, T, TIME),
    "full": (3, 1, {}, {}, False, T, TIME),
    "packed_with_sinks": (6, 2, {"right_context": 0, **PACKED}, {}, True, T, TIME),
    "window_and_cap": (
        6,
        2,
        {"right_context": 0, "left_context": 4, **PACKED},
        {"cap": 2.0, "scale": 0.5},
        False,
        T,
        TIME,
    ),
    "window_to_both_sides": (5, 5, {"left_context": 3, "right_context": 2}, {}, False, T, TIME),
    "paddings": (6, 2, {"right_context": 0, "kv_visible_BS": VISIBLE}, {}, False, T, TIME),
    "extra_logit": (
        6,
        2,
        {"right_context": 0, "kv_visible_BS": VISIBLE},
        {"extra": 0.3},
        False,
        T,
        TIME,
    ),
    "zero_fully_masked": (
        6,
        2,
        {"kv_visible_BS": VISIBLE},
        {"zero_fully_masked": True},
        False,
        T,
        TIME,
    ),
    "across": (6, 2, {"kv_visible_BS": VISIBLE[:, :S]}, {}, False, S, TIME),
    "over_two_axes": (
        6,
        6,
        {"right_context": 0},
        {},
        False,
        T,
        (None, ("data", "mdl"), None, None),
    ),
    "beside_heads": (6, 2, {"right_context": 0}, {}, True, T, (None, "mdl", "data", None)),
}


def loss(kernel, how, mask, options, split, cotangent, args):
    outputs = attend(
        AttentionSettings(kernel, 3, how, LogitOptions(**options)),
        *args[:3],
        AttentionMask(**mask),
        split=split,
        sinks_N=args[3] if len(args) > 3 else None,
    )
    return jnp.sum(outputs * cotangent), outputs


def near(case, how, kernel="auto", devices=(1, 2, 4)):
    agrees(case, how, kernel, devices)


@functools.cache
def results(case, is_long, kernel, how, devices):
    """Returns outputs and gradients of a case of CASES, or of SPLASH."""
    T = LONG if is_long else SHORT
    N, G, mask, options, has_sinks, num_keys, split = (SPLASH if is_long else CASES)[case]
    draws = np.random.default_rng(1)
    args = [
        draws.normal(size=(B, length, heads, K)).astype(np.float32)
        for length, heads in ((T, N), (num_keys, G), (num_keys, G))
    ]
    args += [draws.normal(size=N).astype(np.float32)] if has_sinks else []
    cotangent = draws.normal(size=(B, T, N, K)).astype(np.float32)

    function = functools.partial(loss, kernel, how, mask, options, split, cotangent)
    run = jax.jit(jax.value_and_grad(function, has_aux=True))
    if devices is None:
        return jax.device_get(run(args))
    with jax.set_mesh(make_mesh(MeshConfig(ici_mesh_shape=devices))):
        return jax.device_get(run(args))


def agrees(case, how, kernel, devices, is_long=False, tolerance=1e-5):
    expected = results(case, is_long, "einsum", None, None)
    actual = results(case, is_long, kernel, how, devices)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


# A ring meets every kind of mask by itself; the others hand a kernel what it sees on one device.
ALL = [
    *((case, "ring") for case in CASES),
    *(
        (case, "gather")
        for case in (
            "causal",
            "window_and_cap",
            "packed_with_sinks",
            "extra_logit",
            "across",
            "over_two_axes",
            "beside_heads",
        )
    ),
    *(
        (case, "all_to_all")
        for case in (
            "full",
            "packed_with_sinks",
            "paddings",
            "across",
            "over_two_axes",
            "beside_heads",
        )
    ),
    *(
        (case, "all_to_all+ring")
        for case in (
            "causal",
            "full",
            "packed_with_sinks",
            "across",
            "over_two_axes",
            "beside_heads",
        )
    ),
]
QUICK = {("paddings", "ring")}
SLOW = {
    *((case, "ring") for case in ("packed_with_sinks", "window_and_cap", "across")),
    ("extra_logit", "gather"),
    ("across", "all_to_all"),
    ("beside_heads", "all_to_all"),
    ("over_two_axes", "all_to_all+ring"),
    ("packed_with_sinks", "all_to_all+ring"),
}


@pytest.mark.parametrize("case", slow_or_nightly(QUICK, SLOW, ALL), ids="-".join)
def test_outputs_and_gradients_are_those_of_one_device(case):
    near(*case)


# Pieces of at least 128 tokens, which is a block of splash.
LONG = 450
DOCUMENTS = np.sort(rng.integers(0, 3, (B, LONG)))
HIDDEN = rng.integers(0, 2, (B, LONG)).astype(bool)
HIDDEN[0] = False
SPLASH = {
    "causal": (2, 1, {"right_context": 0}, {"scale": 0.5}, False, LONG, TIME),
    "full": (2, 2, {}, {"cap": 2.0}, False, LONG, TIME),
    "packed_with_sinks": (
        6,
        2,
        {"right_context": 0, "q_segments_BT": DOCUMENTS, "kv_segments_BS": DOCUMENTS},
        {},
        True,
        LONG,
        TIME,
    ),
    "paddings": (2, 2, {"right_context": 0, "kv_visible_BS": HIDDEN}, {}, False, LONG, TIME),
    "zero_fully_masked": (
        2,
        2,
        {"kv_visible_BS": HIDDEN},
        {"zero_fully_masked": True},
        False,
        LONG,
        TIME,
    ),
    "across": (2, 1, {"kv_visible_BS": HIDDEN[:, :300]}, {}, False, 300, TIME),
}
RINGS = [
    ("causal", "ring", (1, 1, 3)),
    ("full", "ring", (1, 1, 2)),
    ("packed_with_sinks", "all_to_all+ring", (1, 1, 4)),
    ("paddings", "ring", (1, 2, 2)),
    ("zero_fully_masked", "ring", (1, 1, 2)),
    ("across", "ring", (1, 1, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "how", "devices"), nightly_but({RINGS[2]}, RINGS))
def test_a_ring_of_splash_is_attention_on_one_device(case, how, devices):
    """Also a canary: it calls two functions that are not in splash's interface."""
    agrees(case, how, "splash", devices, is_long=True, tolerance=3e-5)


@pytest.mark.slow
@needs_tokamax
@pytest.mark.parametrize(("case", "how", "devices"), nightly_but({RINGS[3]}, [RINGS[0], RINGS[3]]))
def test_a_ring_of_tokamaxs_splash_is_attention_on_one_device(case, how, devices):
    agrees(case, how, "tokamax", devices, is_long=True, tolerance=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", nightly_but({"einsum", "splash"}, ["einsum", "blocked", "splash"])
)
def test_shared_heads_take_any_kernel(kernel):
    near("causal", "all_to_all", kernel)


@pytest.mark.slow
@pytest.mark.parametrize("how", nightly_but({"all_to_all+ring"}, ["ring", "all_to_all+ring"]))
def test_an_odd_number_of_devices(how):
    near("causal", how, devices=(1, 2, 3))


@pytest.mark.parametrize(("num_groups", "size"), [(3, 1), (4, 2), (2, 3)])
def test_pieces_of_a_zigzag_are_where_they_are_said_to_be(num_groups, size):
    """Each token goes to one group, whose pieces start where `starts` says, and back again."""
    num = num_groups * size
    ring = Ring(("data", "mdl"), num, num_groups, True)
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, num), allow_unused_devices=True))
    tokens = jnp.arange(4 * num)[None, :, None]

    def there_and_back(x):
        # Heads of the same tokens: after the exchange a device has all of its group's.
        of_group = ring.by_heads(jnp.broadcast_to(x[..., None], (1, 4, size, 1)))
        there = ring.to_zigzag(of_group)
        pieces = ring.starts(ring.group_index(), 4 * size)
        index = jnp.concatenate([start + jnp.arange(length) for start, length in pieces])
        back = ring.by_time(ring.from_zigzag(there))
        return (there[0, :, 0, 0] - index)[None], back[..., 0, :] - x

    split = jax.sharding.PartitionSpec(None, ("data", "mdl"))
    wrong, differs = jax.jit(
        jax.shard_map(
            there_and_back, mesh=mesh, in_specs=split, out_specs=(split, split), check_vma=False
        )
    )(tokens)
    np.testing.assert_array_equal(wrong, 0)
    np.testing.assert_array_equal(differs, 0)


def program(
    how, num, *, length=64, heads=8, num_kv_heads=8, mask=None, has_gradient=False, chunk_size=512
):
    """Returns the compiled attention of a row over `num` devices along `mdl`."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, num), allow_unused_devices=True))
    split = (None, "mdl", None, None)
    shapes = [
        jax.ShapeDtypeStruct(
            (1, length, n, K),
            jnp.float32,
            sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*split)),
        )
        for n in (heads, num_kv_heads, num_kv_heads)
    ]

    def function(q, k, v):
        mask_of_call = AttentionMask(**(mask or {"right_context": 0}))
        settings = AttentionSettings("auto", chunk_size, how)
        return attend(settings, q, k, v, mask_of_call, split=split)

    def gradients(*args):
        return jax.grad(lambda *args: jnp.sum(function(*args) ** 2), (0, 1, 2))(*args)

    with jax.set_mesh(mesh):
        return jax.jit(gradients if has_gradient else function).lower(*shapes).compile()


# A device's queries have this many bytes; its keys and values of as many heads each as many.
PART = 64 // 4 * 8 * K * 4


@pytest.mark.parametrize(
    ("how", "settings", "expected"),
    [
        # All that a device has changes places once, and the outputs back.
        ("all_to_all", {}, {"all-to-all": 4 * PART}),
        # To the zig-zag and back; and then keys and values, three times.
        ("ring", {}, {"collective-permute": 4 * PART + 3 * 2 * PART}),
        # A window of 16 tokens reaches one device back, and is no zig-zag.
        pytest.param(
            "ring",
            {"mask": {"right_context": 0, "left_context": 16}},
            {"collective-permute": 2 * PART},
            marks=pytest.mark.slow,
        ),
        ("gather", {}, {"all-gather": 4 * 2 * PART, "collective-permute": 2 * PART}),
        # Groups of two share six heads, and have their zig-zag from the start; one turn is left.
        pytest.param(
            "all_to_all+ring",
            {"heads": 6, "num_kv_heads": 6},
            {"all-to-all": 4 * PART * 6 // 8, "collective-permute": 2 * PART * 6 // 8},
            marks=pytest.mark.slow,
        ),
        # Two heads of keys are sent twice over: each device has one of them.
        ("all_to_all", {"num_kv_heads": 2}, {"all-to-all": 2 * PART + 2 * PART // 2}),
    ],
    ids=["all_to_all", "ring", "window", "gather", "both", "grouped"],
)
def test_what_is_sent_is_what_a_hand_counts(how, settings, expected):
    actual: dict[str, int] = {}
    for each in hlo.collectives(program(how, 4, **settings)):
        actual[each.kind] = actual.get(each.kind, 0) + each.bytes * each.count
    assert actual == expected


@pytest.mark.slow
@pytest.mark.parametrize("how", nightly_but({"ring"}, ["ring", "all_to_all"]))
def test_memory_of_a_long_sequence_falls_with_the_devices(how):
    """Of 131,072 tokens: eight devices take at most 0.6 of the temporary memory of four."""
    temporary = [
        program(how, num, length=131_072, has_gradient=True, chunk_size=64)
        .memory_analysis()
        .temp_size_in_bytes
        for num in (4, 8)
    ]
    assert temporary[1] < 0.6 * temporary[0], temporary


# The others differ in a word of attention alone, see test_sharding_presets.py.
WORDS = ["fsdp+context", "fsdp+context_gather"]


@functools.cache
def losses_of_one_device():
    partitioner = preset_runs.partitioner_of(
        preset_runs.UNEVEN(), "replicated", make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1)))
    )
    return preset_runs.losses(partitioner, preset_runs.batch_of(12, 7, 37))[0]


@pytest.mark.slow
@pytest.mark.parametrize("word", nightly_but({"fsdp+context"}, WORDS))
def test_steps_of_a_preset_are_those_of_one_device(word):
    lm = set_sharding_params(preset_runs.UNEVEN(), word)
    assert lm.transformer_layer_tpl.tr_atten_tpl.context_parallel in CONTEXT_PARALLEL
    partitioner = preset_runs.partitioner_of(
        preset_runs.UNEVEN(), word, make_mesh(MeshConfig(ici_mesh_shape=(1, 2, 4)))
    )
    actual, _ = preset_runs.losses(partitioner, preset_runs.batch_of(12, 7, 37))
    np.testing.assert_allclose(actual, losses_of_one_device(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "all_to_all"])
def test_latent_attention(how):
    def outputs(how, mesh):
        layer = layers.MultiHeadLatentAttention(
            9,
            3,
            kv_lora_rank=5,
            qk_nope_head_dim=4,
            qk_rope_head_dim=2,
            v_head_dim=6,
            context_parallel=how,
            activation_split_dims_mapping=(None, "mdl", None, None),
            rngs=nnx.Rngs(0),
        )
        x = jnp.asarray(np.random.default_rng(3).normal(size=(2, T, 9)), jnp.float32)
        with jax.set_mesh(mesh):
            return jax.jit(lambda x: layer(x)[0])(x)

    actual, expected = (
        outputs(each, make_mesh(MeshConfig(ici_mesh_shape=shape, allow_unused_devices=True)))
        for each, shape in ((how, (1, 2, 4)), (None, (1, 1, 1)))
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def attention(how="ring", **settings):
    return layers.DotProductAttention(
        4,
        2,
        context_parallel=how,
        activation_split_dims_mapping=(None, "mdl", None, None),
        rngs=nnx.Rngs(0),
        **settings,
    )


CALL = ("atten_mask",)


def called(**inputs):
    with jax.set_mesh(make_mesh(MeshConfig(ici_mesh_shape=(1, 2, 4)))):
        settings = {name: inputs.pop(name) for name in (*inputs,) if name not in CALL}
        jax.eval_shape(lambda: attention(**settings)(jnp.ones((1, 8, 4)), **inputs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attention("rings"), r"DotProductAttention\.context_parallel.*'rings'.*ring"),
        (
            lambda: attention(atten_dropout_prob=0.1, relative_bias_tpl=layers.RelativeBias),
            "'ring'.*atten_dropout_prob or relative_bias_tpl.*context_parallel=None",
        ),
        (lambda: attention(tensor_parallel="gather"), "'ring'.*tensor_parallel"),
        (
            lambda: attention("gather", atten_kernel="splash"),
            "'gather'.*'splash'.*'chunked'.*'all_to",
        ),
        (lambda: called(atten_kernel="splash", window=3), "'ring'.*'splash'.*a window.*'chunked'"),
        (
            lambda: called(how="all_to_all+ring", atten_kernel="blocked"),
            r"2 heads require a ring of 2 groups.*'blocked'.*'all_to_all'",
        ),
        (lambda: called(atten_mask=jnp.zeros((1, 1, 8, 8))), "'ring'.*atten_mask.*segment_ids"),
        (
            lambda: set_sharding_params(
                fdl.Partial(layers.TransformerLm, 7, 4, 8, 2, 1), {"attention_context": "heads"}
            ),
            "attention_context.*'heads'.*all_to_all",
        ),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_compiles(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
