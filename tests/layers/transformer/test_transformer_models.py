"""The language model against the real Pax: logits, losses, gradients; packed, padded, prefixes."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, NnxModel
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.check.asserts.layers import assert_near, drawn
from tests.layers import test_pax_goldens as goldens
from tests.support.goldens import pax_cases, pax_options
from tests.support.marks import slow_but
from tests.support.pax_options import flat, mdl_vars_from

partial = functools.partial
SOFTMAX = partial(layers.SharedEmbeddingSoftmax, scale_sqrt_depth=True)
ATTENTION = partial(layers.DotProductAttention, use_bias=False, combine_qkv=True)
GOLDEN = partial(
    layers.TransformerLm,
    13,
    8,
    12,
    2,
    2,
    softmax_tpl=partial(SOFTMAX, soft_cap_logits=30.0),
    transformer_layer_tpl=partial(
        layers.Transformer, tr_atten_tpl=partial(ATTENTION, atten_logit_cap=50.0)
    ),
)
GOLDENS = {
    "lm": GOLDEN,
    "lm_unrolled": partial(GOLDEN, stacked_transformer_tpl=layers.StackedTransformer),
    "lm_rotary_gated_rms": partial(
        GOLDEN,
        softmax_tpl=SOFTMAX,
        position_emb_tpl=None,
        final_ln_tpl=layers.RmsNorm,
        transformer_layer_tpl=partial(
            layers.Transformer,
            ln_tpl=layers.RmsNorm,
            tr_atten_tpl=partial(ATTENTION, use_rotary_position_emb=True),
            tr_fflayer_tpl=partial(
                layers.TransformerFeedForward, activation="silu", use_gated_activation=True
            ),
        ),
    ),
}


def our_path(path: str) -> str:
    """Returns our name of a weight of Pax's LanguageModel."""
    return path.removeprefix("lm/").replace("repeat/sub/x_layers_0", "blocks")


def test_every_language_model_of_the_goldens_is_here():
    kinds = {name: case["kind"] for name, case in pax_cases().items()}
    assert set(GOLDENS) == {name for name, kind in kinds.items() if kind == "language_model"}


@pytest.mark.parametrize("name", slow_but({"lm_rotary_gated_rms"}, GOLDENS))
def test_losses_metrics_log_probs_and_gradients_equal_the_golden(name):
    golden, tolerance = goldens.load(name)
    inputs = {path: jnp.asarray(x) for path, x in golden["in"].items()}
    task = LanguageModelTask(GOLDENS[name], Learner(optax.sgd, 0.1))
    params = goldens.params_of(task.model, golden["w"])

    def objective(params):
        module = task.model.module({"params": params, "non_trainable": {}})
        outputs = module.compute_loss(
            inputs["ids"], inputs["labels"], inputs["weights"], paddings=inputs["paddings"]
        )
        logits, _ = module(inputs["ids"], paddings=inputs["paddings"])
        metrics = task.compute_loss(module, inputs, None)
        return outputs["total_loss"], (outputs, logits, metrics)

    grads, (outputs, logits, metrics) = jax.jit(jax.grad(objective, has_aux=True))(params)
    expected = dict(golden["out"])
    goldens.assert_close(logits, expected["logits"], tolerance, "logits of a call")
    # Of Pax's auxiliary losses each has a weight, which nothing reads; ours have none.
    assert set(expected) - set(outputs) == {"aux_loss_weight"} | {
        name for name in expected if name.startswith("metric/")
    }
    for path, output in outputs.items():
        goldens.assert_close(output, expected[path], tolerance, path)
    for ours, paxs in {
        "loss": "total_loss",
        "accuracy": "fraction_of_correct_next_step_preds",
    }.items():
        goldens.assert_close(metrics[ours], expected[f"metric/{paxs}"], tolerance, ours)
    bits, num_tokens = metrics["bits_per_byte"]
    nats = (bits * np.log(2), num_tokens)
    goldens.assert_close(nats, expected["metric/avg_xent"], tolerance, "avg_xent")
    expected = goldens.params_of(task.model, golden["grad"])
    for (path, of_pax), output in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(grads), strict=True
    ):
        goldens.assert_close(output, of_pax, tolerance, f"gradient of {path}")


