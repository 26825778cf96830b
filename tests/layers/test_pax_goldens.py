"""Our layers against numbers of the real Pax: same weights, same inputs, same outputs, gradients.

Each case runs with the tolerance and the hyperparameters that cases.json states. Two of Pax's
options are not ours and are folded into what is: the learned per-dim scale of queries (into the
projections) and paddings (padded positions are left out: causal layers never look at them).
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import layers
from praxis_lite.learner import Learner
from praxis_lite.models import NnxModel
from tasks.language_model import LanguageModelTask

GOLDENS = pathlib.Path(__file__).parents[2].parent / "shared/goldens/pax"
pytestmark = pytest.mark.skipif(not GOLDENS.exists(), reason=f"{GOLDENS} is not on this machine")


@dataclasses.dataclass(frozen=True)
class Case:
    """How our layer plays a golden: what builds it and how it is called on (module, inputs)."""

    build: Callable[..., nnx.Module]
    call: Callable[[Any, dict[str, jax.Array]], jax.Array] = lambda module, i: module(i["x"])
    rename: Callable[[str], str] = lambda path: path
    output: str = "y"


def positions(inputs: dict[str, jax.Array]) -> jax.Array:
    return jnp.arange(inputs["x"].shape[1])[None]


def attend(module, inputs):
    return module(inputs["x"], positions=positions(inputs))[0]


def feed_forward(activation: str) -> Case:
    return Case(functools.partial(layers.FeedForward, 8, 12, activation=activation))


def attention(**options: Any) -> Case:
    options = {"use_bias": True, "use_rotary_position_emb": False, **options}
    return Case(functools.partial(layers.DotProductAttention, 8, 2, **options), attend)


def transformer_ffn(**options: Any) -> Case:
    return Case(
        functools.partial(
            layers.TransformerFeedForward, 8, 12, ln_tpl=layers.LayerNorm, **options
        )
    )


def softmax(**options: Any) -> Case:
    return Case(
        functools.partial(
            layers.SharedEmbeddingSoftmax, 13, 8, **{"has_bias": True, **options}
        ),
        rename=lambda path: path.replace("logits_ffn/linear/", "").replace("logits_ffn/bias/", ""),
        output="logits",
    )


def build_block(*, rngs: nnx.Rngs) -> layers.Transformer:
    atten = functools.partial(
        layers.DotProductAttention, use_bias=True, use_rotary_position_emb=False
    )
    return layers.Transformer(8, 12, 2, ln_tpl=layers.LayerNorm, tr_atten_tpl=atten, rngs=rngs)


def stack(unroll: bool, sub: str, blocks: str) -> Case:
    return Case(
        lambda rngs: layers.Repeat(build_block, 3, unroll=unroll, rngs=rngs),
        attend,
        rename=lambda path: path.replace(sub, blocks),
    )


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
    "rmsnorm": Case(functools.partial(layers.RmsNorm, 8)),
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
    "shared_softmax": softmax(),
    "full_softmax": softmax(),
    "full_softmax_nobias": softmax(has_bias=False),
    "attention": attention(),
    "attention_nobias": attention(use_bias=False),
    "attention_no_per_dim_scale": attention(),
    "attention_rotary": attention(use_rotary_position_emb=True),
    "transformer_ffn": transformer_ffn(),
    "transformer_ffn_pre": transformer_ffn(),
    "transformer_ffn_gelu": transformer_ffn(activation="gelu"),
    "transformer_ffn_gated_silu": transformer_ffn(activation="silu", use_gated_activation=True),
    "transformer_block": Case(build_block, attend),
    "stacked_transformer": stack(True, "x_layers_", "blocks/"),
    "stacked_transformer_repeated": stack(False, "repeat/sub/x_layers_0", "blocks"),
}

# Where Pax zeroes padded positions half way through a block, its gradients are not ours.
WITHOUT_GRADIENTS = ("transformer_block", "stacked_transformer", "stacked_transformer_repeated")


@functools.cache
def cases() -> dict[str, Any]:
    return json.loads((GOLDENS / "cases.json").read_text())["cases"]


def load(name: str) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, float]]:
    """Returns arrays by kind (in, w, out, grad, gin) and path, and the case's tolerance."""
    arrays: dict[str, dict[str, np.ndarray]] = {}
    with np.load(GOLDENS / f"{name}.npz") as file:
        for path in file.files:
            kind, _, rest = path.partition("/")
            arrays.setdefault(kind, {})[rest] = file[path]
    return arrays, cases()[name]["tolerance"]


def assert_close(found, wanted, tolerance, what: str) -> None:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape, what
    allowed = (
        tolerance["atol"]
        + tolerance["rtol"] * np.abs(wanted)
        + tolerance.get("atol_of_max", 0.0) * np.abs(wanted).max(initial=0.0)
    )
    excess = np.abs(found - wanted) - allowed
    assert (excess <= 0).all(), f"{what}: off by {np.abs(found - wanted).max():.2e}"


def per_dim_factor(weights: dict[str, np.ndarray], path: str) -> np.ndarray:
    """Returns what Pax multiplies queries by for a learned scale, beside 1 / sqrt(K)."""
    return 1.442695041 * np.logaddexp(weights[path], 0.0)


