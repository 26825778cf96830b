"""Softmaxes: option values of the real Pax, whole and chunked; losses by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.layers import AuxLoss, intermediates
from praxis_lite.layers.embedding.cross_entropy import stats_of_logits
from tests.support.goldens import pax_options
from tests.support.pax_options import flat, mdl_vars_from

# B batch, T time, D input dims, V classes.
PAX = pax_options("softmaxes")
IN = {name: jnp.asarray(x) for name, x in PAX[""]["in"].items()}
FULL, SHARED = layers.FullSoftmax, layers.SharedEmbeddingSoftmax
CLASS_MAJOR = layers.NClassMajorSharedEmbeddingSoftmax
CASES = {
    "soft_cap": (FULL, {"soft_cap_logits": 0.7}),
    "z_loss": (FULL, {"z_loss_weight": 0.3}),
    "scale_before_logits": (FULL, {"scale_before_logits": True}),
    "class_probabilities": (FULL, {"label_smoothing_prob": 0.2}),
    "shared_all": (
        SHARED,
        {
            "soft_cap_logits": 0.9,
            "z_loss_weight": 0.2,
            "label_smoothing_prob": 0.15,
            "scale_sqrt_depth": True,
            "lookup_style": "matmul",
        },
    ),
    "no_smoothing_in_eval": (
        FULL,
        {"label_smoothing_prob": 0.15, "label_smoothing_apply_for_eval": False},
    ),
    "smoothing_in_training": (
        FULL,
        {"label_smoothing_prob": 0.15, "label_smoothing_apply_for_eval": False},
    ),
    "class_major": (CLASS_MAJOR, {"scale_sqrt_depth": True}),
    "class_major_all": (
        CLASS_MAJOR,
        {
            "use_bias": False,
            "soft_cap_logits": 0.9,
            "z_loss_weight": 0.2,
            "label_smoothing_prob": 0.15,
            "activation": "SiLU",
            "lookup_style": "matmul",
        },
    ),
}


def model_of(layer, **options) -> NnxModel:
    return NnxModel(functools.partial(layer, 13, 7, **options))


# Of each option and each layer one, in chunks.
QUICK = {
    (name, 4)
    for name in (
        "scale_before_logits",
        "class_probabilities",
        "shared_all",
        "no_smoothing_in_eval",
        "class_major_all",
    )
}


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(CASES, [None, 4])
    ],
)
def test_option_values_equal_pax(name, chunk_size):
    layer, options = CASES[name]
    golden, model = PAX[name], model_of(layer, chunk_size=chunk_size, **options)
    mdl_vars = mdl_vars_from(model, golden)
    probabilities = IN["probs"] if name == "class_probabilities" else None
    key = jax.random.key(0) if name == "smoothing_in_training" else None

    def objective(params, x):
        module = model.module({**mdl_vars, "params": params})
        outputs = module.compute_loss(
            x, IN["ids"], IN["weights"], class_probabilities=probabilities, key=key
        )
        if "z_loss" in outputs:
            (aux_loss,) = intermediates(module, AuxLoss).values()
            np.testing.assert_array_equal(aux_loss is outputs["z_loss"], True)
        outputs["emb"] = module.emb_lookup(IN["ids"]) if layer is not FULL else None
        return 1.3 * outputs["total_xent"] + 0.7 * outputs.get("z_loss", 0.0), outputs

    run = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
    (grads, x_grad), outputs = run(mdl_vars["params"], IN["x"])
    is_whole = chunk_size is None or probabilities is not None
    assert set(outputs) - set(golden["out"]) <= {"emb", "log_probs"}
    assert set(golden["out"]) - set(outputs) == (set() if is_whole else {"logits"})
    for path in set(outputs) & set(golden["out"]):
        np.testing.assert_allclose(
            outputs[path], golden["out"][path], rtol=1e-5, atol=1e-5, err_msg=path
        )
    assert set(flat(grads)) == set(golden["grad"])
    for path, expected in golden["grad"].items():
        np.testing.assert_allclose(flat(grads)[path], expected, rtol=2e-5, atol=1e-5, err_msg=path)
    np.testing.assert_allclose(x_grad, golden["gin"]["x"], rtol=2e-5, atol=1e-5)


@pytest.mark.slow
def test_logits_are_float32_and_those_of_compute_loss_in_bfloat16():
    model = model_of(SHARED, soft_cap_logits=2.0)
    module = model.module(model.init(jax.random.key(0)))
    x = IN["x"].astype(jnp.bfloat16)
    logits = module(x)
    assert logits.dtype == jnp.float32
    outputs = module.compute_loss(x, IN["ids"], IN["weights"])
    np.testing.assert_array_equal(outputs["logits"], logits)
    np.testing.assert_allclose(outputs["log_probs"], jax.nn.log_softmax(logits), atol=1e-6)
    whole = module(IN["x"])
    error = np.abs(logits - whole).max() / np.abs(whole).max()
    assert 1e-4 < error < 0.02


def test_labels_may_have_pax_last_dim_and_a_label_that_is_no_class_costs_nothing():
    module = FULL(13, 7, rngs=nnx.Rngs(0))
    ids = IN["ids"].at[0, 1].set(-1)
    chunked_module = FULL(13, 7, chunk_size=3, rngs=nnx.Rngs(0))

    @jax.jit
    def run(x, ids, weights):
        return (
            module.compute_loss(x, ids[..., None], weights[..., None]),
            module.compute_loss(x, ids, weights),
            chunked_module.compute_loss(x, ids, weights),
        )

    actual, expected, chunked = run(IN["x"], ids, IN["weights"])
    for name in ("total_xent", "accuracy", "per_example_xent"):
        np.testing.assert_array_equal(actual[name], expected[name])
        np.testing.assert_allclose(chunked[name], expected[name], rtol=1e-5, atol=1e-6)
    assert expected["per_example_xent"][0, 1] == 0.0


def test_a_batch_of_padding_has_no_nan():
    @jax.jit
    def run(x):
        module = FULL(13, 7, z_loss_weight=0.1, rngs=nnx.Rngs(0))
        return module.compute_loss(x, IN["ids"], jnp.zeros((2, 5)))

    outputs = run(IN["x"])
    assert all(np.isfinite(x).all() for x in outputs.values())
    assert outputs["accuracy"] == outputs["avg_xent"] == outputs["z_loss"] == 0.0


WRONG = {
    r"FullSoftmax\.soft_cap_logits.*-1": {"soft_cap_logits": -1.0},
    r"FullSoftmax\.z_loss_weight.*nan": {"z_loss_weight": float("nan")},
    r"FullSoftmax\.label_smoothing_prob.*1\.0": {"label_smoothing_prob": 1.0},
    r"FullSoftmax\.label_smoothing_prob.*-0\.1": {"label_smoothing_prob": -0.1},
    r"FullSoftmax\.chunk_size.*0": {"chunk_size": 0},
    r"FullSoftmax\.chunk_size.*2\.5": {"chunk_size": 2.5},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_is_named(message):
    with pytest.raises(ConfigError, match=message):
        FULL(13, 7, **WRONG[message], rngs=nnx.Rngs(0))


def test_other_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="label_smoothing_prob.*0.1"):
        FULL(1, 7, label_smoothing_prob=0.1, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="SharedEmbeddingSoftmax.lookup_style.*'x'"):
        SHARED(13, 7, lookup_style="x", rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="SharedEmbeddingSoftmax.activation.*'silo'"):
        CLASS_MAJOR(13, 7, activation="silo", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="class_ids.*class_probabilities"):
        FULL(13, 7, rngs=nnx.Rngs(0)).compute_loss(IN["x"], None, IN["weights"])


def test_statistics_of_logits_are_those_of_jax():
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 4, (6, 11)).astype(np.float32)  # With equals.
    logits[3], logits[4, 5] = -np.inf, np.nan
    logits[5, [2, 7]] = np.inf

    def ours(x):
        stats = stats_of_logits(x, None)
        return stats.log_z, stats.argmax

    def of_jax(x):
        return jax.nn.logsumexp(x, axis=-1), jnp.argmax(x, axis=-1)

    @jax.jit
    def run(logits):
        outputs = ours(logits), of_jax(logits)
        grads = [jax.grad(lambda x, f=f: jnp.sum(f(x)[0] ** 2))(logits[:3]) for f in (ours, of_jax)]
        return *outputs, *grads

    (log_z, argmax), (expected_log_z, expected_argmax), grad, expected_grad = run(logits)
    np.testing.assert_array_equal(argmax, expected_argmax)
    np.testing.assert_allclose(log_z, expected_log_z, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-6)
