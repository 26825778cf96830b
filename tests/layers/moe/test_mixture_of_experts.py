"""Mixture of experts against the real Pax, against loops in NumPy, and without a capacity."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.layers import AuxLoss, TransformerFeedForwardMoe, intermediates
from tests.support.goldens import pax_options
from tests.support.marks import slow_but
from tests.support.pax_options import flat, mdl_vars_from

PAX = pax_options("moe")
INPUTS = PAX.pop("")["in"]
GATED = {"use_gated_activation": True}
# Settings of each case beside num_experts=5 and num_groups=3; whether paddings and segments go in.
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "top2": ({}, ()),
    "top2_paddings": ({}, ("paddings",)),
    "top2_overflow": ({"unadjusted_expert_capacity_factor": 0.0, "expert_capacity_dim": 2}, ()),
    "top2_one_group_gated_cap": (
        {
            **GATED,
            "num_groups": 1,
            "activation": "silu",
            "gating_logit_cap": 0.7,
            "moe_load_balance_loss_weight": 0.01,
            "residual_weight": 0.5,
        },
        ("paddings",),
    ),
    "top2_min_group_size": (
        {"num_groups": 6, "min_group_size": 7, "unadjusted_expert_capacity_factor": 1.0},
        (),
    ),
    "top2_post": ({"norm_policy": "post", "apply_padding_first": True}, ("paddings",)),
    "top2_primer_hybrid": (
        {
            "norm_policy": "primer_hybrid",
            "ln_tpl": layers.RmsNorm,
            "add_skip_connection": False,
        },
        (),
    ),
    "top2_sentence": (
        {
            "moe_gating_embedding_level": "sentence",
            "expert_capacity_dim": 3,
            "unadjusted_expert_capacity_factor": 1.0,
        },
        ("paddings", "segment_ids"),
    ),
    "top2_sentence_paddings": ({"moe_gating_embedding_level": "sentence"}, ("paddings",)),
    "top2_sentence_alone": ({"moe_gating_embedding_level": "sentence"}, ()),
    "expert_choice": ({"gating_func": "expert_choice"}, ("paddings",)),
    "expert_choice_v2": (
        {**GATED, "gating_func": "expert_choice_v2", "activation": "gelu"},
        ("paddings",),
    ),
    "dense_top2": ({"gating_func": "dense_top2"}, ("paddings",)),
}


# Of each gating function and each place of the norm, one.
QUICK = {
    "top2_overflow",
    "top2_one_group_gated_cap",
    "top2_post",
    "top2_sentence",
    "expert_choice",
    "dense_top2",
}


@functools.cache
def our_numbers(is_quick: bool) -> dict[str, Any]:
    """Returns outputs and gradients by case, from one program for quick cases or others."""

    def one(name):
        settings, given = SETTINGS[name]
        model = NnxModel(
            functools.partial(
                TransformerFeedForwardMoe, 6, 10, **{"num_experts": 5, "num_groups": 3, **settings}
            )
        )
        inputs = {kind: INPUTS[kind] for kind in given}
        if "segment_ids" in inputs:
            inputs["segment_ids"] = inputs["segment_ids"].astype(int)

        def objective(params, x):
            module = model.module({"params": params, "non_trainable": {}})
            y = module(x, **inputs)
            aux = sum(intermediates(module, AuxLoss).values())
            weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            outputs = {"y": y, "aux": aux, "dropped": module.over_capacity_ratio[...]}
            return jnp.sum(y * weights) + aux, outputs

        params = mdl_vars_from(model, PAX[name])["params"]
        return jax.grad(objective, argnums=(0, 1), has_aux=True), params

    cases = {name: one(name) for name in SETTINGS if (name in QUICK) == is_quick}
    run = jax.jit(lambda all_params, x: {n: cases[n][0](p, x) for n, p in all_params.items()})
    return jax.device_get(run({name: params for name, (_, params) in cases.items()}, INPUTS["x"]))


@pytest.mark.parametrize("name", slow_but(QUICK, SETTINGS))
def test_as_the_real_pax(name):
    """Outputs, auxiliary loss, share dropped; gradients of weights and inputs."""
    case, ((grads, x_grad), outputs) = PAX[name], our_numbers(name in QUICK)[name]
    expected = case["out"]
    np.testing.assert_allclose(outputs["y"], expected["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs["aux"], expected["aux"], rtol=1e-6)
    np.testing.assert_allclose(x_grad, case["gin"]["x"], rtol=1e-4, atol=2e-6)
    for path, grad in flat(grads).items():
        np.testing.assert_allclose(grad, case["grad"][path], rtol=1e-4, atol=5e-6, err_msg=path)
    if "over_capacity_1_ratio" in expected:
        dropped = (expected["over_capacity_1_ratio"] + expected["over_capacity_2_ratio"]) / 2
        np.testing.assert_allclose(outputs["dropped"], dropped, rtol=1e-6)


def test_the_cases_drop_tokens():
    """Otherwise the test above would not see how Pax fills the experts."""
    dropped = {name: PAX[name]["out"].get("over_capacity_2_ratio", 0.0) for name in PAX}
    assert set(dropped) == set(SETTINGS)
    assert sum(share > 0.0 for share in dropped.values()) >= 4


D, F, E, K = 5, 7, 4, 3
MOE = functools.partial(
    TransformerFeedForwardMoe, D, F, num_experts=E, gating_func="top_k", num_experts_per_token=K
)
ENOUGH = {"unadjusted_expert_capacity_factor": 0.0, "expert_capacity_dim": 100}
LOSSES = {"moe_load_balance_loss_weight": 0.3, "moe_router_z_loss_weight": 0.2}
X = np.random.default_rng(3).normal(size=(3, 11, D)).astype(np.float32)
PADDINGS = np.zeros((3, 11), np.float32)
PADDINGS[0, 6:] = PADDINGS[2, 1] = 1.0


def drawn(model: NnxModel, scale: float = 0.5) -> Any:
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda w: jnp.asarray(rng.normal(scale=scale, size=w.shape), jnp.float32),
        jax.eval_shape(model.init, jax.random.key(0))["params"],
    )


def run(build, params=None, x=X, key=None, **inputs):
    """Returns outputs, auxiliary losses, gradients of both together with respect to weights, x."""
    model = NnxModel(build)
    params = drawn(model) if params is None else params

    def objective(params, x):
        module = model.module({"params": params, "non_trainable": {}})
        y = module(x, key=key, **inputs)
        y = y[0] if isinstance(y, tuple) else y
        losses = {k: jnp.sum(v) for k, v in intermediates(module, AuxLoss).items()}
        cosines = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y.astype(jnp.float32) * cosines) + sum(losses.values()), (y, losses)

    grads, (y, losses) = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(params, x)
    return {"outputs": y, "losses": losses, "grads": grads}


def outputs_of(build, x=X, keys=(None,)):
    """Returns the outputs for each key, without gradients: quicker to compile."""
    model = NnxModel(build)
    call = jax.jit(lambda p, key: model.module({"params": p, "non_trainable": {}})(x, key=key))
    return [np.asarray(call(drawn(model), key)) for key in keys]


def assert_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(a, b, err_msg=str(path), **tolerance)


@pytest.fixture(scope="module")
def dropless():
    return run(functools.partial(MOE, dropless=True, **GATED, **LOSSES), paddings=PADDINGS)


def test_dropless_is_a_loop_over_tokens_and_their_experts(dropless):
    model = NnxModel(functools.partial(MOE, dropless=True, **GATED))
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), drawn(model))
    mean, variance = X.mean(-1, keepdims=True), X.var(-1, keepdims=True)
    normed = (X - mean) / np.sqrt(variance + 1e-6) * (1 + w["layer_norm"]["scale"])
    normed += w["layer_norm"]["bias"]
    expected = X.astype(np.float64)
    for b, t in zip(*np.nonzero(PADDINGS == 0), strict=True):
        token = normed[b, t]
        probs = np.exp(token @ w["gate"])
        best = np.argsort(-probs)[:K]
        for expert in best:
            hidden = token @ w["wi_0"][expert] * np.maximum(token @ w["wi_gate_0"][expert], 0)
            expected[b, t] += probs[expert] / probs[best].sum() * hidden @ w["wo_0"][expert]
    np.testing.assert_allclose(dropless["outputs"], expected, atol=1e-5)
    np.testing.assert_array_equal(dropless["outputs"][PADDINGS == 1], X[PADDINGS == 1])


def test_dropless_equals_a_capacity_that_is_large_enough(dropless):
    ample = run(functools.partial(MOE, **ENOUGH, **GATED, **LOSSES), paddings=PADDINGS)
    assert_close(ample, dropless, rtol=1e-4, atol=1e-5)


def test_dropless_outputs_move_with_the_rows_and_their_tokens(dropless):
    rows, tokens = np.array([2, 0, 1]), np.random.default_rng(4).permutation(11)
    moved = run(
        functools.partial(MOE, dropless=True, **GATED, **LOSSES),
        x=X[rows][:, tokens],
        paddings=PADDINGS[rows][:, tokens],
    )
    expected = np.asarray(dropless["outputs"])[rows][:, tokens]
    np.testing.assert_allclose(moved["outputs"], expected, atol=1e-6)
    assert_close(moved["losses"], dropless["losses"], rtol=1e-6)


@pytest.mark.parametrize("given", slow_but({"paddings"}, ["paddings", "segment_ids"]))
def test_padded_tokens_take_no_slot_and_change_nothing(given):
    settings = {"unadjusted_expert_capacity_factor": 0.0, "expert_capacity_dim": 3, **LOSSES}
    build = functools.partial(MOE, **settings)
    mask = PADDINGS if given == "paddings" else (PADDINGS == 0).astype(int)
    before = run(build, **{given: mask})
    other = np.where(PADDINGS[..., None] == 1, 3.0 + X, X)
    after = run(build, x=other, **{given: mask})
    is_token = PADDINGS == 0
    np.testing.assert_array_equal(before["outputs"][is_token], after["outputs"][is_token])
    assert_close(after["losses"], before["losses"], rtol=1e-6)
    # Row 0's tokens alone are routed as with its padding.
    (alone,) = outputs_of(build, x=X[:1, :6])
    np.testing.assert_allclose(before["outputs"][:1, :6], alone, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences():
    """A step is too small to change a token's experts."""
    build = functools.partial(MOE, **ENOUGH, **GATED, **LOSSES, activation="silu")
    model, x = NnxModel(build), X[:1, :4].astype(np.float64)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda w: w.astype(jnp.float64), drawn(model))
        direction = jax.tree.map(lambda w: jnp.cos(jnp.arange(w.size)).reshape(w.shape), params)

        @jax.jit
        def objective(params):
            module = model.module({"params": params, "non_trainable": {}})
            y = module(x, key=None)
            return jnp.sum(jnp.sin(y)) + sum(intermediates(module, AuxLoss).values())

        # Norms, the router and losses are float32 within: hence a wide step.
        step = 1e-3
        ahead, behind = (
            objective(jax.tree.map(lambda w, d, h=h: w + h * d, params, direction))
            for h in (step, -step)
        )
        slopes = jax.tree.map(lambda g, d: jnp.sum(g * d), jax.grad(objective)(params), direction)
        slope = sum(map(float, jax.tree.leaves(slopes)))
        change = float(ahead) - float(behind)
    assert abs(slope) > 0.1
    assert change / (2 * step) == pytest.approx(slope, rel=2e-3)


