"""What of a user's NNX module is trained, kept, or made anew: compared with Flax by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite.core import NnxModel

# Flax has other ways for these now; users' models have them still.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow")

LAYERS, DIMS, ROWS = 3, 5, 7
INPUTS = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, DIMS)), jnp.float32)
METADATA = {nnx.PARTITION_NAME: "layers"}


class Block(nnx.Module):
    """Linear, batch norm, dropout; its width declared to be split."""

    def __init__(self, rate, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.linear = nnx.Linear(DIMS, DIMS, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(DIMS, momentum=0.75, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jax.nn.relu(self.norm(self.linear(x))))


class Net(nnx.Module):
    """Most of what Flax's guides show, in one model."""

    def __init__(self, rate=0.0, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata=METADATA)
        def create(rngs):
            return Block(rate, rngs)

        self.blocks = create(rngs)
        self.branches = nnx.Dict(a=nnx.Linear(DIMS, DIMS, rngs=rngs))
        self.tail = nnx.List([nnx.Linear(DIMS, DIMS, rngs=rngs), nnx.Dropout(rate, rngs=rngs)])
        self.tied = self.tail[0].kernel
        self.offsets = jnp.arange(DIMS, dtype=jnp.float32)
        self.num_calls = nnx.Variable(0)
        self.num_rows = nnx.Intermediate(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=METADATA)
        @nnx.remat
        def apply(x, block):
            return block(x)

        x = apply(x + self.offsets[None], self.blocks)
        self.sow(nnx.Intermediate, "hidden", x)
        x = nnx.cond(True, lambda layer, x: layer(x), lambda layer, x: x, self.branches.a, x)
        x = nnx.jit(lambda layer, x: layer(x))(self.tail[0], x)
        x = self.tail[1](x) @ self.tied[...].T
        self.num_calls.set_value(self.num_calls.get_value() + 1)
        self.num_rows.set_value(self.num_rows[...] + x.shape[0])
        return x


def plain_net(rate=0.0):
    with nnx.use_eager_sharding(False):  # Flax by itself would ask for a mesh.
        return Net(rate, rngs=nnx.Rngs(2))


def squares(module, x=INPUTS):
    return jnp.sum(jnp.sin(module(x)))


@functools.cache
def step_of(build, has_key=True):
    """Returns a compiled (params, non_trainable, key) -> (loss, new non_trainable), gradients."""
    model = NnxModel(build)

    def loss(params, non_trainable, key):
        module = model.module(
            {"params": params, "non_trainable": non_trainable}, key if has_key else None
        )
        return squares(module), model.non_trainable(module)

    return model, jax.jit(jax.value_and_grad(loss, has_aux=True))


