"""Every attention kernel equals the einsum, in outputs and gradients; which one runs, and why."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.layers.attention.kernels import choice as attention_kernels
from praxis_lite.layers.attention.kernels.blocks import blocked_attention
from praxis_lite.layers.attention.kernels.choice import Workload, choose_kernel
from praxis_lite.layers.attention.kernels.chunks import chunked_attention
from praxis_lite.layers.attention.kernels.einsum import LogitOptions, einsum_attention
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.kernels.splash import splash_attention
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_tools.explain import hlo_matmuls
from tests.support.marks import needs_tokamax, slow_but

B, N, G, K = 2, 6, 3, 5
rng = np.random.default_rng(0)
SEGMENTS = np.sort(rng.integers(0, 3, (B, 13)))
# By name: the mask, options of the logits, queries, keys.
MASKS = {
    "none": (AttentionMask(), {}, 13, 17),
    "causal": (AttentionMask(None, 0), {"cap": 1.5}, 13, 13),
    "window": (AttentionMask(3, 0), {"cap": 2.0, "scale": 0.5}, 13, 13),
    "both_sides": (AttentionMask(4, 2), {}, 13, 13),
    "segments": (
        AttentionMask(None, 0, q_segments_BT=SEGMENTS, kv_segments_BS=SEGMENTS),
        {"extra": 0.3},
        13,
        13,
    ),
    "paddings": (AttentionMask(kv_visible_BS=np.arange(17) < np.array([[11], [17]])), {}, 13, 17),
    "nothing_visible": (
        AttentionMask(kv_visible_BS=np.arange(17) < np.array([[0], [9]])),
        {"zero_fully_masked": True},
        13,
        17,
    ),
    "nothing_visible_averages": (
        AttentionMask(kv_visible_BS=np.arange(17) < np.array([[0], [9]])),
        {},
        13,
        17,
    ),
    "nothing_visible_but_an_extra_logit": (
        AttentionMask(kv_visible_BS=np.arange(17) < np.array([[0], [9]])),
        {"extra": 0.3},
        13,
        17,
    ),
    # The first four queries of row 1, whose windows are hidden, and queries of a segment of none.
    "nothing_visible_in_a_window": (
        AttentionMask(
            3,
            0,
            None,
            np.where(SEGMENTS == 2, 7, SEGMENTS),
            SEGMENTS,
            np.arange(13) >= np.array([[0], [4]]),
        ),
        {"cap": 1.5, "scale": 0.5},
        13,
        13,
    ),
    "positions": (AttentionMask(4, 0, q_index_BT=np.array([[3], [9]]) + np.arange(5)), {}, 5, 17),
}


def answers(kernel, mask, options, T, S, heads=(N, G, K)):
    """Returns outputs and gradients of q, k, v by a kernel."""
    N, G, K = heads
    q, k, v, weights = (
        np.random.default_rng(i).normal(size=(B, *shape)).astype(np.float32)
        for i, shape in enumerate(((T, N, K), (S, G, K), (S, G, K), (T, N, K)))
    )

    def objective(q, k, v):
        y = kernel(q, k, v, mask, LogitOptions(**options))
        return jnp.sum(y * weights), y

    return jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(q, k, v)


def assert_equal(actual, expected, name, atol=5e-6):
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=atol, err_msg=name)


QUICK = {"segments", "nothing_visible_averages", "nothing_visible_in_a_window"}


@functools.cache
def all_answers(is_quick: bool) -> dict:
    """Returns the answers of each kernel for quick masks or for others: one program."""
    kernels = {
        "einsum": einsum_attention,
        "chunks_of_4": functools.partial(chunked_attention, chunk_size=4),
        "blocks_of_4": functools.partial(blocked_attention, block_size=4),
    }

    def run():
        actual = {
            name: {
                kernel: answers(fn, *case)
                for kernel, fn in kernels.items()
                # One supports only indices that start at 0.
                if not (kernel == "blocks_of_4" and name == "positions")
            }
            for name, case in MASKS.items()
            if (name in QUICK) == is_quick
        }
        if not is_quick:
            one_chunk = functools.partial(chunked_attention, chunk_size=64)
            actual["window"]["one_chunk"] = answers(one_chunk, *MASKS["window"])
        return actual

    return jax.device_get(jax.jit(run)())


@pytest.mark.parametrize("name", slow_but(QUICK, MASKS))
def test_kernels_equal_the_einsum(name):
    actual = all_answers(name in QUICK)[name]
    for kernel, item in actual.items():
        assert_equal(item, actual["einsum"], kernel)


def test_a_query_that_sees_nothing_gets_the_mean_of_all_values():
    v = np.random.default_rng(2).normal(size=(B, 17, G, K)).astype(np.float32)
    expected = np.repeat(v[0].mean(axis=0), N // G, axis=0)
    for kernel, (_, y) in all_answers(True)["nothing_visible_averages"].items():
        np.testing.assert_allclose(y[0], np.tile(expected, (13, 1, 1)), atol=1e-6, err_msg=kernel)


def test_einsum_equals_numpy_with_heads_that_share_keys():
    q, k, v = (rng.normal(size=(1, 4, heads, 3)).astype(np.float32) for heads in (4, 2, 2))
    run = functools.partial(
        einsum_attention, mask=AttentionMask(2, 0), options=LogitOptions(cap=1.5, extra=0.2)
    )
    actual = jax.jit(run)(q, k, v)
    for head in range(4):
        logits = q[0, :, head].astype(np.float64) @ k[0, :, head // 2].T
        weights = np.exp(1.5 * np.tanh(logits / 1.5))
        distance = np.subtract.outer(np.arange(4), np.arange(4))
        weights *= (distance >= 0) & (distance < 2)
        probs = weights / (weights.sum(-1, keepdims=True) + np.exp(0.2))
        np.testing.assert_allclose(actual[0, :, head], probs @ v[0, :, head // 2], atol=1e-6)


def test_a_bias_is_added_before_logits_are_scaled():
    q, k, v = (rng.normal(size=(1, 4, 2, 3)).astype(np.float32) for _ in range(3))
    bias = rng.normal(size=(1, 2, 4, 4)).astype(np.float32)
    mask, options = AttentionMask(None, 0), LogitOptions(scale=0.5)
    run = functools.partial(einsum_attention, mask=mask, options=options, bias=bias)
    actual = jax.jit(run)(q, k, v)
    for head in range(2):
        weights = np.tril(np.exp(0.5 * (q[0, :, head] @ k[0, :, head].T + bias[0, head])))
        expected = weights / weights.sum(-1, keepdims=True) @ v[0, :, head]
        np.testing.assert_allclose(actual[0, :, head], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["splash", pytest.param("tokamax", marks=needs_tokamax)])
def test_splash_in_interpret_mode_equals_the_einsum_sharded_too(mesh_of, name):
    T = 150  # Filled up to 256.
    segments = np.sort(np.random.default_rng(3).integers(1, 3, (B, T)))
    # Padded in front, where others would see it.
    visible = np.arange(T) >= np.array([[11], [0]])
    mask = AttentionMask(40, 0, None, segments, segments, visible)
    case = (mask, {"cap": 2.0, "scale": 0.5}, T, T, (6, 3, 8))

    expected = jax.jit(lambda: answers(einsum_attention, *case))()
    for mesh in (None, mesh_of(1, 2, 2)):
        kernel = functools.partial(
            splash_attention,
            name=name,
            interpret=True,
            split=(("replica", "data"), None, "mdl", None),
        )
        with jax.set_mesh(mesh) if mesh else jax.default_device(jax.devices()[0]):
            actual = jax.jit(lambda kernel=kernel: answers(kernel, *case))()
        assert_equal(actual, expected, str(mesh), atol=2e-5)


def test_blocks_of_causal_attention_leave_out_what_is_not_seen():
    # By hand: of 16 queries in blocks of 4, 4 x (4 + 8 + 12 + 16) logits instead of 256; with a
    # window of 3, 4 x (4 + 6 + 6 + 6). Forward two matmuls of 2 N K flops per logit; backward four.
    q, k = (np.ones((1, 16, heads, 5), np.float32) for heads in (6, 3))
    for window, logits in ((None, 160), (3, 88)):
        kernel = functools.partial(
            blocked_attention, mask=AttentionMask(window, 0), options=LogitOptions(), block_size=4
        )
        forward = jax.jit(kernel).lower(q, k, k).compile()
        assert hlo_matmuls.flops(forward) == 2 * 2 * 6 * 5 * logits
        both = jax.jit(jax.grad(lambda *x, f=kernel: jnp.sum(f(*x) ** 2), (0, 1, 2)))
        assert hlo_matmuls.flops(both.lower(q, k, k).compile()) == 6 * 2 * 6 * 5 * logits


def test_blocks_have_the_gradients_of_sinks_and_of_bfloat16():
    q, k, v = (rng.normal(size=(2, 9, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    sinks, mask = rng.normal(size=4).astype(np.float32), AttentionMask(5, 0)
    for dtype, is_wide, atol in ((jnp.float32, True, 1e-5), (jnp.bfloat16, False, 0.15)):
        options = LogitOptions(cap=2.0, float32_logits=is_wide)

        def loss(q, k, v, sinks, kernel, dtype=dtype, options=options):
            y = kernel(
                q.astype(dtype), k.astype(dtype), v.astype(dtype), mask, options, sinks_N=sinks
            )
            assert y.dtype == dtype
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        actual, expected = (
            jax.jit(jax.grad(functools.partial(loss, kernel=kernel), (0, 1, 2, 3)))(q, k, v, sinks)
            for kernel in (functools.partial(blocked_attention, block_size=4), einsum_attention)
        )
        assert_equal(actual, expected, str(dtype), atol=atol)


def on(platform="cpu", dtype=jnp.bfloat16, queries=64, keys=64, dim=64) -> Workload:
    return Workload(platform, dtype, queries, keys, dim)


CHOICES = [
    # setting, needs, work, wanted kernel, words of the reason
    ("auto", (), on(), "einsum", "default on cpu"),
    ("auto", ("window", "num_kv_heads"), on("gpu"), "cudnn", "default on gpu"),
    ("auto", (), on("gpu", jnp.float32), "einsum", "requires bfloat16 or float16, not float32"),
    ("auto", (), on("gpu", dim=20), "einsum", "multiple of 8 up to 128, not 20"),
    (
        "auto",
        ("segment_ids",),
        on("gpu", queries=8192, keys=8192),
        "chunked",
        "cudnn does not support segment",
    ),
    ("auto", ("segment_ids", "atten_logit_cap"), on("tpu"), "splash", "default on tpu"),
    ("auto", ("relative_bias_tpl",), on("tpu"), "einsum", "splash does not support relative_bias"),
    (
        "auto",
        ("atten_mask",),
        on(queries=8192, keys=8192),
        "einsum",
        "chunked does not support atten_m",
    ),
    ("auto", ("cache",), on("tpu", queries=1), "einsum", "splash does not support cache"),
    ("splash", ("cache",), on("tpu", queries=1), "einsum", "splash does not support cache"),
    ("chunked", ("cache", "window"), on(), "chunked", "set by the user"),
    ("blocked", ("segment_ids",), on(), "blocked", "set by the user"),
]


@pytest.mark.parametrize(("setting", "needs", "work", "kernel", "reason"), CHOICES)
def test_the_choice_and_its_reason(setting, needs, work, kernel, reason):
    name, why = choose_kernel(setting, needs, work)
    assert name == kernel
    assert reason in why


REFUSED = [
    ("flash", (), on(), r"atten_kernel.*'flash'.*auto, .*splash\?"),
    ("cudnn", (), on("cpu"), r"cudnn.*GPU.*cpu.*\['einsum'"),
    ("cudnn", ("segment_ids",), on("gpu"), "'cudnn'.*segment_ids.*'splash'"),
    ("chunked", ("atten_dropout_prob",), on(), r"atten_dropout_prob.*\['einsum'\]"),
]


@pytest.mark.parametrize(("setting", "needs", "work", "message"), REFUSED)
def test_a_kernel_that_cannot_is_an_error_that_names_those_that_can(setting, needs, work, message):
    with pytest.raises(ConfigError, match=message):
        choose_kernel(setting, needs, work)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("auto", "einsum kernel: the default on cpu"),
        ("einsum", "einsum kernel: set by the user"),
        ("splash", "splash kernel: set by the user"),
        pytest.param("tokamax", "tokamax kernel: set by the user", marks=needs_tokamax),
        ("chunked", "chunked kernel: set by the user"),
        ("blocked", "blocked kernel: set by the user"),
    ],
)
def test_a_layer_takes_the_kernel_that_is_set_and_logs_it_once(setting, message):
    # Its own handler: a job that this process ran before changed what the logger's parents see.
    records = []
    log = logging.getLogger("praxis_lite")
    level, handler = log.level, logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    attention_kernels.log_choice.cache_clear()
    try:
        layer = layers.DotProductAttention(4, 2, atten_kernel=setting, window=2, rngs=nnx.Rngs(0))
        for _ in range(2):
            assert jax.eval_shape(layer, jnp.ones((1, 3, 4)))[0].shape == (1, 3, 4)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert [record.getMessage() for record in records] == [f"attention by the {message}"]


def test_a_kernel_of_other_hardware_is_an_error_when_called():
    layer = layers.DotProductAttention(4, 2, atten_kernel="cudnn", rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="cudnn.*GPU.*cpu"):
        jax.eval_shape(layer, jnp.ones((1, 3, 4)))


def temp_bytes(kernel, T: int) -> int:
    shape = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(kernel(q, k, v, AttentionMask(None, 0), LogitOptions()) ** 2)

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return step.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_chunks_take_memory_that_grows_with_length_and_the_einsum_with_its_square():
    chunked = functools.partial(chunked_attention, chunk_size=32)
    ratio = temp_bytes(chunked, 2048) / temp_bytes(chunked, 1024)
    assert 1.5 < ratio < 2.2
    assert 3.8 < temp_bytes(einsum_attention, 1024) / temp_bytes(einsum_attention, 512) < 4.2
    assert temp_bytes(chunked, 1024) < temp_bytes(einsum_attention, 1024) / 20


@pytest.mark.parametrize("kernel", ["splash", "chunked"])
def test_of_packed_rows_that_attend_to_themselves_no_kernel_asks_what_each_query_sees(kernel):
    segments = jnp.zeros((1, 1024), jnp.int32)
    x = jnp.zeros((1, 1024, 1, 8))

    def program(**settings):
        mask = AttentionMask(None, 0, q_segments_BT=segments, kv_segments_BS=segments, **settings)
        return str(
            jax.make_jaxpr(
                lambda x: attention_kernels.attend(AttentionSettings(kernel), x, x, x, mask)
            )(x)
        )

    assert "1024,1024" not in program(is_to_itself=True)
    assert ("1024,1024" in program()) == (kernel == "splash")  # Which asks of all pairs at once.