LM = partial(layers.TransformerLm, 7, 4, 6, 2, 2, stacked_transformer_tpl=layers.StackedTransformer)
ROTARY = partial(
    layers.Transformer,
    tr_atten_tpl=partial(layers.DotProductAttention, use_rotary_position_emb=True),
)
PACKED = ("segment_ids", "segment_pos", "paddings")
PAX = {
    "packed": (LM, PACKED),
    "packed_rotary": (partial(LM, position_emb_tpl=None, transformer_layer_tpl=ROTARY), PACKED),
    "packed_learned": (partial(LM, max_seq_length=8), PACKED),
    "plain": (LM, ("paddings",)),
    "bidirectional": (partial(LM, model_type="bidirectional"), ("paddings",)),
    "prefix": (partial(LM, model_type="prefix"), ("paddings", "inputs_indicator")),
    "separate_embedding": (
        partial(
            LM,
            softmax_tpl=layers.FullSoftmax,
            separate_embedding_tpl=partial(layers.Embedding, scale_sqrt_depth=True),
            final_ln_tpl=layers.RmsNorm,
        ),
        ("paddings",),
    ),
    "entropy_loss": (partial(LM, entropy_loss_weight=0.3), ("paddings",)),
    "repeated": (partial(LM, stacked_transformer_tpl=layers.Repeat), ("paddings",)),
}


def as_ours(case):
    """Returns a case of Pax with our names of its weights."""
    return {
        **case,
        **{kind: {our_path(p): w for p, w in case[kind].items()} for kind in ("w", "grad")},
    }


def test_every_case_of_the_real_pax_is_compared():
    assert set(PAX) == set(pax_options("language_models")) - {""}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but({"plain", "packed_rotary", "prefix"}, PAX))
def test_losses_and_gradients_equal_pax(name):
    numbers, (build, names) = pax_options("language_models"), PAX[name]
    case, inputs = as_ours(numbers[name]), numbers[""]["in"]
    model = NnxModel(build)
    given = {name: inputs[name] for name in names}
    if "segment_pos" in given:
        given["positions"] = given.pop("segment_pos")

    def objective(params):
        module = model.module({"params": params, "non_trainable": {}})
        outputs = module.compute_loss(inputs["ids"], inputs["labels"], inputs["weights"], **given)
        return outputs["total_loss"], outputs

    grads, outputs = jax.jit(jax.grad(objective, has_aux=True))(
        mdl_vars_from(model, case)["params"]
    )
    for path, expected in case["out"].items():
        np.testing.assert_allclose(outputs[path], expected, rtol=1e-5, atol=3e-6, err_msg=path)
    assert_near(flat(grads), case["grad"], tolerance=5e-6)


@pytest.mark.slow
def test_a_packed_row_gives_what_its_sequences_give_alone():
    build = partial(
        layers.TransformerLm, 17, 6, 11, 3, 2, position_emb_tpl=None, transformer_layer_tpl=ROTARY
    )
    model = NnxModel(build)
    mdl_vars = drawn(model)
    ids = np.random.default_rng(1).integers(1, 17, (1, 7), dtype=np.int32)
    segments = np.asarray([[1, 1, 1, 2, 2, 2, 2]])
    positions = np.asarray([[0, 1, 2, 0, 1, 2, 3]])
    run = jax.jit(lambda v, ids, **given: model.module(v)(ids, **given)[0])
    packed = run(mdl_vars, ids, segment_ids=segments, positions=positions)
    alone = [run(mdl_vars, ids[:, :3]), run(mdl_vars, ids[:, 3:])]
    np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), rtol=1e-5, atol=2e-6)
    assert np.abs(packed - run(mdl_vars, ids)).max() > 1e-2


