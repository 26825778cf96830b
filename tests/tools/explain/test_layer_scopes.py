"""What a layer computes carries the layer's path in the compiled program, whatever is around it."""

import copy
import functools
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import NnxModel
from praxis_lite.core.models.layer_paths import attribute_name
from praxis_lite.layers import BaseLayer, Linear, Repeat, StackedTransformer
from praxis_tools.explain.hlo_layers import layers_of_name


class Block(BaseLayer):
    """Two layers of one class in a row, called as a Repeat calls its block."""

    def __init__(self, dims: int = 3, *, rngs: nnx.Rngs):
        self.query = Linear(dims, dims, rngs=rngs)
        self.value = Linear(dims, dims, rngs=rngs)

    def __call__(self, x, *, key=None, cache=None):
        return jnp.tanh(self.value(jnp.tanh(self.query(x)))), cache


class Model(BaseLayer):
    """A stack, then what another method than `__call__` computes."""

    def __init__(self, stack, *, rngs: nnx.Rngs):
        self.stack = stack(rngs=rngs)
        self.head = Head(rngs=rngs)

    def __call__(self, x):
        return self.head.logits(self.stack(x)[0])


class Head(BaseLayer):
    """A layer that is not called but asked."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = Linear(3, 5, rngs=rngs)

    def logits(self, x):
        """Returns [..., 5]."""
        return self.linear(x)


def layers_in(build):
    """Returns the layers of the matmuls of a model's compiled gradient: forward, and backward."""
    model = NnxModel(build)
    params = jax.eval_shape(model.init, jax.random.key(0))

    def loss(params, x):
        return (model.module(params)(x) ** 2).sum()

    text = jax.jit(jax.grad(loss)).lower(params, jnp.ones((2, 3))).compile().as_text()
    names = re.findall(r'op_name="([^"]*/dot_general)"', text)
    layers = {layer for name in names for layer in layers_of_name(name)}
    # XLA may drop or merge one or the other of a layer's.
    assert any(layer.startswith("gradient of ") for layer in layers)
    return {layer.removeprefix("gradient of ") for layer in layers}


@pytest.mark.parametrize("policy", ["save_everything", "save_nothing"])
@pytest.mark.parametrize("unroll", [False, True])
def test_layers_of_a_stack_scanned_or_not_rematerialized_or_not(unroll, policy):
    stack = functools.partial(Repeat, Block, num_layers=3, unroll=unroll, checkpoint_policy=policy)
    blocks = [f"stack/blocks/{i}" for i in range(3)] if unroll else ["stack/blocks"]
    layers = [f"{block}/{name}" for block in blocks for name in ("query", "value")]
    assert layers_in(functools.partial(Model, stack)) == {*layers, "head/linear"}


def test_equal_layers_of_a_pattern_have_their_own_names_under_remat():
    stack = functools.partial(StackedTransformer, Block, num_layers=2, remat=True)
    layers = [f"stack/x_layers_{i}/{name}" for i in (0, 1) for name in ("query", "value")]
    assert layers_in(functools.partial(Model, stack)) == {*layers, "head/linear"}


def test_names_survive_vmap():
    class Mapped(BaseLayer):
        def __init__(self, *, rngs):
            self.block = Block(rngs=rngs)

        def __call__(self, x):
            return jax.vmap(lambda row: self.block(row)[0])(x)

    assert layers_in(Mapped) == {"block/query", "block/value"}


def test_a_method_that_calls_its_own_opens_no_second_scope():
    class Nested(BaseLayer):
        def __init__(self, depth=1, *, rngs):
            self.linear = Linear(3, 3, rngs=rngs)
            self.inner = Nested(depth - 1, rngs=rngs) if depth else None

        def __call__(self, x):
            x = self.projected(x)
            return x if self.inner is None else self.inner(x)

        def projected(self, x):
            return jnp.tanh(self.linear(x))

    assert layers_in(Nested) == {"linear", "inner/linear"}


def test_two_builds_are_one_program_to_the_compilation_cache():
    def text():
        model = NnxModel(functools.partial(Model, functools.partial(Repeat, Block, num_layers=2)))
        mdl_vars = model.init(jax.random.key(0))
        run = jax.jit(lambda mdl_vars, x: model.module(mdl_vars)(x))
        return run.lower(mdl_vars, jnp.ones((2, 3))).as_text(debug_info=True)

    item, other = [text() for _ in range(2)]
    assert "blocks/query" in item
    assert item == other


def test_layers_stay_equal_pytrees_that_can_be_copied_and_pickled():
    stack = Repeat(Block, 2, unroll=True, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3))
    before = jax.tree.structure(stack)
    out, _ = stack(x)
    first, second = stack.blocks
    assert jax.tree.structure(stack) == before
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for other in (pickle.loads(pickle.dumps(stack)), copy.deepcopy(stack)):
        assert jax.tree.structure(other) == before
        assert (other(x)[0] == out).all()
    assert list(inspect.signature(Linear.__call__).parameters) == ["self", "inputs"]


def test_after_an_error_the_next_call_has_its_own_name_again():
    class Refuses(BaseLayer):
        def __init__(self, *, rngs):
            self.linear = Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            self.linear(x)
            raise ConfigError("no")

    with pytest.raises(ConfigError):
        Refuses(rngs=nnx.Rngs(0))(jnp.ones((2, 3)))
    layers = {"stack/query", "stack/value", "head/linear"}
    assert layers_in(functools.partial(Model, Stack)) == layers


class Stack(Block):
    """A block as a stack, which its parent's name for it names."""


def test_a_layer_that_is_no_ones_attribute_has_no_name():
    parent = Block(rngs=nnx.Rngs(0))
    assert attribute_name(parent, Head(rngs=nnx.Rngs(0))) == ""
    assert attribute_name(parent, parent.value) == "value"
