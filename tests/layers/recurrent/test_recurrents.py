"""The recurrent block against a loop over time in NumPy, its cache, its splits, and as an LM."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.decode import BeamSearch, Greedy
from praxis_lite.layers import RgLru, RgLruBlock
from tests.support.marks import slow_but

B, T, D, N, K = 3, 11, 7, 3, 5
BLOCK = functools.partial(RgLruBlock, D, N, dim_per_head=K)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)


def drawn(model: NnxModel, scale: float = 0.4) -> dict[str, Any]:
    """Returns weights drawn by NumPy, so that biases are not 0 and nothing is compiled."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda w: rng.normal(scale=scale, size=w.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0))["params"],
    )


MODEL = NnxModel(BLOCK)
PARAMS = drawn(MODEL)


@jax.jit
def run(params, x, cache=None, **inputs):
    module = MODEL.module({"params": params, "non_trainable": {}})
    return module(x, cache=cache, **inputs)


def empty_cache(batch: int = B) -> Any:
    return MODEL.abstract_module().init_cache(batch, T, jnp.float32)


def by_hand(params: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """Returns the block's outputs of [B, T, D] from the paper's formulas, a token at a time."""
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x = np.asarray(x, np.float64)

    def sigmoid(z):
        return 1.0 / (1.0 + np.exp(-z))

    def project(name):
        return np.einsum("btd,dnk->btnk", x, p[name]["w"]) + p[name]["b"]

    into, beside, lru = project("linear_x"), project("linear_y"), p["rg_lru"]
    gelu = 0.5 * beside * (1 + np.tanh(np.sqrt(2 / np.pi) * (beside + 0.044715 * beside**3)))
    h, outputs = np.zeros(into[:, 0].shape), []
    for t in range(x.shape[1]):
        u = p["conv"]["b"] + sum(p["conv"]["w"][j] * into[:, t - j] for j in range(4) if t - j >= 0)
        i = sigmoid(np.einsum("bnk,nkl->bnl", u, lru["input_gate_w"]) + lru["input_gate_b"])
        r = sigmoid(np.einsum("bnk,nkl->bnl", u, lru["a_gate_w"]) + lru["a_gate_b"])
        a = sigmoid(lru["a_param"]) ** (8.0 * r)
        h = a * h + np.sqrt(1.0 - a**2) * (i * u)
        outputs.append(np.einsum("bnk,dnk->bd", h * gelu[:, t], p["linear_out"]["w"]))
    return np.stack(outputs, 1) + p["linear_out"]["b"]


def test_the_scan_equals_a_loop_over_time():
    np.testing.assert_allclose(run(PARAMS, X)[0], by_hand(PARAMS, X), atol=3e-6)


def test_gradients_equal_differences_of_the_loop():
    cotangent = np.random.default_rng(2).normal(size=(B, T, D))
    grads = jax.jit(jax.grad(lambda p, x: jnp.sum(run(p, x)[0] * cotangent), argnums=(0, 1)))(
        PARAMS, X
    )
    rng = np.random.default_rng(3)
    leaves, treedef = jax.tree.flatten((PARAMS, X))
    for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        step = rng.normal(size=leaf.shape) * 1e-5
        ends = [
            by_hand(*jax.tree.unflatten(treedef, [*leaves[:i], leaf + s * step, *leaves[i + 1 :]]))
            for s in (1, -1)
        ]
        expected = np.sum((ends[0] - ends[1]) * cotangent) / 2
        actual = np.sum(np.asarray(grad, np.float64) * step)
        assert actual == pytest.approx(expected, rel=2e-4, abs=1e-9), i


def test_gradients_stay_finite_where_the_state_does_not_decay():
    model = NnxModel(functools.partial(RgLru, N, K))
    params = {**drawn(model), "a_gate_b": np.full((N, K), -200.0, np.float32)}

    def last(params):
        module = model.module({"params": params, "non_trainable": {}})
        return jnp.sum(module(jnp.ones((1, T, N, K)))[1])

    value, grads = jax.jit(jax.value_and_grad(last))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, grads)))


def test_initial_decay_is_as_the_paper_says():
    layer = RgLru(7, 101, rngs=nnx.Rngs(0))
    decay = np.asarray(jax.nn.sigmoid(layer.a_param[...]), np.float64) ** 8
    assert 0.9 <= decay.min() < 0.902 and 0.997 < decay.max() <= 0.9991
    assert decay.mean() == pytest.approx(0.9495, abs=0.005)


