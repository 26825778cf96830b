"""Jobs of each family over Explicit axes, of sizes that divide: numbers and bytes of Auto axes.

All but pipelines are typed.
"""

import copy
import functools
from typing import Any

import fiddle as fdl
import numpy as np
import optax
import pytest

from praxis_lite import layers
from praxis_lite.config.build import build
from praxis_lite.core import (
    ConfigError,
    Learner,
    MeshConfig,
    Partitioner,
    Task,
    WeightSharding,
    make_mesh,
)
from praxis_lite.experiment.registry import get_experiment, list_experiments
from praxis_lite.experiments.finetune import LORA
from praxis_lite.experiments.linen import next_token_loss
from praxis_lite.experiments.linen_models import CausalLm
from praxis_lite.experiments.published import names
from praxis_lite.layers import SHARDING_PRESETS, adapted, set_sharding_params, with_reference
from praxis_lite.models import LinenModel
from praxis_lite.tasks.image_classification import ClassificationTask
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from praxis_lite.tasks.preference import DpoTask
from praxis_lite.tasks.sequence_to_sequence import SequenceToSequenceTask
from praxis_tools.check.check import on_mesh
from tests.layers.whole_model.preset_runs import EVEN, batch_of, bytes_by_kind, even_lm, losses
from tests.support.lm_runs import structs
from tests.support.marks import nightly_but, slow_or_nightly

AXES, EXPERTS = ("replica", "data", "mdl"), ("data", "expert", "mdl")
STAGES = ("stage", "data", "mdl")
VOCAB, TOKENS = 64, batch_of(16, 12, 64)
BLOCKS = (16, 12, 128, 256, 8, 4, 64)
PRESET = "fsdp+tensor"


def task_of(
    cls: type[Task],
    model: fdl.Partial,
    *,
    preset: str = PRESET,
    rows: tuple[str, ...] = AXES[:2],
    learner: dict[str, Any] | None = None,
    **settings: Any,
) -> Task:
    model = set_sharding_params(copy.deepcopy(model), preset)
    learner = Learner(optax.adamw, 0.01, **learner or {})
    return cls(fdl.build(model), learner, inputs_split_mapping=by_rank(rows), **settings)


def by_rank(rows: tuple[str, ...]) -> dict[str, Any]:
    return {f"map_{rank}d": (rows, *(None,) * (rank - 1)) for rank in range(1, 5)}


def on_stages() -> Task:
    lm, rows = even_lm(), STAGES[:2]
    lm.stacked_transformer_tpl = fdl.Partial(layers.Pipeline, num_stages=2, num_microbatches=4)
    set_sharding_params(lm, {**SHARDING_PRESETS["megatron"], "batch": ("data",)})
    lm.softmax_tpl.activation_split_dims_mapping = (rows, None, "mdl")
    lm.softmax_tpl.lookup_split_dims_mapping = (rows, None, None)
    learner = Learner(optax.adamw, 0.01)
    return LanguageModelTask(fdl.build(lm), learner, inputs_split_mapping=by_rank(rows))


def with_blocks(**settings: Any) -> fdl.Partial:
    lm = even_lm()
    for name, value in settings.items():
        setattr(lm.transformer_layer_tpl, name, value)
    return lm


def with_lora(sizes: tuple[int, ...] = EVEN) -> fdl.Partial:
    lm = even_lm(sizes)
    block = lm.transformer_layer_tpl
    block.tr_atten_tpl = fdl.Partial(adapted, base_tpl=block.tr_atten_tpl, rank=4)
    block.tr_fflayer_tpl = fdl.Partial(adapted, base_tpl=block.tr_fflayer_tpl, rank=4)
    return lm


def encoder_decoder() -> fdl.Partial:
    block = fdl.Partial(
        layers.Transformer,
        cross_atten_tpl=fdl.Partial(layers.DotProductAttention),
        tr_atten_tpl=fdl.Partial(layers.DotProductAttention, use_rotary_position_emb=True),
    )
    return fdl.Partial(
        layers.TransformerEncoderDecoder,
        vocab_size=VOCAB,
        model_dims=16,
        hidden_dims=32,
        num_heads=4,
        dim_per_head=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        encoder_layer_tpl=block,
        decoder_layer_tpl=block,
    )


