"""Our layers against numbers of the real Pax: same weights, same inputs, same outputs, gradients.

Each case runs with the tolerance and the hyperparameters that cases.json states.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import layers
from praxis_lite.core import NnxModel
from praxis_lite.pax.weights import mdl_vars_from_pax
from tests.support.goldens import Arrays, pax_arrays, pax_cases
from tests.support.marks import every, slow_but


@dataclasses.dataclass(frozen=True)
class Case:
    """How our layer plays a golden: what builds it and how it is called on (module, inputs)."""

    build: Callable[..., nnx.Module]
    call: Callable[[Any, dict[str, jax.Array]], jax.Array] = lambda module, i: module(i["x"])
    output: str = "y"


def positions(inputs: dict[str, jax.Array]) -> jax.Array:
    return jnp.arange(inputs["x"].shape[1])[None]


def attend(module, inputs):
    return module(inputs["x"], positions=positions(inputs), atten_mask=inputs["mask"])[0]


def feed_forward(activation: str) -> Case:
    return Case(functools.partial(layers.FeedForward, 8, 12, activation=activation))


def attention(**options: Any) -> Case:
    return Case(functools.partial(layers.DotProductAttention, 8, 2, **options), attend)


def transformer_ffn(**options: Any) -> Case:
    return Case(
        functools.partial(layers.TransformerFeedForward, 8, 12, **options),
        lambda module, i: module(i["x"], paddings=i["paddings"]),
    )


def softmax(layer=layers.FullSoftmax, **options: Any) -> Case:
    return Case(functools.partial(layer, 13, 8, **options), output="logits")


def transformer_block(**options: Any) -> Case:
    return Case(
        functools.partial(layers.Transformer, 8, 12, 2, **options),
        lambda module, i: module(i["x"], paddings=i["paddings"], atten_mask=i["mask"])[0],
    )


def stack(build: Callable[..., nnx.Module]) -> Case:
    return Case(build, lambda module, i: module(i["x"], paddings=i["paddings"])[0])


BLOCK = functools.partial(layers.Transformer, 8, 12, 2)


CASES = {
    "linear": Case(functools.partial(layers.Linear, 8, 12)),
    "bias": Case(functools.partial(layers.Bias, 8)),
    "feedforward_gelu": feed_forward("gelu"),
    "feedforward_identity": feed_forward("identity"),
    "feedforward_relu": feed_forward("relu"),
    "feedforward_sigmoid": feed_forward("sigmoid"),
    "feedforward_silu": feed_forward("silu"),
    "feedforward_swish": feed_forward("silu"),
    "feedforward_tanh": feed_forward("tanh"),
    "layernorm": Case(functools.partial(layers.LayerNorm, 8)),
    "layernorm_noscale": Case(functools.partial(layers.LayerNorm, 8, use_scale=False)),
    "rmsnorm": Case(functools.partial(layers.RmsNorm, 8)),
    "rmsnorm_noscale": Case(layers.RmsNormNoScale),
    "embedding_index": Case(
        functools.partial(layers.Embedding, 13, 8, scale_sqrt_depth=True),
        lambda module, i: module(i["ids"]),
    ),
    "embedding_unscaled": Case(
        functools.partial(layers.Embedding, 13, 8), lambda module, i: module(i["ids"])
    ),
    "rotary_embedding": Case(
        lambda rngs: layers.RotaryPositionalEmbedding(8),
        lambda module, i: module(i["x"], positions(i)),
    ),
    "trainable_positional_embedding": Case(
        functools.partial(layers.TrainablePositionalEmbedding, 10, 8),
        lambda module, i: module(jnp.arange(6)[None]),
    ),
    "positional_embedding": Case(
        lambda rngs: layers.PositionalEmbedding(8), lambda module, i: module(seq_length=6)
    ),
    "shared_softmax": softmax(layers.SharedEmbeddingSoftmax, scale_sqrt_depth=True),
    "full_softmax": softmax(),
    "full_softmax_label_smoothing": softmax(label_smoothing_prob=0.1),
    "full_softmax_nobias": softmax(has_bias=False),
    "attention": attention(),
    "attention_combined_qkv": attention(combine_qkv=True, use_bias=False),
    "attention_grad": attention(atten_logit_cap=5.0),
    "attention_no_per_dim_scale": attention(internal_enable_per_dim_scale=False),
    "attention_nobias": attention(use_bias=False),
    "attention_query_scale_off": attention(internal_enable_query_scale=False),
    "attention_relative_bias": attention(
        relative_bias_tpl=functools.partial(
            layers.RelativeBias,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=6,
        )
    ),
    "attention_rotary": attention(use_rotary_position_emb=True),
    "attention_scale_logits": attention(
        internal_enable_query_scale=False,
        internal_enable_per_dim_scale=False,
        scale_logits_by_head_dims=True,
    ),
    "transformer_ffn": transformer_ffn(),
    "transformer_ffn_pre": transformer_ffn(),
    "transformer_ffn_gelu": transformer_ffn(activation="gelu"),
    "transformer_ffn_gated_silu": transformer_ffn(activation="silu", use_gated_activation=True),
    "transformer_ffn_no_skip": transformer_ffn(add_skip_connection=False),
    "transformer_ffn_post": transformer_ffn(norm_policy="post"),
    "transformer_block": transformer_block(),
    "transformer_block_post": transformer_block(norm_policy="post"),
    "transformer_block_primer_hybrid": transformer_block(norm_policy="primer_hybrid"),
    "stacked_transformer": stack(functools.partial(layers.StackedTransformer, BLOCK, 3)),
    "stacked_transformer_repeated": stack(
        functools.partial(layers.Repeat, functools.partial(layers.StackedTransformer, BLOCK, 1), 3),
    ),
}


def load(name: str) -> tuple[Arrays, dict[str, float]]:
    """Returns arrays by kind (in, w, out, grad, gin) and path, and the case's tolerance."""
    return pax_arrays(name), pax_cases()[name]["tolerance"]