WINDOWED = partial(layers.Transformer, tr_atten_tpl=partial(layers.DotProductAttention, window=2))


@pytest.mark.nightly
def test_a_pattern_of_window_and_global_attention_decodes_as_it_reads():
    model = NnxModel(
        partial(
            layers.TransformerLm,
            13,
            6,
            11,
            3,
            4,
            transformer_layer_tpl=[WINDOWED, layers.Transformer],
        )
    )
    mdl_vars = drawn(model)
    assert set(mdl_vars["params"]["transformer"]["blocks"]) == {"x_layers_0", "x_layers_1"}
    ids = np.random.default_rng(2).integers(0, 13, (2, 5), dtype=np.int32)

    @jax.jit
    def run(mdl_vars):
        lm = model.module(mdl_vars)
        cache, outputs = lm.init_cache(2, 5), []
        for t in range(5):
            logits, cache = lm(
                ids[:, t : t + 1], positions=jnp.full((2, 1), t, jnp.int32), cache=cache
            )
            outputs.append(logits)
        return lm(ids)[0], jnp.concatenate(outputs, axis=1)

    whole, stepwise = run(mdl_vars)
    np.testing.assert_allclose(stepwise, whole, rtol=1e-5, atol=5e-6)


def test_every_split_of_several_blocks_cross_attention_and_separate_embeddings_is_set():
    def template(**settings):
        return fdl.Partial(layers.Transformer, **settings)

    lm = fdl.Partial(
        layers.TransformerLm,
        8,
        4,
        6,
        2,
        2,
        max_seq_length=6,
        transformer_layer_tpl=[template(), template(tr_atten_tpl=layers.DotProductAttention)],
        softmax_tpl=layers.FullSoftmax,
        separate_embedding_tpl=layers.Embedding,
        position_emb_tpl=layers.TrainablePositionalEmbedding,
    )
    both = fdl.Partial(
        layers.TransformerEncoderDecoder,
        8,
        4,
        6,
        2,
        1,
        1,
        decoder_layer_tpl=template(cross_atten_tpl=layers.DotProductAttention),
        encoder_embedding_tpl=layers.Embedding,
    )
    for model in (lm, both):
        built = fdl.build(layers.set_sharding_params(model))
        specs = dict(spec_leaves(NnxModel(built).weight_specs()["params"]))
        matrices = {
            path: spec
            for path, spec in specs.items()
            if path.endswith(("/w", "emb_var")) and "position" not in path
        }
        assert len(matrices) >= 14
        assert all({"data", "mdl"} <= set(spec.split_dims_mapping) for spec in matrices.values())
    assert specs["decoder/blocks/cross_attention/query/w"].split_dims_mapping == (
        "data",
        "mdl",
        None,
    )
    assert specs["encoder_embedding_lookup/emb_var"].split_dims_mapping == ("mdl", "data")


WRONG = {
    r"TransformerLm\.model_type.*'casual'.*causal\?": {"model_type": "casual"},
    r"TransformerLm\.num_layers.*2.*3": {"transformer_layer_tpl": [layers.Transformer] * 3},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        LM(**WRONG[message], rngs=nnx.Rngs(0))


def test_models_that_see_later_tokens_have_no_cache_and_prefixes_are_for_prefix_models():
    ids = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ConfigError, match="model_type.*'bidirectional'"):
        LM(model_type="bidirectional", rngs=nnx.Rngs(0)).init_cache(1, 3)
    with pytest.raises(ConfigError, match="'prefix'.*inputs_indicator"):
        LM(model_type="prefix", rngs=nnx.Rngs(0))(ids)
    with pytest.raises(ConfigError, match="'causal'.*inputs_indicator"):
        LM(rngs=nnx.Rngs(0))(ids, inputs_indicator=jnp.ones((1, 3)))