def classifier(network: fdl.Partial, dims: int) -> fdl.Partial:
    softmax = fdl.Partial(layers.FullSoftmax, 8, dims)
    return fdl.Partial(layers.ClassificationModel, network_tpl=network, softmax_tpl=softmax)


def vit() -> fdl.Partial:
    return classifier(layers.build_vision_transformer((4, 4), 2, 4, 16, 32, 2, 4), 16)


def resnet() -> fdl.Partial:
    network = fdl.Partial(
        layers.ResNet,
        channels=(16, 32),
        blocks=(1, 1),
        strides=(1, 2),
        kernels=(3, 3),
        entryflow_conv_kernel=(3, 3, 4),
    )
    return classifier(network, 32)


def pairs() -> dict[str, np.ndarray]:
    two = [batch_of(8, 12, VOCAB) for _ in range(2)]
    stacked = {name: np.stack([item[name] for item in two], axis=1) for name in ("ids", "labels")}
    stacked["ids"][:, 1] = (stacked["ids"][:, 1] + 1) % VOCAB
    answers = np.ones((8, 2, 12), np.float32)
    return {**stacked, "answers": answers, "weights": np.ones(8, np.float32)}


def translations() -> dict[str, np.ndarray]:
    source = {"src_ids": TOKENS["labels"], "src_paddings": np.zeros((16, 12), np.float32)}
    return {**TOKENS, **source}


IMAGES = {
    "inputs": np.random.default_rng(1).normal(size=(8, 8, 8, 4)).astype(np.float32),
    "labels": np.arange(8, dtype=np.int32),
    "weights": np.ones(8, np.float32),
}
ONLY_LORA = {"bprop_variable_inclusion": LORA}
partial = functools.partial
# By name: the axes of the mesh, a task, its batch; perhaps the Partitioner's other settings.
FAMILIES: dict[str, tuple] = {
    "lm, packed": (
        AXES,
        partial(task_of, LanguageModelTask, even_lm()),
        {
            **TOKENS,
            "segment_ids": np.repeat([[1, 2, 3]], 4, axis=1).repeat(16, 0).astype(np.int32),
            "positions": np.tile(np.arange(4), (16, 3)).astype(np.int32),
        },
    ),
    "lm of experts": (
        EXPERTS,
        partial(
            task_of,
            LanguageModelTask,
            with_blocks(
                tr_fflayer_tpl=fdl.Partial(layers.TransformerFeedForwardMoe, num_experts=4)
            ),
            preset="expert",
            rows=EXPERTS[:2],
        ),
        TOKENS,
    ),
    "lm of RG-LRU": (
        AXES,
        partial(
            task_of, LanguageModelTask, with_blocks(tr_atten_tpl=fdl.Partial(layers.RgLruBlock))
        ),
        TOKENS,
    ),
    "lora": (AXES, partial(task_of, LanguageModelTask, with_lora(), learner=ONLY_LORA), TOKENS),
    **{
        f"lora over {recipe}": (
            AXES,
            partial(
                task_of,
                LanguageModelTask,
                with_lora(sizes),
                learner=ONLY_LORA,
                quantization=recipe,
            ),
            TOKENS,
        )
        # Axes divide the number of blocks of a weight in 4 bits, too.
        for recipe, sizes in (("int8", EVEN), ("nf4", BLOCKS))
    },
    "preferences": (
        AXES,
        partial(
            task_of,
            DpoTask,
            fdl.Partial(with_reference, base_tpl=even_lm()),
            learner={"bprop_variable_exclusion": ("reference/.*",)},
        ),
        pairs(),
    ),
    "sequences to sequences": (
        AXES,
        partial(task_of, SequenceToSequenceTask, encoder_decoder()),
        translations(),
    ),
    "images by a ViT": (AXES, partial(task_of, ClassificationTask, vit()), IMAGES),
    "images by a ResNet": (AXES, partial(task_of, ClassificationTask, resnet()), IMAGES),
    "pipeline": (STAGES, on_stages, TOKENS),
    "1F1B": (STAGES, on_stages, TOKENS, {"gradients": layers.OneForwardOneBackward()}),
}
# What JAX has no types of (docs/upstream.md), and what is noted of it.
UNTYPED = {"pipeline": ["transformer"], "1F1B": ["the Pipeline and its ends"]}