def test_cached_decode_equals_the_whole_pass_at_every_position():
    whole, _ = run(PARAMS, X)
    # Rows of 5, 2 and 7 tokens are prefilled, right-padded with what must not matter.
    lengths = np.array([5, 2, 7])
    paddings = (np.arange(7)[None] >= lengths[:, None]).astype(np.float32)
    x = np.where(paddings[..., None] > 0, 1e3, X[:, :7])
    outputs, cache = run(PARAMS, x, empty_cache(), paddings=paddings)
    rows = np.arange(B)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(outputs[row, :length], whole[row, :length], atol=2e-6)
    for i in range(T - 7):
        at = lengths + i
        outputs, cache = run(PARAMS, X[rows, at][:, None], cache, positions=at[:, None])
        np.testing.assert_allclose(outputs[:, 0], whole[rows, at], atol=2e-6)
    assert cache["h"].dtype == jnp.float32


def test_one_row_of_paddings_is_that_of_all_rows():
    paddings = (np.arange(7)[None] >= 5).astype(np.float32)
    item = run(PARAMS, X[:, :7], empty_cache(), paddings=paddings)
    all_rows = run(PARAMS, X[:, :7], empty_cache(), paddings=np.repeat(paddings, B, 0))
    jax.tree.map(np.testing.assert_array_equal, item, all_rows)


def test_step_by_step_from_the_first_token_and_in_chunks():
    whole, _ = run(PARAMS, X)
    cache, actual = empty_cache(), []
    for start, end in ((0, 1), (1, 2), (2, 3), (3, 5), (5, 11)):
        positions = np.arange(start, end)[None]
        outputs, cache = run(PARAMS, X[:, start:end], cache, positions=positions)
        actual.append(outputs)
    np.testing.assert_allclose(np.concatenate(actual, axis=1), whole, atol=2e-6)


def test_a_row_that_begins_again_forgets_the_sequence_before():
    _, used = run(PARAMS, X, empty_cache())
    positions = np.array([[0], [11], [0]])
    again, _ = run(PARAMS, X[:, :1], used, positions=positions)
    fresh, _ = run(PARAMS, X[:, :1], empty_cache(), positions=positions * 0)
    np.testing.assert_allclose(again[0::2], fresh[0::2], atol=1e-6)
    assert np.abs(again[1] - fresh[1]).max() > 1e-3


def test_packed_sequences_are_as_each_alone():
    segment_ids = np.array([[1] * 4 + [2] * 2 + [3] * 3 + [0] * 2] * B)
    packed, _ = run(PARAMS, X, segment_ids=segment_ids)
    for start, end in ((0, 4), (4, 6), (6, 9)):
        alone = by_hand(PARAMS, X[:, start:end])
        np.testing.assert_allclose(packed[:, start:end], alone, atol=3e-6)


@pytest.mark.slow
def test_left_padding_does_not_matter():
    paddings = np.repeat((np.arange(T) < 4)[None], B, 0).astype(np.float32)
    actual, _ = run(PARAMS, X, paddings=paddings)
    np.testing.assert_allclose(actual[:, 4:], by_hand(PARAMS, X[:, 4:]), atol=3e-6)


