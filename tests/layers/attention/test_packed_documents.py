"""Documents that share a row are, in every kernel, what each is in a row of its own."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.layers.attention.kernels.choice import KERNELS
from praxis_lite.layers.base.variables import variables
from tests.support import packed_rows
from tests.support.marks import nightly_but, slow_but, slow_or_nightly
from tests.support.packed_rows import PADDING, Packing

# B rows, T time, D model dims, V classes. Of the rows all but the first two are padding.
D, V, CHUNK = 8, 7, 4
# Documents' lengths in each row, and T, which leaves a tail of padding. The long ones are of
# several blocks of splash, which has 128 tokens in one.
SHORT, LONG = (((5, 1, 4), (2, 7)), 13), (((140, 1, 130), (60, 200)), 300)
ABLE = [name for name, can_do in KERNELS.items() if "segment_ids" in can_do]
# None, less than a document, and reaching over several of them.
WINDOWS = (None, 3, 10)
ROTARY = {"use_rotary_position_emb": True}
# By name: a layer, its settings, and what a kernel must be able to do for it.
LAYERS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "grouped": (layers.DotProductAttention, {"num_kv_heads": 2, **ROTARY}, set()),
    "latent": (
        layers.MultiHeadLatentAttention,
        {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 3},
        set(),
    ),
    "recurrent": (layers.RgLruBlock, {}, set()),
    "multi_query": (layers.MultiQueryDotProductAttention, ROTARY, set()),
    "seeing_later_tokens": (
        layers.DotProductAttention,
        {"is_causal": False, **ROTARY},
        {"window without is_causal"},
    ),
    "relative_bias": (
        layers.DotProductAttention,
        {"relative_bias_tpl": layers.RelativeBias},
        {"relative_bias_tpl"},
    ),
    "capped": (
        layers.DotProductAttention,
        {"atten_logit_cap": 2.0, "combine_qkv": True, **ROTARY},
        {"atten_logit_cap"},
    ),
    "extra_logit": (
        layers.DotProductAttention,
        {"attention_extra_logit": 0.3, **ROTARY},
        {"attention_extra_logit"},
    ),
    "sinks": (layers.DotProductAttention, {"attention_sinks": True, **ROTARY}, {"attention_sinks"}),
}


class Rows(NamedTuple):
    """Inputs [B, T, D] and labels [B, T], each token's document, and the packing's other arrays."""

    x: np.ndarray
    labels: np.ndarray
    document: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def rows_of(packing: Packing) -> Rows:
    """Returns documents that do not depend on how they are packed; padding is of numbers, too."""
    rng, shape = np.random.default_rng(0), packing.document.shape
    lengths = [np.sum(packing.document == item) for item in range(shape[0])]
    filler = rng.normal(size=(*shape, D)).astype(np.float32)
    x = packing.filled(filler, [rng.normal(size=(n, D)) for n in lengths])
    labels = packing.filled(np.zeros(shape, np.int32), [rng.integers(0, V, n) for n in lengths])
    return Rows(x, labels, packing.document, packing.segment_ids, packing.positions)


@functools.partial(jax.jit, static_argnames="is_packed")
@functools.partial(jax.value_and_grad, argnums=(0, 1))
def nats_and_gradients(
    layer: Any, x: jax.Array, rows: Rows, document: jax.Array, is_packed: bool
) -> jax.Array:
    """Returns the sum over a document's tokens of the nats per label of a layer's outputs."""
    if is_packed:
        inputs = {"segment_ids": rows.segment_ids, "positions": rows.positions}
    else:
        inputs = {"paddings": (rows.document == PADDING).astype(jnp.float32)}
    y = x + layer(x, **inputs)[0]
    readout = np.random.default_rng(2).normal(scale=0.2, size=(D, V)).astype(np.float32)
    log_probs = jax.nn.log_softmax(y @ readout)
    xent = -jnp.take_along_axis(log_probs, rows.labels[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(rows.document == document, xent, 0.0))


def layer_of(name: str, window: int | None, kernel: str, chunk: int) -> Any:
    """Returns a layer whose weights do not depend on the kernel."""
    make, settings, _ = LAYERS[name]
    settings = settings if window is None else {**settings, "window": window}
    if name != "recurrent":
        settings = {**settings, "atten_kernel": kernel, "atten_chunk_size": chunk}
    layer = nnx.eval_shape(lambda: make(D, 4, dim_per_head=4, rngs=nnx.Rngs(0), **settings))
    rng = np.random.default_rng(3)
    for variable in variables(layer):
        drawn = rng.normal(scale=0.4, size=variable.get_value().shape)
        variable.set_value(jnp.asarray(drawn, jnp.float32))
    return layer


def per_document(layer: Any, rows: Rows, is_packed: bool) -> list[Any]:
    """Returns nats and gradients (of weights, of x) of padding, and then of each document."""
    documents = range(PADDING, rows.document.max() + 1)
    actual = [nats_and_gradients(layer, rows.x, rows, number, is_packed) for number in documents]
    return jax.device_get([(nats, (jax.tree.leaves(w), x)) for nats, (w, x) in actual])


@functools.cache
def apart(name: str, window: int | None, sizes: tuple) -> tuple[Rows, list[Any]]:
    """Returns the documents in rows of their own, without segments, and what the einsum makes."""
    rows = rows_of(packed_rows.apart(*sizes))
    return rows, per_document(layer_of(name, window, "einsum", CHUNK), rows, is_packed=False)


def check(name: str, window: int | None, kernel: str, sizes: tuple = SHORT, chunk: int = CHUNK):
    rows = rows_of(packed_rows.packing(*sizes))
    actual = per_document(layer_of(name, window, kernel, chunk), rows, is_packed=True)
    rows_apart, expected = apart(name, window, sizes)
    for item, ((nats, (_, dx)), (nats_apart, (_, dx_apart))) in enumerate(
        zip(actual, expected, strict=True), PADDING
    ):
        is_own = rows.document == item
        if name != "recurrent" or item != PADDING:  # Its state goes on into padding, no further.
            np.testing.assert_array_equal(dx[~is_own], 0.0, err_msg=f"{item} sees another")
        if item == PADDING:
            continue
        assert np.all(np.any(dx[is_own] != 0.0, axis=-1))
        np.testing.assert_allclose(nats, nats_apart, rtol=1e-6)
        dx_apart = dx_apart[rows_apart.document == item]
        near = 1e-6 * np.abs(dx_apart).max()
        np.testing.assert_allclose(dx[is_own], dx_apart, rtol=0, atol=near)
    sums, sums_apart = (
        [np.sum(x, axis=0) for x in zip(*[w for _, (w, _) in element[1:]], strict=True)]
        for element in (actual, expected)
    )
    # Of all weights: the gradient of a key's bias is 0 but for what rounding leaves.
    near = 1e-6 * max(np.abs(x).max() for x in sums_apart)
    for sum_, sum_apart in zip(sums, sums_apart, strict=True):
        np.testing.assert_allclose(sum_, sum_apart, rtol=0, atol=near)


@pytest.mark.parametrize("window", nightly_but([3], WINDOWS))
@pytest.mark.parametrize("kernel", slow_but({"einsum", "chunked"}, ABLE))
def test_documents_of_a_row_neither_see_nor_change_each_other(kernel, window):
    check("grouped", window, kernel)


@pytest.mark.parametrize("kernel", slow_or_nightly(["einsum"], ["splash"], ABLE))
def test_nor_do_they_in_latent_attention(kernel):
    check("latent", None, kernel)


def test_nor_in_a_recurrence():
    check("recurrent", None, "")


# Each kind of attention, and each kernel.
OF_ANY_KIND = {
    ("multi_query", "splash"),
    ("seeing_later_tokens", "tokamax"),
    ("relative_bias", "einsum"),
    ("capped", "splash"),
    ("capped", "blocked"),
    ("extra_logit", "chunked"),
    ("sinks", "einsum"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"),
    nightly_but(
        OF_ANY_KIND,
        [
            (name, kernel)
            for name, (*_, needs) in LAYERS.items()
            for kernel in ABLE
            if name not in ("grouped", "latent", "recurrent") and needs <= KERNELS[kernel]
        ],
    ),
)
def test_nor_in_attention_of_any_kind(name, kernel):
    check(name, 10, kernel)


# Kernels that skip blocks, of 64 or 128 tokens; the others see no blocks.
BLOCKS = [("splash", None), *((name, 170) for name in ("splash", "tokamax", "chunked", "blocked"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "window"), nightly_but({("splash", 170), ("chunked", 170), ("blocked", 170)}, BLOCKS)
)
def test_nor_where_documents_are_of_many_blocks(kernel, window):
    check("grouped", window, kernel, LONG, chunk=64)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ABLE])
@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_other_kernels_refuse_segments_before_anything_is_compiled(name, kernel):
    layer, x = layer_of(name, None, kernel, CHUNK), jax.ShapeDtypeStruct((2, 13, D), jnp.float32)
    segment_ids = jax.ShapeDtypeStruct((2, 13), jnp.int32)
    with pytest.raises(ConfigError, match=rf"{kernel}'.* segment_ids.*\['einsum'"):
        jax.eval_shape(lambda x, ids: layer(x, segment_ids=ids)[0], x, segment_ids)


@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_a_row_of_a_cache_is_one_document(name):
    layer, x = layer_of(name, None, "auto", CHUNK), jnp.zeros((1, 3, D))
    cache = layer.init_cache(1, 3, jnp.float32)
    with pytest.raises(ConfigError, match="segment_ids"):
        layer(x, segment_ids=jnp.ones((1, 3), jnp.int32), cache=cache)
