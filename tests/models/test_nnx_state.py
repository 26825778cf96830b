"""What of a user's NNX module is trained, kept, or made anew: compared with Flax by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from praxis_lite.errors import ConfigError
from praxis_lite.models import NnxModel
from praxis_lite.models.nnx_model import mdl_vars_of
from praxis_lite.sharding.gather import ShardedWeight

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
    assert_same(flat(mdl_vars["params"]), by_path(nnx.state(plain, nnx.Param)), rtol=1e-6)
    plain_loss, plain_grads = nnx.value_and_grad(squares)(plain)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    assert_same(flat(grads), by_path(plain_grads), rtol=2e-4, atol=1e-5)
    stats = by_path(nnx.state(plain, nnx.BatchStat))
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
    plain.eval()
    np.testing.assert_allclose(loss, squares(plain), rtol=1e-5)


class Masks(nnx.Module):
    """Returns what its dropouts leave of ones: of each layer of a stack, of two, of one twice."""

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


def masks(key):
    model = NnxModel(Masks)
    return np.asarray(model.module(model.init(jax.random.key(0)), key)())


def test_random_streams_come_of_the_steps_key_and_are_all_different():
    found = masks(jax.random.key(3))
    np.testing.assert_array_equal(masks(jax.random.key(3)), found)
    for other in masks(jax.random.key(4)):
        assert not any((other == mask).all() for mask in found)
    for i, mask in enumerate(found):
        assert not any((mask == other).all() for other in found[:i])
    assert 0.3 < (found[:-1] > 0).mean() < 0.7
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
        "cache_index", "cached_key", "cached_value",
    }
    plain = Attention(nnx.Rngs(0))
    plain.eval()
    for _ in range(2):
        module = model.module(mdl_vars)
        outputs = module(INPUTS[:3])
        kept = model.non_trainable(module)
        assert kept["attention"]["cache_index"] == 3
        assert mdl_vars["non_trainable"]["attention"]["cache_index"] == 0
    np.testing.assert_allclose(outputs, plain(INPUTS[:3]), rtol=1e-5, atol=1e-6)


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
    [functools.partial(NoKeys, 2.5), lambda: NoKeys(2.5), lambda rngs: NoKeys(2.5),
     lambda **streams: NoKeys(2.5)],
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
        ("shape", r"seen: the constructor made it of shape \(2,\), and a pass of \(3,\)"),
        ("weight", r"late: the pass made this weight, .* in the module's constructor"),
        ("pair", r"pair: the Variable holds a tuple; wanted is one array"),
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
    found, expected = module(), NnxModel(ManyReads).module(mdl_vars_of(plain))()
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
    assert found[1] == expected[1] == ((3, 2), jnp.float32, False, True)


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
    assert all("(" not in path for path in flat(mdl_vars))  # Their keys are tuples.


def test_a_model_that_is_no_nnx_module_is_an_error_that_says_what_it_is():
    with pytest.raises(ConfigError, match=r"built as a Dense; .* fdl.Config\(LinenModel"):
        NnxModel(lambda: nn.Dense(3)).weight_specs()
