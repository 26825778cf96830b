"""Larger layers over Explicit axes: typed but pipelines, with numbers and bytes of Auto axes."""

import functools
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import layers
from praxis_lite.core import (
    ConfigError,
    Learner,
    MeshConfig,
    Partitioner,
    Task,
    WeightSharding,
    constrain,
    make_mesh,
)
from praxis_lite.experiments.linen import next_token_loss
from praxis_lite.experiments.linen_models import CausalLm
from praxis_lite.layers import SHARDING_PRESETS, AuxLoss, intermediates, set_sharding_params
from praxis_lite.models import LinenModel
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from tests.layers.recurrent.test_recurrents import SPLIT as RG_LRU
from tests.layers.whole_model.preset_runs import batch_of, bytes_by_kind, even_lm, losses
from tests.support.lm_runs import structs
from tests.support.marks import nightly_but, slow_but

AXES, EXPERTS = ("replica", "data", "mdl"), ("data", "expert", "mdl")
STAGES = ("stage", "data", "mdl")
# Of a batch, on each mesh.
ROWS, ROWS_OF_EXPERTS, ROWS_OF_STAGES = AXES[:2], EXPERTS[:2], STAGES[:2]
TOKENS = batch_of(16, 12, 64)


def floats(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}


def by_rank(rows: tuple[str, ...]) -> dict[str, Any]:
    return {f"map_{rank}d": (rows, *(None,) * (rank - 1)) for rank in range(1, 5)}


class OfLayer(Task):
    """A loss of one layer's outputs."""

    required_inputs = ("x",)

    def __init__(self, build, call, rows):
        learner = Learner(optax.adamw, 0.01)
        super().__init__(build, learner, inputs_split_mapping=by_rank(rows))
        self.call, self.rows = call, rows

    def compute_loss(self, model, inputs, key):
        x = constrain(inputs["x"], (self.rows,))
        loss = jnp.mean(jnp.sin(self.call(model, x, key).astype(jnp.float32)))
        return {"loss": (loss + sum(intermediates(model, AuxLoss).values()), jnp.ones(()))}


def experts(**settings: Any) -> OfLayer:
    build = functools.partial(
        layers.TransformerFeedForwardMoe,
        8,
        16,
        num_experts=8,
        **settings,
        weight_split_dims_mapping=("expert", "data", "mdl"),
        gate_split_dims_mapping=("data", None),
        activation_split_dims_mapping=(ROWS_OF_EXPERTS, None, None),
    )
    return OfLayer(build, lambda module, x, key: module(x, key=key), ROWS_OF_EXPERTS)


def vision(layer: Any, *args: Any) -> OfLayer:
    build = functools.partial(
        layer,
        *args,
        weight_split_dims_mapping=(None, None, "data", "mdl"),
        activation_split_dims_mapping=(ROWS, None, None, "mdl"),
    )
    return OfLayer(build, lambda module, x, key: module(x, key=key), ROWS)


def language_model(lm: fdl.Partial, rows: Any, **settings: Any) -> LanguageModelTask:
    return LanguageModelTask(
        fdl.build(lm), Learner(optax.adamw, 0.01), inputs_split_mapping=by_rank(rows), **settings
    )


def on_stages() -> LanguageModelTask:
    lm = even_lm()
    lm.stacked_transformer_tpl = fdl.Partial(layers.Pipeline, num_stages=2, num_microbatches=4)
    set_sharding_params(lm, {**SHARDING_PRESETS["megatron"], "batch": ("data",)})
    lm.softmax_tpl.activation_split_dims_mapping = (ROWS_OF_STAGES, None, "mdl")
    lm.softmax_tpl.lookup_split_dims_mapping = (ROWS_OF_STAGES, None, None)
    return language_model(lm, ROWS_OF_STAGES)


