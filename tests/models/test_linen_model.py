"""A Linen module seen as a model: its variables, its calls, what its weights declare."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from praxis_lite import ConfigError
from praxis_lite.core.models.model import ShardedWeight
from praxis_lite.models import LinenModel

lecun = nn.initializers.lecun_normal()
KEY = jax.random.key(3)


def is_spec(x: Any) -> bool:
    return hasattr(x, "declared_by")


class Tiny(nn.Module):
    """As many ways to be told of training as there are, and what a pass leaves behind."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        count = self.variable("counters", "count", lambda: jnp.zeros((), jnp.int32))
        carry = self.variable("carry", "state", lambda: (jnp.zeros(2), jnp.ones(3)))
        self.sow("aux", "total", jnp.sum(x))
        self.sow("summed", "total", jnp.sum(x), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
        self.sow("intermediates", "x", x)
        if self.is_mutable_collection("counters") and not self.is_initializing():
            count.value += 1
            carry.value = (carry.value[0] + 1, carry.value[1])
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(64)(x))

    @nn.compact
    def dropped(self, x: jax.Array, deterministic: bool) -> jax.Array:
        return nn.Dropout(0.5, deterministic=deterministic)(x)

    def normed(self, x: jax.Array, *, use_running_average: bool) -> bool:
        return use_running_average

    def noise(self, x: jax.Array) -> jax.Array:
        return jax.random.normal(self.make_rng("anything"), x.shape)


@functools.cache
def tiny() -> tuple[LinenModel, Any, jax.Array]:
    model = LinenModel(Tiny(), {"x": (2, 5)}, sown_collections=["summed"])
    return model, model.init(KEY), jnp.ones((2, 5))


def test_init_is_bitwise_that_of_flax():
    model, mdl_vars, x = tiny()
    expected = Tiny().init(KEY, x, train=False)
    jax.tree.map(np.testing.assert_array_equal, mdl_vars["params"], expected["params"])
    specs = jax.tree.map(lambda spec: spec.shape, model.weight_specs(), is_leaf=is_spec)
    assert specs == jax.tree.map(jnp.shape, mdl_vars)


def test_what_is_sown_is_reached_but_not_kept():
    model, mdl_vars, x = tiny()
    assert sorted(mdl_vars["non_trainable"]) == ["carry", "counters"]
    assert jax.tree.map(jnp.shape, mdl_vars["non_trainable"]["carry"]["state"]) == {
        "0": (2,),
        "1": (3,),
    }
    bound = model.module(mdl_vars, KEY)
    bound(x)
    assert [float(bound.sown[name]["total"][0]) for name in ("aux",)] == [10.0]
    assert float(bound.sown["summed"]["total"]) == 10.0
    np.testing.assert_array_equal(bound.sown["intermediates"]["x"][0], x)
    assert model.non_trainable(bound).keys() == mdl_vars["non_trainable"].keys()


def test_calls_of_a_pass_follow_each_other_and_draw_other_masks():
    model, mdl_vars, x = tiny()
    bound = model.module(mdl_vars, KEY)
    first, second = bound(x), bound(x)
    new = model.non_trainable(bound)
    assert int(new["counters"]["count"]) == 2
    np.testing.assert_array_equal(new["carry"]["state"]["0"], [2.0, 2.0])
    assert jnp.mean((first == 0) == (second == 0)) < 0.8
    variables = {
        "params": mdl_vars["params"],
        "counters": {"count": jnp.int32(0)},
        "carry": {"state": (jnp.zeros(2), jnp.ones(3))},
    }
    expected = Tiny().apply(variables, x, True, rngs={"dropout": KEY}, mutable=True)[0]
    np.testing.assert_array_equal(first, expected)


def test_evaluation_changes_nothing_and_draws_nothing():
    model, mdl_vars, x = tiny()
    bound = model.module(mdl_vars)
    np.testing.assert_array_equal(bound(x), bound(x))
    assert int(model.non_trainable(bound)["counters"]["count"]) == 0
    assert float(bound.sown["aux"]["total"][0]) == 10.0
    with pytest.raises(ConfigError, match='Tiny.*"anything"'):
        bound(x, method="noise")