def without_per_dim_scale(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the weights with Pax's per-dim scale multiplied into the query projection."""
    weights = dict(weights)
    for path in [path for path in weights if path.endswith("per_dim_scale/per_dim_scale")]:
        prefix = path.removesuffix("per_dim_scale/per_dim_scale")
        factor = per_dim_factor(weights, path)
        # [K] against [D, N, K] and [N, K]; of a stack [L, K] against [L, D, N, K] and [L, N, K].
        lead = factor.shape[:-1]
        for name, rank in (("w", 3), ("b", 2)):
            if (query := f"{prefix}query/{name}") in weights:
                ones = (1,) * (rank - 1)
                weights[query] = weights[query] * factor.reshape(*lead, *ones, factor.shape[-1])
        del weights[path]
    return weights


def params_of(model: NnxModel, weights: dict[str, np.ndarray], rename) -> dict[str, Any]:
    """Returns our parameters with Pax's weights in them; each has its place and none is left."""
    weights = {rename(path): weight for path, weight in weights.items()}
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        jax.eval_shape(model.init, jax.random.key(0))["params"]
    )
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert sorted(paths) == sorted(weights)
    assert [leaf.shape for _, leaf in leaves] == [weights[path].shape for path in paths]
    return jax.tree.unflatten(treedef, [jnp.asarray(weights[path]) for path in paths])


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_pax(name):
    case, (golden, tolerance) = CASES[name], load(name)
    inputs = {key: jnp.asarray(x) for key, x in golden["in"].items()}
    weights, model = golden.get("w", {}), NnxModel(case.build)
    rotary_scale = None
    if name == "attention_rotary":
        # Rotation and scale do not commute, so half of the scale goes onto queries and keys each.
        scale = np.sqrt(per_dim_factor(weights, "per_dim_scale/per_dim_scale"))
        rotary_scale = jnp.asarray(scale)[None, None, None]
        weights = {path: w for path, w in weights.items() if "per_dim" not in path}
    params = params_of(model, without_per_dim_scale(weights), case.rename)

    def outputs_of(params, inputs):
        module = model.module({"params": params, "non_trainable": {}})
        if rotary_scale is not None:
            rotary = module.rotary
            module.rotary = lambda x, positions: rotary(x, positions) * rotary_scale
        return case.call(module, inputs)

    outputs = jax.jit(outputs_of)(params, inputs)
    is_true = 1.0 - golden["in"].get("paddings", np.zeros(outputs.shape[:2]))
    is_true = jnp.asarray(is_true, jnp.float32).reshape(*is_true.shape, *(1,) * (outputs.ndim - 2))
    wanted = golden["out"][case.output]
    assert_close(outputs * is_true, wanted * np.asarray(is_true), tolerance, name)
    if "grad" not in golden and "gin" not in golden:
        return
    if name in WITHOUT_GRADIENTS or case.output != "y":
        return

    def objective(params, x):
        outputs = outputs_of(params, inputs if x is None else {**inputs, "x": x})
        return jnp.sum(outputs * inputs["cotangent"] * is_true)

    grads, x_grad = jax.jit(jax.grad(objective, argnums=(0, 1)))(params, inputs.get("x"))
    wanted_grads = params_of(model, golden.get("grad", {}), case.rename)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        wanted = functools.reduce(lambda node, part: node[part.key], path, wanted_grads)
        assert_close(grad, wanted, tolerance, f"{name} gradient of {path}")
    if "x" in golden.get("gin", {}):
        wanted = golden["gin"]["x"] * np.asarray(is_true)
        assert_close(x_grad * is_true, wanted, tolerance, f"{name} gradient of x")


@pytest.mark.parametrize("name", ["shared_softmax", "full_softmax", "full_softmax_nobias"])
def test_cross_entropy_and_its_gradients_equal_pax(name):
    case, (golden, tolerance) = CASES[name], load(name)
    model = NnxModel(case.build)
    params = params_of(model, golden["w"], case.rename)
    task = LanguageModelTask(case.build, Learner(optax.sgd, 0.1))
    batch = {
        "ids": jnp.asarray(golden["in"]["x"]),
        "labels": jnp.asarray(golden["in"]["class_ids"][..., 0]),
        "weights": jnp.asarray(golden["in"]["class_weights"][..., 0]),
    }

    def metrics_of(params, x):
        module = model.module({"params": params, "non_trainable": {}})
        return task.compute_loss(lambda x, key: (module(x), None), {**batch, "ids": x}, None)

    metrics = jax.jit(metrics_of)(params, batch["ids"])
    assert_close(metrics["loss"][0], golden["out"]["avg_xent"], tolerance, "avg_xent")
    assert_close(metrics["loss"][1], golden["out"]["total_weight"], tolerance, "total_weight")
    assert_close(metrics["accuracy"][0], golden["out"]["accuracy"], tolerance, "accuracy")

    def objective(params, x):
        loss, weight = metrics_of(params, x)["loss"]
        return loss * weight * golden["in"]["cotangent"]

    grads, x_grad = jax.jit(jax.grad(objective, argnums=(0, 1)))(params, batch["ids"])
    wanted = params_of(model, golden["grad"], case.rename)
    for path in wanted:
        assert_close(grads[path], wanted[path], tolerance, f"gradient of {path}")
    assert_close(x_grad, golden["gin"]["x"], tolerance, "gradient of x")
