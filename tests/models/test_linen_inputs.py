"""What is wrong with a Linen model or its inputs, said before anything compiles."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from praxis_lite import ConfigError
from praxis_lite.models import LinenModel

lecun = nn.initializers.lecun_normal()


class Two(nn.Module):
    """Takes two inputs; its second layer has a wrong width when `wrong`."""

    wrong: bool = False

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Embed(11, 6, name="embed")(ids) * mask[..., None]
        return Second(name="second")(x, 5 if self.wrong else 6)

    def embedded(self, ids: jax.Array) -> jax.Array:
        return self(ids, jnp.ones(ids.shape))


class Second(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, dims: int) -> jax.Array:
        return x @ self.param("kernel", lecun, (dims, 3))


ids = ("int32", (1, 4))
WRONG = {
    "an input that is missing": (
        lambda: LinenModel(Two(), {"ids": ids}),
        ["Two cannot be initialized with init_inputs (ids=int32(1, 4)", "argument: 'mask'"],
    ),
    "an input by another name": (
        lambda: LinenModel(Two(), {"ids": ids, "maks": (1, 4)}),
        ["unexpected keyword argument 'maks'"],
    ),
    "a wrong shape": (
        lambda: LinenModel(Two(wrong=True), [ids, (1, 4)]),
        [
            "Two cannot be initialized with init_inputs (int32(1, 4), float32(1, 4), train=False)",
            "dot_general",
            "(6,) and (5,)",
            "layer: second",
            "test_linen_inputs.py:",
        ],
    ),
    "a wrong dtype": (
        lambda: LinenModel(Two(), {"ids": (1, 4), "mask": (1, 4)}),
        ["must be an integer", "layer: embed"],
    ),
    "no dtype": (
        lambda: LinenModel(Two(), {"ids": ("int23", (1, 4))}),
        ["LinenModel.init_inputs['ids'] is ('int23', (1, 4))", "a pair of dtype and shape"],
    ),
    "a method that is not there": (
        lambda: LinenModel(Two(), [(1, 4)], init_method="embeded"),
        ["Two has no method 'embeded'", "Did you mean embedded?"],
    ),
    "no inputs": (lambda: LinenModel(Two(), 784), ["LinenModel.init_inputs is 784"]),
    "a module that is not built": (
        lambda: LinenModel(Two, [(1, 4)]),
        ["LinenModel.module is", "an instance of"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_before_anything_compiles(wrong):
    make, words = WRONG[wrong]
    with pytest.raises(ConfigError) as refused:
        make().weight_specs()
    for word in words:
        assert word in str(refused.value), str(refused.value)


def test_a_call_with_other_shapes_is_refused_while_it_is_traced():
    model = LinenModel(Two(), [ids, (1, 4)])
    mdl_vars = {
        "params": {
            "embed": {"embedding": jnp.ones((11, 5))},
            "second": {"kernel": jnp.ones((6, 3))},
        },
        "non_trainable": {},
    }
    with pytest.raises(ConfigError, match="Two.*layer: embed") as refused:
        model.module(mdl_vars)(jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4)))
    assert "(11, 5)" in str(refused.value) and "(11, 6)" in str(refused.value)


def test_an_error_of_a_layer_that_already_says_what_to_change_keeps_its_message():
    class Invalid(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise ConfigError("Set heads to 8.")

    with pytest.raises(ConfigError) as refused:
        LinenModel(Invalid(), [(1, 4)]).weight_specs()
    assert str(refused.value) == "Set heads to 8."