def test_flags_are_those_that_a_method_takes_unless_given():
    model, mdl_vars, x = tiny()
    training, evaluation = model.module(mdl_vars, KEY), model.module(mdl_vars)
    assert jnp.any(training(x) == 0) and not jnp.any(evaluation(x) == 0)
    assert not jnp.any(training(x, False) == 0) and not jnp.any(training(x, train=False) == 0)
    assert jnp.any(training(x, method="dropped") == 0)
    np.testing.assert_array_equal(evaluation(x, method=Tiny.dropped), x)
    assert training(x, method="normed") is False and evaluation(x, method="normed") is True
    noise = training(x, method="noise"), training(x, method="noise")
    assert not np.array_equal(*noise)
    given = [training(x, method="noise", rngs={"anything": KEY}) for _ in range(2)]
    np.testing.assert_array_equal(*given)


def test_a_module_for_evaluation_has_the_same_weights():
    class Attribute(nn.Module):
        is_training: bool

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dropout(0.5, deterministic=not self.is_training)(nn.Dense(64)(x))

    model = LinenModel(Attribute(True), [(2, 5)], eval_module=Attribute(False))
    mdl_vars = model.init(KEY)
    assert jnp.any(model.module(mdl_vars, KEY)(jnp.ones((2, 5))) == 0)
    assert not jnp.any(model.module(mdl_vars)(jnp.ones((2, 5))) == 0)


def test_a_cache_is_kept_from_call_to_call_in_evaluation():
    class Attention(nn.Module):
        decode: bool = False

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            mask = None if self.decode else nn.make_causal_mask(x[..., 0])
            return nn.MultiHeadDotProductAttention(1, decode=self.decode)(x, mask=mask)

    model, x = LinenModel(Attention(), [(1, 3, 5)]), jax.random.normal(KEY, (2, 3, 5))

    @jax.jit
    def run(mdl_vars):
        bound = model.module(mdl_vars)
        decoding = bound.clone(decode=True)
        decoding(x)  # Makes the cache.
        steps = [decoding(x[:, n : n + 1]) for n in range(3)]
        assert "cache" not in bound.variables
        return jnp.concatenate(steps, axis=1), bound(x)

    np.testing.assert_allclose(*run(model.init(KEY)), atol=1e-6)


def test_a_block_of_a_weight_is_gathered_at_entry():
    model, mdl_vars, x = tiny()
    kernel = mdl_vars["params"]["Dense_0"]["kernel"]
    block = ShardedWeight(jnp.pad(kernel, ((0, 1), (0, 0))), lambda block: block[:5])
    params = {"Dense_0": {**mdl_vars["params"]["Dense_0"], "kernel": block}}
    actual = model.module({**mdl_vars, "params": params})(x)
    np.testing.assert_array_equal(actual, model.module(mdl_vars)(x))


def boxed_stack(transform: str) -> nn.Module:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            dense = nn.Dense(5, kernel_init=nn.with_partitioning(lecun, ("data", "mdl")))
            return jnp.tanh(dense(x))

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return Layer()(x), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            lifted = {
                "variable_axes": {"params": 0},
                "split_rngs": {"params": True},
                "metadata_params": {nn.PARTITION_NAME: "layers"},
            }
            if transform == "scan":
                return nn.scan(Body, length=3, **lifted)()(x, None)[0]
            if transform == "vmap":
                return nn.vmap(Layer, in_axes=None, axis_size=3, **lifted)()(x).sum(0)
            return nn.remat(Layer)()(x)

    return Stack()


@pytest.mark.parametrize("transform", ["scan", "vmap", "remat"])
def test_bare_weights_behave_as_boxed_ones(transform):
    stack, x = boxed_stack(transform), jnp.ones((2, 5))
    model = LinenModel(stack, [(2, 5)])
    boxed = stack.init(KEY, x)
    (spec,) = [
        s
        for s in jax.tree.leaves(model.weight_specs()["params"], is_leaf=is_spec)
        if len(s.shape) > 1 and s.split_dims_mapping
    ]
    assert spec.split_dims_mapping == ("data", "mdl")
    assert spec.stack_split_dims_mapping == (() if transform == "remat" else ("layers",))
    bound = model.module(model.init(KEY))
    np.testing.assert_array_equal(bound(x), stack.apply(boxed, x))
