"""Quantization recipes, a word of the task: by presets on meshes, in stacks, and refused."""

import functools

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import (
    QUANTIZATION_RECIPES,
    QuantizationRule,
    rotary_lm,
    with_recipe,
)
from praxis_lite.layers.base.dense import Product, is_dense
from praxis_lite.layers.whole_model.rounded_products import RoundedProduct
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.layers.whole_model import preset_runs
from tests.support.float16 import needs_float16
from tests.support.lm_runs import structs

pytest.importorskip("qwix", reason="Qwix is not installed: pip install qwix")

ROUNDING = [
    pytest.param(name, marks=[needs_float16] if name.startswith("float8") else [])
    for name, rule in QUANTIZATION_RECIPES.items()
    if isinstance(rule, QuantizationRule)
]
BATCH = preset_runs.batch_of(16, 12, 64)


def task_of(recipe, stacked=None, **learner):
    model = rotary_lm(
        vocab_size=64,
        model_dims=32,
        hidden_dims=48,
        num_heads=8,
        dim_per_head=4,
        num_layers=4,
        stacked_transformer_tpl=stacked or fdl.Partial(layers.Repeat),
    )
    return LanguageModelTask(
        fdl.build(model), Learner(optax.sgd, 0.3, **learner), quantization=recipe
    )


@functools.cache
def losses(recipe, preset, shape):
    partitioner = preset_runs.partitioner_of(
        preset_runs.even_lm(), preset, preset_runs.mesh_of(preset, shape), quantization=recipe
    )
    return preset_runs.losses(partitioner, BATCH)[0]


# test_summing_devices.py counts for each preset which devices sum a product.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "preset"),
    [
        ("int8", "fsdp+context"),
        pytest.param("int8_per_tensor", "fsdp", marks=pytest.mark.nightly),
        pytest.param("int8", "fsdp+tensor", marks=pytest.mark.nightly),
        pytest.param("int8_per_tensor", "sequence", marks=pytest.mark.nightly),
        pytest.param("float8", "megatron", marks=[needs_float16, pytest.mark.nightly]),
        pytest.param(
            "float8_per_tensor", "fsdp+tensor", marks=[needs_float16, pytest.mark.nightly]
        ),
    ],
)
def test_scales_are_those_of_one_device_on_every_mesh(recipe, preset):
    """A scale of a device's own part would change the loss in its third digit."""
    actual, expected = losses(recipe, preset, (1, 2, 4)), losses(recipe, "replicated", (1, 1, 1))
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    assert abs(expected[0] / losses(None, "replicated", (1, 1, 1))[0] - 1) > 1e-5


@pytest.mark.parametrize("preset", ["fsdp+ring"])
def test_a_preset_that_sums_by_hand_is_refused_with_what_to_change(preset):
    partitioner = preset_runs.partitioner_of(
        preset_runs.even_lm(), preset, preset_runs.mesh_of(preset, (1, 2, 4)), quantization="int8"
    )
    with pytest.raises(ConfigError, match="(?s)'ring'.*one scale .for rounding.*'weights'"):
        partitioner.train_step.lower(structs(BATCH))


def stepped(task, mesh=(1, 1, 1), axes=("replica", "data", "mdl")):
    """Returns the losses of three steps."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=mesh, axis_names=axes, allow_unused_devices=True))
    return preset_runs.losses(Partitioner(task, mesh), BATCH)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["int8", pytest.param("int8_per_tensor", marks=pytest.mark.nightly)]
)
def test_remat_microbatches_and_an_unrolled_stack_round_as_a_scanned_one(recipe):
    expected = stepped(task_of(recipe))
    kept = fdl.Partial(layers.Repeat, checkpoint_policy="save_everything")
    np.testing.assert_allclose(stepped(task_of(recipe, kept)), expected, rtol=1e-5)
    apart = stepped(task_of(recipe, gradient_accumulation_steps=4))
    # Each microbatch has its own scales: of tokens the same, of gradients and tensors finer ones.
    np.testing.assert_allclose(apart, expected, rtol=3e-3)
    assert expected[-1] < expected[0] - 0.05


@pytest.mark.nightly
def test_stages_of_a_pipeline_round_as_one_device():
    pipeline = fdl.Partial(layers.Pipeline, num_stages=2, num_microbatches=2)
    axes = ("stage", "data", "mdl")
    alone = stepped(task_of("int8", pipeline), axes=axes)
    staged = stepped(task_of("int8", pipeline), (2, 2, 2), axes)
    np.testing.assert_allclose(staged, alone, rtol=1e-4)


@pytest.mark.parametrize("recipe", ROUNDING)
def test_all_dense_layers_are_rounded_but_that_which_makes_logits(recipe):
    module = task_of(recipe).model.abstract_module()
    rule = QUANTIZATION_RECIPES[recipe]
    products = {
        "/".join(map(str, path)): node.product
        for path, node in nnx.iter_graph(module)
        if is_dense(node)
    }
    logits = products.pop("softmax/logits_ffn/linear")
    assert logits == Product()
    expected = RoundedProduct(rule.qtype, rule.bwd_qtype, rule.scales)
    assert len(products) == 6 and set(products.values()) == {expected}
    assert recipe.endswith("per_tensor") == (rule.scales == "tensor")


def test_unknown_words_and_models_of_other_layers_are_refused():
    with pytest.raises(ConfigError, match="task.quantization is 'flaot8'.*mean float8"):
        task_of("flaot8")
    model = FunctionModel(lambda key: {"w": jax.numpy.zeros(3)})
    learner = Learner(optax.sgd, 0.3)
    with pytest.raises(ConfigError, match="'int8'.*FunctionModel.*Omit the setting"):
        LanguageModelTask(model, learner, quantization="int8")
    assert with_recipe(model, None, learner) is model
