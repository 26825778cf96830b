"""The bias update of DeepSeek-V3: each token counts once, on any mesh, in any microbatches."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.core.collectives import ExplicitCollectives
from praxis_lite.layers import SHARDING_PRESETS, rotary_lm, set_sharding_params
from praxis_lite.layers.moe.routing import BiasUpdate
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.layers.whole_model import preset_runs
from tests.support.lm_runs import zero_padded
from tests.support.marks import nightly_but

RATE, EXPERTS, PER_TOKEN, LAYERS, STEPS = 0.05, 5, 2, 2, 3
ROWS, TIME, VOCAB = 12, 7, 29  # No mesh divides them all.
AXES = ("replica", "data", "mdl")
EXPERT_AXES = ("data", "expert", "mdl")
MOE = functools.partial(
    fdl.Partial,
    layers.TransformerFeedForwardMoe,
    num_experts=EXPERTS,
    num_experts_per_token=PER_TOKEN,
    gating_func="top_k",
    dropless=True,
    score_func="sigmoid",
    bias_update_rate=RATE,
    moe_load_balance_loss_weight=0.0,
)


def batch():
    rng = np.random.default_rng(2)
    ids = rng.integers(0, VOCAB, (ROWS, TIME + 1)).astype(np.int32)
    weights = (rng.random((ROWS, TIME)) < 0.7).astype(np.float32)
    segments = np.ones((ROWS, TIME), np.int32)
    segments[3, 4:] = 0  # Padding, which is not routed.
    return {
        "ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "weights": weights * segments,
        "segment_ids": segments,
        "segment_pos": np.tile(np.arange(TIME, dtype=np.int32), (ROWS, 1)),
    }


def after_steps(mesh, axis_names, preset, *, stack=None, accumulation=1, gradients=None):
    """Returns the corrections [layers, E] after a few steps, from zeros and the same weights."""
    lm = rotary_lm(
        vocab_size=VOCAB,
        model_dims=16,
        hidden_dims=24,
        num_heads=2,
        dim_per_head=8,
        num_layers=LAYERS,
        tr_fflayer_tpl=MOE(),
        stacked_transformer_tpl=stack or layers.Repeat,
    )
    config, rows = lm, ()
    if preset:
        config, rows = set_sharding_params(lm, preset), SHARDING_PRESETS[preset]["batch"]
    task = LanguageModelTask(
        fdl.build(config),
        Learner(
            optax.adamw,
            0.01,
            gradient_accumulation_steps=accumulation,
        ),
        inputs_split_mapping={"map_2d": (rows or None, None)},
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=mesh, axis_names=axis_names))
    partitioner = Partitioner(task, mesh, gradients=gradients)
    key, layout, first = partitioner.key(0), partitioner.layout, preset_runs.drawn(partitioner)
    correction_of(first)[:] = 0.0
    padded = jax.tree.map(zero_padded, first, layout.padded_shapes)
    state = jax.device_put(padded, layout.shardings(mesh))
    for _ in range(STEPS):
        state, _ = partitioner.train_step(state, partitioner.global_batch(batch()), key)
    return jax.device_get(correction_of(state)).reshape(LAYERS, -1)[:, :EXPERTS]


def correction_of(state):
    return state.mdl_vars["params"]["transformer"]["blocks"]["ff_layer"]["gate_correction"]


@functools.cache
def on_one_device():
    return after_steps((1, 1, 1), AXES, None)


@pytest.mark.slow
def test_one_device_moves_by_the_rate_up_and_down():
    moved = on_one_device() / RATE
    np.testing.assert_allclose(moved, np.round(moved), atol=1e-5)
    assert moved.min() < 0 < moved.max()
    assert np.abs(moved).max() <= STEPS


PIPELINE = fdl.Partial(layers.Pipeline, num_stages=2, num_microbatches=3, stage_axis="data")
WAYS = {
    "experts and weights": {
        "mesh": (2, 4, 1),
        "axis_names": EXPERT_AXES,
        "preset": "fsdp+expert",
    },
    "data": {"mesh": (1, 8, 1), "axis_names": AXES, "preset": "fsdp"},
    "tensor": {"mesh": (1, 2, 4), "axis_names": AXES, "preset": "megatron"},
    "context": {"mesh": (1, 2, 4), "axis_names": AXES, "preset": "fsdp+context"},
    "microbatches on data": {
        "mesh": (1, 4, 2),
        "axis_names": AXES,
        "preset": "fsdp",
        "accumulation": 2,
    },
    "by hand, microbatches": {
        "mesh": (1, 4, 1),
        "axis_names": AXES,
        "preset": None,
        "gradients": ExplicitCollectives(("data",)),
        "accumulation": 3,
    },
    "pipeline": {"mesh": (1, 2, 1), "axis_names": AXES, "preset": None, "stack": PIPELINE},
    "1f1b": {
        "mesh": (1, 2, 1),
        "axis_names": AXES,
        "preset": None,
        "stack": PIPELINE,
        "gradients": layers.OneForwardOneBackward(),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    nightly_but({"experts and weights", "by hand, microbatches"}, WAYS),
)
def test_a_mesh_counts_each_token_once(way):
    np.testing.assert_array_equal(after_steps(**WAYS[way]), on_one_device())


def test_the_update_is_the_papers():
    choices = np.asarray([[4.0, 4.0, 4.0], [0.0, 12.0, 0.0], [5.0, 4.0, 3.0]])
    correction = np.asarray([[1.0, 2.0, 3.0]] * 3, np.float32)
    expected = correction + 0.5 * np.sign(choices.mean(1, keepdims=True) - choices)
    actual = BiasUpdate(0.5)(jnp.asarray(correction), jnp.asarray(choices, jnp.float32))
    np.testing.assert_array_equal(actual, expected)


def test_a_layer_counts_the_choices_of_its_tokens():
    build = fdl.build(MOE())
    layer = build(16, 24, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(3, 5, 16)).astype(np.float32)
    paddings = np.zeros((3, 5), np.float32)
    paddings[1, 2:] = 1.0
    nnx.jit(lambda layer, x: layer(x, paddings=paddings))(layer, x)
    logits = np.asarray(layer.layer_norm(x)) @ np.asarray(layer.gate[...])
    best = np.argsort(-logits, axis=-1)[..., :PER_TOKEN]
    expected = np.bincount(best[paddings == 0].reshape(-1), minlength=EXPERTS)
    np.testing.assert_array_equal(layer.expert_choices[...], expected)


def test_a_rate_without_a_correction_is_refused():
    with pytest.raises(ConfigError, match="bias_update_rate.*0.05.*sigmoid"):
        fdl.build(MOE(score_func="softmax"))(16, 24, rngs=nnx.Rngs(0))
