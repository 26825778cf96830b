"""Steps over Explicit axes: the numbers and the collectives of Auto ones; what has no type."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite import layers
from praxis_lite.core import ConfigError, Learner, MeshConfig, Partitioner, Task, make_mesh
from praxis_lite.core.collectives import ExplicitCollectives
from praxis_lite.decode import Greedy
from praxis_lite.layers import SHARDING_PRESETS, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.layers.whole_model import preset_runs
from tests.layers.whole_model.preset_runs import (
    batch_of,
    bytes_by_kind,
    even_lm,
    losses,
    mesh_of,
    partitioner_of,
)
from tests.support.lm_runs import structs
from tests.support.marks import nightly_but, slow_or_nightly

SHAPE, BATCH = (2, 2, 2), batch_of(16, 12, 64)
# A shared table that model dims split too is gathered where it embeds and where it predicts; over
# Auto axes XLA gathers it once.
SECOND_GATHERS = dict.fromkeys(("fsdp+tensor", "fsdp+ring", "fsdp+mlp_ring"), 32 * 32 * 4)


def mesh_typed(axis_types, shape=SHAPE, axis_names=preset_runs.AXES):
    return make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=axis_names, axis_types=axis_types))


def runs(make, batch=BATCH, axis_names=preset_runs.AXES):
    """Returns by axis types the losses of a few steps, and the bytes of the step's collectives."""
    result = {}
    for axis_types in ("auto", "explicit"):
        actual, compiled = losses(make(mesh_typed(axis_types, axis_names=axis_names)), batch)
        result[axis_types] = actual, bytes_by_kind(compiled)
    return result


def assert_same_losses(result):
    np.testing.assert_allclose(result["explicit"][0], result["auto"][0], rtol=1e-6)


# Of those left out "expert" is "fsdp+tensor" on axes of other names for an LM without experts, and
# "fsdp+context" is both of what the other two have.
@pytest.mark.parametrize(
    "preset",
    slow_or_nightly(
        {"fsdp+tensor"},
        {"fsdp+ring", "fsdp+context"},
        [
            preset
            for preset in SHARDING_PRESETS
            if preset not in ("expert", "fsdp+context_ring", "fsdp+context_heads")
        ],
    ),
)
def test_a_preset_trains_and_sends_as_over_auto_axes(preset):
    partitioners = []

    def make(mesh):
        partitioners.append(partitioner_of(even_lm(), preset, mesh))
        return partitioners[-1]

    result = runs(make, axis_names=mesh_of(preset, SHAPE).axis_names)
    assert_same_losses(result)
    assert partitioners[-1].train_step.untyped == {}
    expected = dict(result["auto"][1])
    expected["all-gather"] = expected.get("all-gather", 0) + SECOND_GATHERS.get(preset, 0)
    actual = {"all-gather": 0, **result["explicit"][1]}
    assert actual == expected


def lm_task(preset="fsdp+tensor", lm=None, **settings):
    batch = SHARDING_PRESETS[preset]["batch"]
    learner = Learner(optax.adamw, 0.01, clip_gradient_norm_to_value=0.5, **settings)
    return LanguageModelTask(
        fdl.build(set_sharding_params(lm or even_lm(), preset)),
        learner,
        inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
        decoder=Greedy(max_decode_steps=3),
    )


@pytest.mark.slow
@pytest.mark.parametrize("preset", nightly_but({"replicated"}, ["replicated", "fsdp+tensor"]))
def test_gradients_of_microbatches_are_summed_over_devices_once(preset):
    partitioners = []

    def make(mesh):
        partitioners.append(Partitioner(lm_task(preset, gradient_accumulation_steps=4), mesh))
        return partitioners[-1]

    result = runs(make, batch_of(32, 12, 64))
    assert_same_losses(result)
    assert partitioners[-1].train_step.untyped == {}
    summed = {axis_types: by_kind["all-reduce"] for axis_types, (_, by_kind) in result.items()}
    if preset == "replicated":  # All weights are whole; norms' gradients are summed each time.
        assert summed["explicit"] < 0.3 * summed["auto"]
    assert summed["explicit"] < 1.01 * summed["auto"]


@pytest.mark.slow
def test_explicit_collectives_train_as_over_auto_axes():
    result = runs(
        lambda mesh: Partitioner(
            lm_task("megatron"), mesh, gradients=ExplicitCollectives(("replica", "data"))
        )
    )
    assert_same_losses(result)


