"""An error of a layer names its path in the model, whether it is built or called."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import Learner, NnxModel, Partitioner, constrain
from praxis_lite.layers import (
    BaseLayer,
    FeedForward,
    Repeat,
    TransformerLm,
)
from praxis_lite.tasks.image_classification import ClassificationTask


class Pair(BaseLayer):
    """Two layers, built through a function of the constructor."""

    def __init__(self, second_dims: int, *, rngs: nnx.Rngs):
        def layer(dims: int) -> FeedForward:
            return FeedForward(3, dims, rngs=rngs)

        self.first = layer(3)
        self.second = layer(second_dims)


class Block(BaseLayer):
    """Calls a layer whose activations are split over an axis that no mesh has."""

    def __init__(self, dims: int = 3, *, rngs: nnx.Rngs):
        self.ff = FeedForward(3, dims, activation_split_dims_mapping=("nowhere",), rngs=rngs)

    def __call__(self, x, *, key=None, cache=None):
        return self.ff(x), cache


class Stack(BaseLayer):
    """Blocks, repeated or in a list."""

    def __init__(self, block, *, unroll: bool, rngs: nnx.Rngs):
        self.norm = FeedForward(3, 3, rngs=rngs)
        self.stack = Repeat(block, 2, unroll=unroll, rngs=rngs)

    def __call__(self, x):
        return self.stack(constrain(self.norm(x), None))[0]


def test_an_error_of_a_constructor_names_the_layer_that_is_built():
    with pytest.raises(ConfigError, match=r"^second.*FeedForward\.output_dims.*0"):
        NnxModel(functools.partial(Pair, 0)).weight_specs()


@pytest.mark.parametrize("unroll", [False, True], ids=["scanned", "unrolled"])
def test_an_error_of_a_constructor_in_a_stack_names_the_path(unroll):
    build = functools.partial(Stack, functools.partial(Block, 0), unroll=unroll)
    with pytest.raises(ConfigError, match=r"^stack/blocks/ff.*FeedForward\.output_dims.*0"):
        NnxModel(build).weight_specs()


@pytest.mark.parametrize("unroll", [False, True], ids=["scanned", "unrolled"])
def test_an_error_of_a_call_names_the_path(mesh_of, unroll):
    task = ClassificationTask(
        functools.partial(Stack, Block, unroll=unroll), Learner(optax.sgd, 0.1)
    )
    batch = {
        "inputs": jax.ShapeDtypeStruct((8, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((8,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    where = "stack/blocks/0/ff" if unroll else "stack/blocks/ff"
    with pytest.raises(ConfigError, match=rf"^{where}/linear.*'nowhere'"):
        Partitioner(task, mesh_of(1, 4, 2)).train_step.trace(batch)


def test_an_error_outside_any_layer_is_left_as_it_is():
    def build(*, rngs):
        raise ConfigError("no model today")

    with pytest.raises(ConfigError, match=r"^no model today(\n|$)"):
        NnxModel(build).weight_specs()


IN_A_MODEL = {
    r"transformer/blocks/self_attention: .*num_heads is 3": functools.partial(
        TransformerLm, 11, 8, 12, 3, 2
    ),
    "transformer.*checkpoint_policy.*'save_nothin'.*save_nothing": functools.partial(
        TransformerLm,
        11,
        8,
        12,
        2,
        2,
        stacked_transformer_tpl=functools.partial(Repeat, checkpoint_policy="save_nothin"),
    ),
}


@pytest.mark.parametrize("message", IN_A_MODEL)
def test_an_ill_formed_setting_in_a_model_names_the_path(message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        NnxModel(IN_A_MODEL[message]).weight_specs()