class Block(layers.IdentityNorm):
    """A layer with the call that Repeat wants."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.moe = MOE(second_expert_policy="all", **LOSSES, rngs=rngs)

    def __call__(self, x, *, key=None, cache=None):
        return self.moe(x, key=key), cache


def stack(**options):
    return functools.partial(layers.Repeat, Block, 2, **options)


@pytest.mark.slow
def test_scanned_equals_unrolled_and_remat_equals_none():
    """Both in one: the scanned stack computes again, the unrolled one keeps everything.

    Auxiliary losses too: they are assigned inside the scan and the checkpoint.
    """
    params = drawn(NnxModel(stack()))
    scanned = run(stack(), params)
    assert scanned["losses"]["blocks/moe/aux_moe_load_balance_loss"] > 0.3
    apart = {
        "blocks": {str(i): jax.tree.map(lambda w, i=i: w[i], params["blocks"]) for i in range(2)}
    }
    unrolled = run(stack(unroll=True, checkpoint_policy="save_everything"), apart)
    np.testing.assert_allclose(unrolled["outputs"], scanned["outputs"], atol=1e-5)
    for name in ("load_balance", "router_z"):
        total = sum(v for path, v in unrolled["losses"].items() if name in path)
        item = scanned["losses"][f"blocks/moe/aux_moe_{name}_loss"]
        np.testing.assert_allclose(total, item, rtol=1e-5)
    for i in range(2):
        expected = jax.tree.map(lambda g, i=i: g[i], scanned["grads"][0]["blocks"])
        assert_close(unrolled["grads"][0]["blocks"][str(i)], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [ENOUGH, {"dropless": True}], ids=["capacity", "dropless"])
def test_bfloat16_is_close_to_float32(settings):
    build = functools.partial(MOE, **settings, **GATED)
    params = drawn(NnxModel(build), scale=0.3)
    half, whole = (run(build, params, x=X.astype(dtype)) for dtype in (jnp.bfloat16, X.dtype))
    assert half["outputs"].dtype == jnp.bfloat16
    # A token whose second and third expert are as likely may go to another: half a percent here.
    error = np.abs(np.asarray(half["outputs"], np.float32) - whole["outputs"])
    assert 1e-4 < np.median(error) < 0.01
    assert np.quantile(error, 0.95) < 0.05
    for loss, expected in whole["losses"].items():
        assert half["losses"][loss].dtype == jnp.float32
        np.testing.assert_allclose(half["losses"][loss], expected, rtol=0.02)


def test_a_token_by_itself_gets_what_it_gets_among_others():
    """So that a decode step, whose groups are single tokens, gives what the whole sequence does."""
    build = functools.partial(MOE, **ENOUGH)
    (whole,) = outputs_of(build)
    for settings in (ENOUGH, {}, {"num_groups": 64, "min_group_size": 3}):
        (item,) = outputs_of(functools.partial(MOE, **settings), x=X[:, 4:5])
        np.testing.assert_allclose(item, whole[:, 4:5], atol=1e-6)


def test_decode_steps_drop_nothing_though_rows_share_a_group_and_all_want_one_expert():
    tight = {"num_groups": 1, "unadjusted_expert_capacity_factor": 0.0, "expert_capacity_dim": 1}
    same = np.repeat(X[:1, :1], 4, axis=0)
    (actual,) = outputs_of(functools.partial(MOE, **tight), x=same)
    (expected,) = outputs_of(functools.partial(MOE, dropless=True), x=same)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_the_second_expert_is_drawn_in_training_only():
    build = functools.partial(
        TransformerFeedForwardMoe, D, F, num_experts=E, second_expert_policy="sampling", **ENOUGH
    )
    keys = (jax.random.key(0), jax.random.key(0), jax.random.key(1), None)
    first, same, other, without = outputs_of(build, keys=keys)
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 1e-3
    greedy = functools.partial(TransformerFeedForwardMoe, D, F, num_experts=E, **ENOUGH)
    np.testing.assert_array_equal(without, outputs_of(greedy)[0])


@pytest.mark.slow
def test_it_stands_in_a_transformer_block_and_its_losses_are_found():
    block = functools.partial(
        layers.Transformer,
        D + 1,
        F,
        2,
        tr_fflayer_tpl=functools.partial(
            TransformerFeedForwardMoe, num_experts=E, moe_router_z_loss_weight=1.0
        ),
    )
    actual = run(block, x=np.repeat(X[:, :, :1], D + 1, -1), paddings=PADDINGS)
    assert set(actual["losses"]) == {
        "ff_layer/aux_moe_load_balance_loss",
        "ff_layer/aux_moe_router_z_loss",
    }


WRONG = {
    r"TransformerFeedForwardMoe\.num_experts.*2.*3.*num_experts_per_token": {
        "num_experts": 2,
        "gating_func": "top_k",
        "num_experts_per_token": 3,
    },
    "num_experts.*1.*2": {"num_experts": 1},
    "num_experts.*0": {"num_experts": 0},
    "num_experts_per_token.*3.*2.*'top2'": {"num_experts_per_token": 3},
    "gating_func.*'top3'.*top2": {"gating_func": "top3"},
    r"second_expert_policy.*'al'.*all\?": {"second_expert_policy": "al"},
    "second_expert_policy.*'random'.*'all'.*gating_func": {
        "second_expert_policy": "random",
        "gating_func": "top_k",
    },
    r"capacity_factor.*0\.0.*expert_capacity_dim.*0": {"unadjusted_expert_capacity_factor": 0.0},
    r"capacity_factor.*-1\.0": {"unadjusted_expert_capacity_factor": -1.0},
    "dropless=True.*gating_func 'expert_choice'.*False": {
        "dropless": True,
        "gating_func": "expert_choice",
    },
    r"relu_dropout_prob.*0\.1.*0": {"dropless": True, "relu_dropout_prob": 0.1},
    "moe_router_z_loss_weight.*-1": {"moe_router_z_loss_weight": -1},
    "moe_gating_embedding_level.*'word'": {"moe_gating_embedding_level": "word"},
    "norm_policy.*'prae'.*pre": {"norm_policy": "prae"},
    "activation.*'rely'.*relu": {"activation": "rely"},
    "num_groups.*-3": {"num_groups": -3},
    r"TransformerFeedForwardMoe\.min_group_size.*0": {"min_group_size": 0},
    "4.*33.*3.*11.*num_groups": {"num_groups": 4},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_is_named(message):
    settings = {"num_experts": 4, **WRONG[message]}
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: TransformerFeedForwardMoe(D, F, **settings, rngs=nnx.Rngs(0))(X))


def test_weights_are_drawn_as_pax_draws_them():
    uniform = TransformerFeedForwardMoe(D, 200, num_experts=9, rngs=nnx.Rngs(0))
    for weight, fan_in in (("gate", D), ("wi_0", D), ("wo_0", 200)):
        w, limit = np.asarray(getattr(uniform, weight)[...]), (3 / fan_in) ** 0.5
        assert np.abs(w).max() <= limit
        assert w.std() == pytest.approx(fan_in**-0.5, rel=0.2)
    for is_explicit, fans in ((True, D + 200), (False, 9 * (D + 200))):
        xavier = TransformerFeedForwardMoe(
            D,
            200,
            num_experts=9,
            internal_gshard_variance_scaling_fan_in_init=False,
            explicit_fan_in_fan_out_axes=is_explicit,
            rngs=nnx.Rngs(0),
        )
        assert np.abs(xavier.wo_0[...]).max() == pytest.approx((6 / fans) ** 0.5, rel=0.01)
