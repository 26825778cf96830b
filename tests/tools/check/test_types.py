"""A check says what JAX's own types confirm of a layout, of a job over Auto axes as well."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from praxis_lite import MeshConfig
from praxis_lite.core import Learner, Partitioner, Task, make_mesh
from praxis_lite.layers import rotary_lm, set_sharding_params
from praxis_tools.check.on_meshes import check_on_meshes
from praxis_tools.check.parts.types import type_witness
from tests.tools.check import tiny


class EvenLm(tiny.Lm):
    """Sizes that two devices along an axis divide."""

    axis_types = "auto"

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 2, 2), axis_types=self.axis_types)

    def task(self):
        task = super().task()
        task.model = set_sharding_params(
            rotary_lm(
                vocab_size=38,
                model_dims=16,
                hidden_dims=28,
                num_heads=4,
                dim_per_head=4,
                num_layers=2,
                residual_dropout_prob=0.1,
            )
        )
        return task


class TypedLm(EvenLm):
    axis_types = "explicit"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [EvenLm, TypedLm])
def test_a_check_says_what_types_confirm(experiment):
    actual = check_on_meshes(experiment, [(1, 2, 2)], steps=1, parts=("types",))
    assert actual.certified, actual.summary()
    of_state, of_activations = (note for note in actual.notes if "confirm" in note)
    num_arrays = len(
        list(
            Partitioner(
                fdl.build(experiment().task()), make_mesh(MeshConfig(ici_mesh_shape=(1, 2, 2)))
            ).layout.leaves()
        )
    )
    assert f"{num_arrays} of {num_arrays} arrays in the state" in of_state
    assert "sharding constraints on activations" in of_activations


def test_a_check_says_why_types_confirm_nothing():
    actual = check_on_meshes(tiny.Points, [(2, 2)], steps=1, parts=("types",))
    assert any("The layout was not compared" in note for note in actual.notes), actual.notes


class Product(nnx.Module):
    """A user's model: its own product, whose gradient is summed over rows."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((8, 4)), split_dims_mapping=(None, "mdl"))


class OfProduct(Task):
    required_inputs = ("x",)

    def compute_loss(self, model, inputs, key):
        hidden = inputs["x"] @ model.w[...]
        return {"loss": (jnp.mean(hidden**2), jnp.ones(()))}


def test_a_users_model_has_a_witness():
    task = OfProduct(
        Product, Learner(optax.adam, 0.1), inputs_split_mapping={"map_2d": ("data", None)}
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2), axis_types="explicit"))
    witness = type_witness(
        Partitioner(task, mesh), {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    )
    assert "mdl_vars/params/w" in witness.confirmed
    assert witness.others == () and witness.untyped == {}
    assert "of 5 arrays" in witness.lines()[0] or len(witness.confirmed) >= 4