def state_of(partitioner):
    padded = preset_runs.drawn(partitioner)
    return jax.device_put(padded, partitioner.layout.shardings(partitioner.mesh))


@pytest.mark.slow
def test_evaluation_and_decoding_are_those_of_auto_axes():
    prompts = {
        "ids": BATCH["ids"][:, :4],
        "prefix_lengths": np.full(16, 3, np.int32),
        "weights": np.ones(16, np.float32),
    }
    results = {}
    for axis_types in ("auto", "explicit"):
        partitioner = Partitioner(lm_task("megatron"), mesh_typed(axis_types))
        mdl_vars, key = state_of(partitioner).mdl_vars, partitioner.batch_key(0, 0, 0)
        metrics = partitioner.eval_step(mdl_vars, partitioner.global_batch(BATCH), key)
        outputs = partitioner.decode_step(mdl_vars, partitioner.global_batch(prompts), key)
        results[axis_types] = jax.device_get((metrics, outputs))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *results.values())


def test_a_layer_without_types_is_computed_and_noted():
    # Twelve tokens less one: the axis that splits time does not divide them.
    batch = batch_of(16, 11, 64)
    partitioner = partitioner_of(even_lm(), "sequence", mesh_typed("explicit"))
    step = partitioner.train_step
    assert step.untyped == {}
    step.trace(structs(batch))
    assert "transformer/blocks/self_attention" in step.untyped
    assert "its dim 1 is not divisible by" in step.untyped["softmax"]


@pytest.mark.parametrize(
    ("lm", "batch", "message"),
    [
        (preset_runs.UNEVEN(), batch_of(16, 7, 37), r"mdl_vars/params/.*of shape \(37, 13\)"),
        (None, batch_of(11, 12, 64), r"ids of shape \(11, 12\) .*dim 0 is not divisible"),
    ],
)
def test_weights_and_rows_that_do_not_divide_are_refused(lm, batch, message):
    partitioner = partitioner_of(lm or even_lm(), "fsdp+tensor", mesh_typed("explicit"))
    with pytest.raises(ConfigError, match=f"{message}.*mesh.axis_types=auto"):
        partitioner.train_step.trace(structs(batch))


ROWS_AND_FEATURES = {"map_2d": ("data", "mdl")}


class Regression(Task):
    """Of a user's own product, which sums over a dim that is split."""

    required_inputs = ("x",)

    def compute_loss(self, model, inputs, key):
        hidden = jnp.einsum("bd,df->bf", inputs["x"], model.w[...])
        return {"loss": (jnp.mean(hidden**2), jnp.ones(()))}


class Own(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((8, 4)), split_dims_mapping=("mdl", None))


def test_a_users_line_without_a_type_is_named():
    task = Regression(Own, Learner(optax.sgd, 0.1), inputs_split_mapping=ROWS_AND_FEATURES)
    partitioner = Partitioner(task, mesh_typed("explicit"))
    x = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    message = r"test_explicit_axes.py:\d+ \(hidden = jnp.einsum.*untyped"
    with pytest.raises(ConfigError, match=message):
        partitioner.train_step.trace(x)


def test_types_are_those_of_the_layout():
    types = {}

    class Typed(layers.Linear):
        def __call__(self, inputs):
            outputs = super().__call__(inputs)
            types.update(w=jax.typeof(self.w[...]), inputs=jax.typeof(inputs))
            types.update(outputs=jax.typeof(outputs))
            return outputs

    def model(rngs):
        return Typed(
            8,
            4,
            weight_split_dims_mapping=("mdl", None),
            activation_split_dims_mapping=("data", None),
            rngs=rngs,
        )

    class OfLinear(Regression):
        def compute_loss(self, model, inputs, key):
            return {"loss": (jnp.mean(model(inputs["x"]) ** 2), jnp.ones(()))}

    task = OfLinear(model, Learner(optax.sgd, 0.1), inputs_split_mapping=ROWS_AND_FEATURES)
    for axis_types, expected in (
        ("explicit", {"w": ("mdl", None), "inputs": ("data", "mdl"), "outputs": ("data", None)}),
        (("auto", "auto", "explicit"), {"w": ("mdl", None), "inputs": (None, "mdl")}),
        ("auto", {"w": (None, None), "inputs": (None, None)}),
    ):
        Partitioner(task, mesh_typed(axis_types)).train_step.trace(
            {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
        )
        for name, spec in expected.items():
            assert types[name].sharding.spec == PartitionSpec(*spec), (axis_types, name)