def partitioner_of(name: str, axis_types: str) -> tuple[Partitioner, dict[str, np.ndarray]]:
    axis_names, task, batch, *settings = FAMILIES[name]
    mesh = make_mesh(
        MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=axis_names, axis_types=axis_types)
    )
    return Partitioner(task(), mesh, **dict(*settings)), batch


@pytest.mark.parametrize("name", ["lm of experts", "pipeline"])
def test_it_is_typed_or_noted(name):
    partitioner, batch = partitioner_of(name, "explicit")
    partitioner.train_step.trace(structs(batch))
    assert list(partitioner.train_step.untyped) == UNTYPED.get(name, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but({"lora over int8"}, FAMILIES))
def test_its_losses_and_bytes_are_those_of_auto_axes(name):
    partitioner, batch = partitioner_of(name, "explicit")
    actual, compiled = losses(partitioner, batch)
    expected, compiled_auto = losses(*partitioner_of(name, "auto"))
    assert list(partitioner.train_step.untyped) == UNTYPED.get(name, [])
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert len(set(actual)) == len(actual)
    # test_explicit_axes.py counts them to the byte. What axes split twice is gathered once more.
    bytes_sent, of_auto = (sum(bytes_by_kind(x).values()) for x in (compiled, compiled_auto))
    assert bytes_sent < 1.15 * of_auto


# The mesh of these experiments divides their sizes. Most others have sizes that no mesh divides.
EVEN_EXPERIMENTS = {"explicit.NotebookDp", "explicit.NotebookFsdp"}
# Layers of these experiments merge dims, for which JAX cannot infer the axes.
UNTYPED_LAYERS = {"published.names.Mlp", "published.names.WaveNet"}

QUICK_EXPERIMENTS = {"explicit.NotebookDp", "lm.PyDocs"}


def explicit_step_of(name: str) -> tuple[Any, dict[str, Any]]:
    job = build(get_experiment(name)().config())
    placed = on_mesh(job, job.task, tuple(job.mesh.ici_mesh_shape), axis_types="explicit")
    return placed.partitioner.train_step, job.datasets["train"].element_spec()


@pytest.mark.parametrize(
    "name",
    slow_or_nightly(
        QUICK_EXPERIMENTS,
        EVEN_EXPERIMENTS | UNTYPED_LAYERS,
        list_experiments(),
    ),
)
def test_an_experiment_is_typed_or_says_what_to_change(name):
    step, spec = explicit_step_of(name)
    try:
        step.trace(spec)
    except ConfigError as error:
        assert name not in EVEN_EXPERIMENTS
        assert "mesh.axis_types=auto" in str(error)
    else:
        assert bool(step.untyped) == (name in UNTYPED_LAYERS)


class Untyped(names.Hierarchy):
    """A layer with a reshape whose type no version of JAX infers."""

    has_types = True

    def __call__(self, ids, *, key=None):
        rows = ids.reshape(ids.shape[::-1])
        return super().__call__(rows.reshape(ids.shape), key=key)


def test_a_layer_that_should_declare_that_it_has_no_types_is_named(monkeypatch):
    monkeypatch.setattr(names, "Hierarchy", Untyped)
    step, spec = explicit_step_of("published.names.Mlp")
    with pytest.raises(ConfigError, match=r"\.py:\d+ \(rows = ids\.reshape.*has_types = False"):
        step.trace(spec)


def test_a_linen_models_line_without_a_type_is_named():
    rules = {"batch": AXES[:2], "embed": "data", "heads": "mdl", "mlp": "mdl", "vocab": "mdl"}
    model = LinenModel(
        CausalLm(vocab_size=64, model_dims=32, mlp_dims=64, num_heads=4, num_layers=1),
        {"ids": ("int32", (1, 12))},
    )
    names = (*rules.items(), ("layers", None), ("kv", None))
    task = LossTask(
        model,
        next_token_loss,
        Learner(optax.sgd, 0.1),
        inputs_split_mapping=by_rank(AXES[:2]),
        weight_sharding=WeightSharding(logical_axis_rules=names),
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2), axis_types="explicit"))
    with pytest.raises(ConfigError, match=r"linen_models.py:\d+ \(.*untyped"):
        Partitioner(task, mesh).train_step.trace(structs(TOKENS))