def by_path(state):
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def flat(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


def assert_same(ours, flax, **tolerances):
    assert ours.keys() == flax.keys()
    for path, leaf in ours.items():
        np.testing.assert_allclose(leaf, flax[path], err_msg=path, **tolerances)


def test_a_step_gives_the_loss_the_gradients_and_the_statistics_that_flax_gives():
    model, step = step_of(Net)
    mdl_vars = model.init(jax.random.key(2))
    (loss, kept), grads = step(*mdl_vars.values(), jax.random.key(9))
    plain = plain_net()
    assert_same(flat(mdl_vars["params"]), by_path(nnx.compat.state(plain, nnx.Param)), rtol=1e-6)
    plain_loss, plain_grads = nnx.compat.jit(nnx.compat.value_and_grad(squares))(plain)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    assert_same(flat(grads), by_path(plain_grads), rtol=2e-4, atol=1e-5)
    stats = by_path(nnx.compat.state(plain, nnx.BatchStat))
    assert_same({path: x for path, x in flat(kept).items() if path in stats}, stats, rtol=1e-5)
    assert set(flat(kept)) == {*stats, "num_calls", "offsets"}
    # A tied weight is one leaf, of the first path to it, with the gradient of both places.
    assert "tied" not in mdl_vars["params"] and "kernel" in mdl_vars["params"]["tail"]["0"]


def test_what_a_pass_keeps_is_of_the_same_type_so_that_a_step_compiles_once():
    model, step = step_of(Net)
    params, non_trainable = model.init(jax.random.key(2)).values()
    before = step._cache_size()
    for number in range(3):
        assert non_trainable["num_calls"] == number
        (_, non_trainable), _ = step(params, non_trainable, jax.random.key(number))
    assert step._cache_size() <= max(before, 1)
    np.testing.assert_array_equal(non_trainable["offsets"], np.arange(DIMS))


def test_without_a_key_statistics_are_used_and_not_gathered_and_nothing_is_dropped():
    model, evaluate = step_of(functools.partial(Net, 0.5), has_key=False)
    params, non_trainable = model.init(jax.random.key(2)).values()
    stats = non_trainable["blocks"]["norm"]
    stats["mean"] = stats["mean"] + 0.5
    (loss, kept), _ = evaluate(params, non_trainable, jax.random.key(9))
    jax.tree.map(np.testing.assert_array_equal, kept["blocks"], non_trainable["blocks"])
    plain = plain_net(0.5)
    plain.blocks.norm.mean.set_value(stats["mean"])
    plain.eval(graph=True)
    np.testing.assert_allclose(loss, nnx.compat.jit(squares)(plain), rtol=1e-5)


class Masks(nnx.Module):
    """Returns ones behind dropouts: of each layer of a stack, of two, of one twice."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def create(rngs):
            return nnx.Dropout(0.5, rngs=rngs)

        self.stack = create(rngs)
        self.one, self.other = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))
        self.shared = self.one
        self.rngs = rngs

    def __call__(self):
        ones = jnp.ones(101)
        stack = nnx.vmap(lambda dropout: dropout(ones))(self.stack)
        noise = self.rngs.noise.uniform((101,))
        return jnp.stack([*stack, self.one(ones), self.other(ones), self.shared(ones), noise])


@jax.jit
def _masks(key):
    return NnxModel(Masks).module({"params": {}, "non_trainable": {}}, key)()


def masks(key):
    return np.asarray(jax.device_get(_masks(key)))


def test_random_streams_come_of_the_steps_key_and_are_all_different():
    actual = masks(jax.random.key(3))
    np.testing.assert_array_equal(masks(jax.random.key(3)), actual)
    for other in masks(jax.random.key(4)):
        assert not any((other == mask).all() for mask in actual)
    for i, mask in enumerate(actual):
        assert not any((mask == other).all() for other in actual[:i])
    assert 0.3 < (actual[:-1] > 0).mean() < 0.7
    model = NnxModel(Masks)
    assert model.init(jax.random.key(0)) == {"params": {}, "non_trainable": {}}
    assert (masks(None)[:-1] == 1).all()


def test_a_stream_does_not_depend_on_which_others_a_model_has():
    class Fewer(nnx.Module):
        def __init__(self, rngs):
            self.other = nnx.Dropout(0.5, rngs=rngs)

    module = NnxModel(Fewer).module({}, jax.random.key(3))
    np.testing.assert_array_equal(module.other(jnp.ones(101)), masks(jax.random.key(3))[4])


class Attention(nnx.Module):
    """Decodes a token at a time, with a cache that the constructor makes."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, DIMS, 4, decode=True, rngs=rngs)
        self.attention.init_cache((1, 3, DIMS))

    def __call__(self, x):
        return jnp.stack([self.attention(row[None, None])[0, 0] for row in x])


def test_a_cache_is_kept_state_and_a_pass_starts_from_the_one_it_is_given():
    model = NnxModel(Attention)
    mdl_vars = model.init(jax.random.key(0))
    assert set(mdl_vars["non_trainable"]["attention"]) == {
        "cache_index",
        "cached_key",
        "cached_value",
    }
    plain = Attention(nnx.Rngs(0))
    plain.eval()

    @jax.jit
    def decode(mdl_vars):
        module = model.module(mdl_vars)
        return module(INPUTS[:3]), model.non_trainable(module)

    for _ in range(2):
        outputs, kept = decode(mdl_vars)
        assert kept["attention"]["cache_index"] == 3
        assert mdl_vars["non_trainable"]["attention"]["cache_index"] == 0
    expected = nnx.jit(lambda plain: plain(INPUTS[:3]))(plain)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