# By name: the axes of the mesh, a task, its batch, the Partitioner's other settings.
CASES: dict[str, tuple] = {
    "experts with slots": (
        EXPERTS,
        functools.partial(experts, expert_capacity_dim=3),
        floats(8, 12, 8),
        {},
    ),
    "experts chosen with a bias": (
        EXPERTS,
        functools.partial(
            experts,
            dropless=True,
            gating_func="top_k",
            score_func="sigmoid",
            has_bias=True,
            num_shared_experts=1,
            bias_update_rate=0.01,
            moe_load_balance_loss_weight=0.0,
        ),
        floats(8, 12, 8),
        {},
    ),
    "rg_lru": (
        AXES,
        lambda: OfLayer(
            functools.partial(RG_LRU, 8, 4, dim_per_head=4),
            lambda module, x, key: module(x)[0],
            ROWS,
        ),
        floats(8, 6, 8),
        {},
    ),
    "convolution and batch norm": (
        AXES,
        lambda: vision(layers.ConvBNAct, (3, 3, 4, 8), (2, 1)),
        floats(8, 8, 8, 4),
        {},
    ),
    "int8": (
        AXES,
        lambda: language_model(
            set_sharding_params(even_lm(), "fsdp+tensor"), ROWS, quantization="int8"
        ),
        TOKENS,
        {},
    ),
    "pipeline": (STAGES, on_stages, TOKENS, {}),
    "1F1B": (STAGES, on_stages, TOKENS, {"gradients": layers.OneForwardOneBackward()}),
}


def partitioner_of(name: str, axis_types: str) -> tuple[Partitioner, dict[str, np.ndarray]]:
    axis_names, task, batch, settings = CASES[name]
    mesh = make_mesh(
        MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=axis_names, axis_types=axis_types)
    )
    return Partitioner(task(), mesh, **settings), batch


# What JAX has no types of (docs/upstream.md), and what is noted of it.
UNTYPED = {"pipeline": "transformer", "1F1B": "the Pipeline and its ends"}
# A table that model dims split too is gathered twice, as in test_explicit_axes.py.
SECOND_GATHERS = {"int8": 32 * 32 * 4}


# The others take longer to trace, and are below, or are typed in test_layers_on_meshes.py too.
@pytest.mark.parametrize(
    "name",
    slow_but(
        {"experts with slots", "pipeline"},
        ["experts with slots", "experts chosen with a bias", "pipeline"],
    ),
)
def test_it_is_typed_or_noted(name):
    partitioner, batch = partitioner_of(name, "explicit")
    partitioner.train_step.trace(structs(batch))
    assert list(partitioner.train_step.untyped) == ([UNTYPED[name]] if name in UNTYPED else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    nightly_but({"rg_lru", "convolution and batch norm"}, CASES),
)
def test_its_losses_and_bytes_are_those_of_auto_axes(name):
    partitioner, batch = partitioner_of(name, "explicit")
    actual, compiled = losses(partitioner, batch)
    expected, compiled_auto = losses(*partitioner_of(name, "auto"))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert len(set(actual)) == len(actual)
    assert list(partitioner.train_step.untyped) == ([UNTYPED[name]] if name in UNTYPED else [])
    bytes_sent, of_auto = bytes_by_kind(compiled), bytes_by_kind(compiled_auto)
    of_auto["all-gather"] += SECOND_GATHERS.get(name, 0)
    if name in UNTYPED:
        assert sum(bytes_sent.values()) <= sum(of_auto.values())
        return
    for kind in bytes_sent | of_auto:
        # Means and counts of a few bytes are summed apart.
        assert bytes_sent.get(kind, 0) <= of_auto.get(kind, 0) + 16, kind


def test_a_linen_models_line_without_a_type_is_named():
    rules = {"batch": ROWS, "embed": "data", "heads": "mdl", "mlp": "mdl", "vocab": "mdl"}
    model = LinenModel(
        CausalLm(vocab_size=64, model_dims=32, mlp_dims=64, num_heads=4, num_layers=1),
        {"ids": ("int32", (1, 12))},
    )
    names = (*rules.items(), ("layers", None), ("kv", None))
    task = LossTask(
        model,
        next_token_loss,
        Learner(optax.sgd, 0.1),
        inputs_split_mapping=by_rank(ROWS),
        weight_sharding=WeightSharding(logical_axis_rules=names),
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2), axis_types="explicit"))
    with pytest.raises(ConfigError, match=r"linen_models.py:\d+ \(.*untyped"):
        Partitioner(task, mesh).train_step.trace(structs(TOKENS))