def test_bfloat16_is_close_to_float32():
    actual, expected = run(PARAMS, X.astype(jnp.bfloat16))[0], run(PARAMS, X)[0]
    assert actual.dtype == jnp.bfloat16
    error = np.abs(np.asarray(actual, np.float32) - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 0.03


def test_the_recurrence_is_float32_whatever_the_inputs():
    model = NnxModel(functools.partial(RgLru, N, K))
    params = {**drawn(model), "a_param": np.full((N, K), 9.0, np.float32)}  # Forgets slowly.
    x = RNG.normal(size=(1, 300, N, K)).astype(jnp.bfloat16)

    @jax.jit
    def last(x):
        return model.module({"params": params, "non_trainable": {}})(x)[1]

    np.testing.assert_allclose(last(x), last(x.astype(np.float32)), rtol=1e-6)
    assert last(x).dtype == jnp.float32


BATCH = ("replica", "data")
SPLIT = functools.partial(
    RgLruBlock,
    weight_split_dims_mapping=("data", "mdl", None),
    activation_split_dims_mapping=(BATCH, None, "mdl", None),
    output_split_dims_mapping=(BATCH, None, None),
)


def test_weights_and_activations_are_really_split(mesh_of):
    """layer_cases.py compares the numbers; a device's program shows its share."""
    model = NnxModel(functools.partial(SPLIT, 7, 3, dim_per_head=4))
    params, x = drawn(model), np.ones((5, 6, 7), np.float32)
    with jax.set_mesh(mesh_of(1, 3, 2)):
        lowered = jax.jit(
            lambda p, x: model.module({"params": p, "non_trainable": {}})(x)[0]
        ).lower(params, x)
        assert "f32[2,6,2,4]" in lowered.compile().as_text()  # Batch over data, heads over mdl.


VOCAB = 5


def lm(unroll: bool = False) -> NnxModel:
    return NnxModel(
        functools.partial(
            layers.TransformerLm, VOCAB, 16, 24, 2, 2,
            transformer_layer_tpl=functools.partial(layers.Transformer, tr_atten_tpl=RgLruBlock),
            stacked_transformer_tpl=functools.partial(layers.Repeat, unroll=unroll),
        )
    )  # fmt: skip


@pytest.mark.slow
def test_a_scanned_stack_of_it_equals_an_unrolled_one_and_decodes():
    scanned, unrolled = lm(), lm(unroll=True)
    params = drawn(scanned)
    each = [jax.tree.map(lambda w, i=i: w[i], params["transformer"]["blocks"]) for i in (0, 1)]
    per_layer = {**params, "transformer": {"blocks": {"0": each[0], "1": each[1]}}}
    ids = np.random.default_rng(5).integers(0, VOCAB, (2, 6), dtype=np.int32)

    def logits(model, params):
        return jax.jit(lambda p: model.module({"params": p, "non_trainable": {}})(ids)[0])(params)

    whole = logits(scanned, params)
    np.testing.assert_allclose(whole, logits(unrolled, per_layer), atol=1e-5)

    @jax.jit
    def decode(params, ids, cache, positions):
        module = scanned.module({"params": params, "non_trainable": {}})
        return module(ids, positions=positions, cache=cache)

    cache = scanned.abstract_module().init_cache(2, 6)
    for t in range(6):
        actual, cache = decode(params, ids[:, t : t + 1], cache, np.full((2, 1), t))
        np.testing.assert_allclose(actual[:, 0], whole[:, t], atol=2e-5)


DECODERS = {
    "greedy_prompt_in_one_pass": Greedy(max_decode_steps=3, eos_id=()),
    "beams_prompt_by_tokens": BeamSearch(
        max_decode_steps=3, eos_id=0, beam_size=2, fprop_for_prefix=False
    ),
}


@jax.jit
def log_probs_of(params, ids):
    module = lm().module({"params": params, "non_trainable": {}})
    return jax.nn.log_softmax(module(ids)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but({"greedy_prompt_in_one_pass"}, DECODERS))
def test_ragged_prompts_go_on_as_the_uncached_model_says(name):
    model = lm()
    params = drawn(model)
    ids = np.random.default_rng(7).integers(1, VOCAB, (3, 4), dtype=np.int32)
    lengths = np.array([4, 1, 3], np.int32)

    @jax.jit
    def decode(params, ids, lengths, keys):
        module = model.module({"params": params, "non_trainable": {}})
        return DECODERS[name](module, ids, lengths, keys)

    actual = decode(params, ids, lengths, jax.random.split(jax.random.key(0), 3))
    for row, length in enumerate(lengths):
        new = np.asarray(actual["output_ids"][row, 0, : actual["decode_lengths"][row, 0]])
        sequence = np.zeros((1, 7), np.int32)
        sequence[0, : length + len(new)] = [*ids[row, :length], *new]
        log_probs = np.asarray(log_probs_of(params, sequence))[0, length - 1 :][: len(new)]
        np.testing.assert_allclose(
            actual["logprobs"][row, 0, : len(new)], log_probs[np.arange(len(new)), new], atol=2e-5
        )
        if name.startswith("greedy"):
            np.testing.assert_array_equal(new, log_probs.argmax(-1))


WRONG = {
    r"RgLruBlock\.input_dim.*0": lambda r: RgLruBlock(0, 3, rngs=r),
    r"RgLruBlock\.num_heads.*3.*input_dim.*7": lambda r: RgLruBlock(7, 3, rngs=r),
    r"RgLruBlock\.conv_width.*0": lambda r: RgLruBlock(6, 3, conv_width=0, rngs=r),
    r"RgLruBlock\.dim_per_head.*0": lambda r: RgLruBlock(6, 3, dim_per_head=0, rngs=r),
    r"RgLru\.num_heads.*-1": lambda r: RgLru(-1, 3, rngs=r),
    "atten_mask": lambda r: BLOCK(rngs=r)(jnp.asarray(X), atten_mask=jnp.zeros((1, 1, T, T))),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: WRONG[message](nnx.Rngs(0)))