def assert_close(actual, expected, tolerance, what: str) -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, what
    allowed = (
        tolerance["atol"]
        + tolerance["rtol"] * np.abs(expected)
        + tolerance.get("atol_of_max", 0.0) * np.abs(expected).max(initial=0.0)
    )
    excess = np.abs(actual - expected) - allowed
    assert (excess <= 0).all(), f"{what}: off by {np.abs(actual - expected).max():.2e}"


def params_of(model: NnxModel, weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns our parameters with Pax's weights in them; each has its place and none is left."""
    return jax.tree.map(jnp.asarray, mdl_vars_from_pax(model, weights)["params"])


def test_every_layer_of_the_goldens_is_here():
    assert set(CASES) == {name for name, case in pax_cases().items() if case["kind"] == "layer"}


@pytest.mark.parametrize("name", every(3, CASES))
def test_outputs_and_gradients_equal_pax(name):
    case, (golden, tolerance) = CASES[name], load(name)
    inputs = {key: jnp.asarray(x) for key, x in golden["in"].items()}
    weights, model = golden.get("w", {}), NnxModel(case.build)
    params = params_of(model, weights)

    def outputs_of(params, inputs):
        module = model.module({"params": params, "non_trainable": {}})
        return case.call(module, inputs)

    if case.output != "y" or ("grad" not in golden and "gin" not in golden):
        outputs = jax.jit(outputs_of)(params, inputs)
        assert_close(outputs, golden["out"][case.output], tolerance, name)
        return

    def objective(params, wrt):
        outputs = outputs_of(params, {**inputs, **wrt})
        return jnp.sum(outputs * inputs["cotangent"]), outputs

    wrt = {path: inputs[path] for path in golden.get("gin", {})}
    (grads, input_grads), outputs = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(
        params, wrt
    )
    assert_close(outputs, golden["out"][case.output], tolerance, name)
    wanted_grads = params_of(model, golden.get("grad", {}))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        expected = functools.reduce(lambda node, part: node[part.key], path, wanted_grads)
        assert_close(grad, expected, tolerance, f"{name} gradient of {path}")
    for path, actual in input_grads.items():
        assert_close(actual, golden["gin"][path], tolerance, f"{name} gradient of {path}")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["chunked", "blocked"])
def test_a_query_that_sees_nothing_gets_paxs_average_from_every_kernel(kernel):
    golden, tolerance = load("stacked_transformer")
    assert golden["in"]["paddings"].any()  # A padded token of a causal stack sees no token.
    attention = functools.partial(
        layers.DotProductAttention, atten_kernel=kernel, atten_chunk_size=4
    )
    block = functools.partial(BLOCK, tr_atten_tpl=attention)
    model = NnxModel(functools.partial(layers.StackedTransformer, block, 3))
    inputs, params = golden["in"], params_of(model, golden["w"])

    def objective(params, x, paddings):
        module = model.module({"params": params, "non_trainable": {}})
        y = module(x, paddings=paddings)[0]
        return jnp.sum(y * inputs["cotangent"]), y

    run = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True))
    (grads, *input_grads), y = run(params, inputs["x"], inputs["paddings"])
    assert_close(y, golden["out"]["y"], tolerance, kernel)
    expected = params_of(model, golden["grad"]), golden["gin"]["x"], golden["gin"]["paddings"]
    for leaf, (path, of_pax) in zip(
        jax.tree.leaves((grads, *input_grads)),
        jax.tree_util.tree_leaves_with_path(expected),
        strict=True,
    ):
        assert_close(leaf, of_pax, tolerance, f"{kernel} gradient of {path}")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.output == "logits"])
@pytest.mark.parametrize("chunk_size", slow_but({5}, [None, 5]))
def test_every_output_of_a_softmax_and_its_gradients_equal_pax(name, chunk_size):
    case, (golden, tolerance) = CASES[name], load(name)
    model = NnxModel(functools.partial(case.build, chunk_size=chunk_size))
    params = params_of(model, golden["w"])
    inputs = {path: jnp.asarray(x) for path, x in golden["in"].items()}

    def outputs_of(params, x, class_weights):
        module = model.module({"params": params, "non_trainable": {}})
        return module.compute_loss(x, inputs["class_ids"], class_weights)

    def objective(*args):
        outputs = outputs_of(*args)
        return outputs["total_xent"] * inputs["cotangent"], outputs

    run = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True))
    (grads, *input_grads), outputs = run(params, inputs["x"], inputs["class_weights"])
    missing = {"logits", "log_probs"} if chunk_size else set()
    assert set(outputs) == set(golden["out"]) - {"y"} - missing
    for path, output in outputs.items():
        assert_close(output, golden["out"][path], tolerance, path)
    expected = params_of(model, golden["grad"])
    for output, (path, of_pax) in zip(
        jax.tree.leaves(grads), jax.tree_util.tree_leaves_with_path(expected), strict=True
    ):
        assert_close(output, of_pax, tolerance, f"gradient of {path}")
    for path, output in zip(("x", "class_weights"), input_grads, strict=True):
        assert_close(output, golden["gin"][path], tolerance, f"gradient of {path}")
