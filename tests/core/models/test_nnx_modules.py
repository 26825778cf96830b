"""What modules may look like: constructors, reads of a weight, what a pass must not do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import NnxModel
from praxis_lite.core.models.model import ShardedWeight
from praxis_lite.core.models.nnx_model import mdl_vars_of

ROWS, DIMS = 7, 5
INPUTS = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, DIMS)), jnp.float32)


class NoKeys(nnx.Module):
    """A module whose constructor draws nothing."""

    def __init__(self, scale: float):
        self.scale = nnx.Param(jnp.full(DIMS, scale))

    def __call__(self, x):
        return x * self.scale[...]


class Bare(nnx.Module):
    """A module without a constructor."""


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(NoKeys, 2.5),
        lambda: NoKeys(2.5),
        lambda rngs: NoKeys(2.5),
        lambda **streams: NoKeys(2.5),
    ],
)
def test_a_constructor_is_given_rngs_only_where_it_takes_them(build):
    weights = NnxModel(build).init(jax.random.key(0))
    np.testing.assert_array_equal(weights["params"]["scale"], np.full(DIMS, 2.5))
    assert NnxModel(Bare).init(jax.random.key(0)) == {"params": {}, "non_trainable": {}}


class Grows(nnx.Module):
    """Does what a train step cannot keep."""

    def __init__(self, how):
        self.how = how
        self.seen = nnx.Variable(jnp.zeros(2))
        if how == "pair":
            self.pair = nnx.Variable((jnp.zeros(2), jnp.zeros(3)))

    def __call__(self):
        if self.how == "shape":
            self.seen.set_value(jnp.zeros(3))
        if self.how == "dtype":
            self.seen.set_value(jnp.ones(2, jnp.bfloat16))
        if self.how == "weight":
            self.late = nnx.Param(jnp.zeros(3))
        self.cache = nnx.Cache(jnp.zeros(3))  # Not of the constructor: dropped.


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", r"^seen.*\(2,\).*\(3,\)"),
        ("weight", "^late: "),
        ("pair", "^pair: .*tuple"),
        ("dtype", None),
    ],
)
def test_what_a_step_cannot_keep_is_an_error_with_the_path(how, message):
    def run():
        model = NnxModel(functools.partial(Grows, how))
        module = model.module(model.init(jax.random.key(0)), jax.random.key(1))
        module()
        return model.non_trainable(module)

    if message is None:
        kept = run()
        assert set(kept) == {"seen"} and kept["seen"].dtype == jnp.float32
        return
    with pytest.raises(ConfigError, match=message):
        run()


class Low(nnx.LoRAParam):
    """A user's own kind of weight."""


class ManyReads(nnx.Module):
    """Reads its weight [3, 2] in the ways that Flax has."""

    def __init__(self):
        self.w = Low(jnp.arange(6.0).reshape(3, 2))

    def __call__(self):
        w = self.w
        reads = [w[...], w[1:], w.get_value(), w.T, w + 1, jnp.sin(w), w.reshape(2, 3), w.sum()]
        return reads, (w.shape, w.dtype, w.get_metadata("eager_sharding"), isinstance(w, Low))


def test_a_weight_of_which_there_is_a_block_is_read_whole():
    plain = ManyReads()
    block = ShardedWeight(plain.w[:, :1], lambda block: jnp.concatenate([block, block + 1], 1))
    module = NnxModel(ManyReads).module({"params": {"w": block}, "non_trainable": {}})
    assert module.w.get_raw_value().shape == (3, 1)
    actual, expected = module(), NnxModel(ManyReads).module(mdl_vars_of(plain))()
    jax.tree.map(np.testing.assert_array_equal, actual[0], expected[0])
    assert actual[1] == expected[1] == ((3, 2), jnp.float32, False, True)


class Doubled(nnx.Param):
    """Flax's way to make something of a weight whenever it is read."""

    def get_value(self, **index):
        return 2 * super().get_value(**index)


def test_what_a_kind_of_variable_makes_of_its_value_is_made_once():
    def build():
        module = ManyReads()
        module.w = Doubled(jnp.arange(6.0).reshape(3, 2))
        return module

    model = NnxModel(build)
    mdl_vars = model.init(jax.random.key(0))
    np.testing.assert_array_equal(mdl_vars["params"]["w"], np.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(model.module(mdl_vars).w[...], build().w[...])


WRAPPED = {
    "weight norm": lambda rngs: nnx.WeightNorm(nnx.Linear(DIMS, 2, rngs=rngs), rngs=rngs),
    "spectral norm": lambda rngs: nnx.SpectralNorm(nnx.Linear(DIMS, 2, rngs=rngs), rngs=rngs),
    "Linen": lambda rngs: nnx.bridge.ToNNX(nn.Dense(2), rngs=rngs).lazy_init(INPUTS),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_layers_around_layers_give_what_they_give_in_flax(name):
    model = NnxModel(WRAPPED[name])
    mdl_vars = model.init(jax.random.key(4))
    plain = WRAPPED[name](nnx.Rngs(4))
    np.testing.assert_allclose(model.module(mdl_vars)(INPUTS), plain(INPUTS), rtol=1e-6)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(mdl_vars)[0]]
    assert all("(" not in part.key for path in paths for part in path)  # Their keys are tuples.


def test_a_model_that_is_no_nnx_module_is_an_error_that_says_what_it_is():
    with pytest.raises(ConfigError, match=r"fdl.Config\(LinenModel"):
        NnxModel(lambda: nn.Dense(3)).weight_specs()


def test_a_setting_that_the_constructor_does_not_take_is_named_with_those_it_does():
    build = functools.partial(nnx.Linear, 3, 5, use_bais=False)
    with pytest.raises(ConfigError, match=r"'use_bais'.*use_bias"):
        NnxModel(build).weight_specs()
