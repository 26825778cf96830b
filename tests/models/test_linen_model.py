"""Linen modules seen as models: against plain Flax and optax on one device."""

import functools
import zlib
from typing import Any

import flax.core.spmd
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from praxis_lite.errors import ConfigError
from praxis_lite.learner import Learner
from praxis_lite.models import LinenModel
from praxis_lite.partitioner import Partitioner
from praxis_lite.sharding import MeshConfig, make_mesh
from praxis_lite.sharding.gather import ShardedWeight
from praxis_lite.weight_sharding import WeightSharding
from tasks.loss import LossTask

lecun = nn.initializers.lecun_normal()
KEY = jax.random.key(3)


class Block(nn.Module):
    """Attention with three names on kernels that Flax draws flat, statistics, dropout, a sow."""

    heads: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.MultiHeadDotProductAttention(
            self.heads, kernel_init=nn.with_logical_partitioning(lecun, ("embed", "heads", "kv")),
            out_kernel_init=nn.with_partitioning(lecun, ("mdl", None, "data")),
        )(x)
        y = nn.with_logical_constraint(y, ("batch", None, "act"))
        y = nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(y)
        self.sow("losses", "square", jnp.mean(y**2))
        return x + nn.Dropout(0.2, deterministic=not self.train)(y), None


class Net(nn.Module):
    """Logits [B, 3] of [B, T, D]: rematerialised blocks in a scan."""

    dims: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(self.dims)(x)
        stack = nn.scan(
            nn.remat(Block, prevent_cse=False), length=2,
            variable_axes={"params": 0, "batch_stats": 0, "losses": 0},
            split_rngs={"params": True, "dropout": True},
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = stack(self.heads, train, name="blocks")(x, None)
        if train:
            x = x + 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(3, kernel_init=nn.with_partitioning(lecun, (None, "mdl")))(x.mean(1))


RULES = (("batch", ("replica", "data")), ("embed", "data"), ("heads", "mdl"), ("kv", None),
         ("act", None))
SIZES = {"even": (8, 2), "uneven": (15, 3)}
optimizer = functools.partial(optax.sgd, momentum=0.9)


def batches(num: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    return [
        {"x": rng.normal(size=(11, 5, 7)).astype(np.float32),
         "labels": rng.integers(0, 3, 11).astype(np.int32)}
        for _ in range(num)
    ]


def loss(model: Any, inputs: Any, key: Any) -> Any:
    xent = optax.softmax_cross_entropy_with_integer_labels(model(inputs["x"]), inputs["labels"])
    sown = sum(jnp.sum(x) for x in jax.tree.leaves(model.sown["losses"]))
    return jnp.mean(xent) + 0.01 * sown, {"sown": sown}


def task_of(sizes: str) -> LossTask:
    model = LinenModel(Net(*SIZES[sizes]), {"x": (1, 5, 7)})
    return LossTask(
        model, loss, Learner(optimizer, 0.1),
        weight_sharding=WeightSharding(logical_axis_rules=RULES),
        inputs_split_mapping={"map_1d": (("replica", "data"),), "map_3d": (("replica", "data"),)},
    )


@functools.cache
def on_mesh(sizes: str, shape: tuple[int, ...]) -> tuple[list, list, Any, Any, float]:
    """Returns losses, what was sown, fresh and trained variables and the evaluation's loss."""
    partitioner = Partitioner(task_of(sizes), make_mesh(MeshConfig(ici_mesh_shape=shape)))
    state, losses, sown = partitioner.init(partitioner.key(3)), [], []
    fresh = variables_of(partitioner, state)
    for batch in batches(4):
        batch = partitioner.global_batch(batch)
        state, outputs = partitioner.train_step(state, batch, partitioner.key(3))
        losses.append(float(outputs["metrics"]["loss"][0]))
        sown.append(float(outputs["metrics"]["sown"][0]))
    metrics = partitioner.eval_step(state.mdl_vars, batch)
    return losses, sown, fresh, variables_of(partitioner, state), float(metrics["loss"][0])


def variables_of(partitioner: Partitioner, state: Any) -> dict[str, Any]:
    """Returns the variables as NumPy arrays of true shapes, by collection as Flax has them."""
    mdl_vars = jax.tree.map(
        lambda x, true: np.asarray(x)[tuple(slice(size) for size in true.shape)],
        state.mdl_vars, partitioner.layout.shapes.mdl_vars,
    )
    return {"params": mdl_vars["params"], **mdl_vars["non_trainable"]}


@functools.cache
def plain(sizes: str) -> tuple[list, list, Any, Any, float]:
    """Returns the same by Flax and optax alone."""
    net = Net(*SIZES[sizes])
    init = jax.jit(lambda key: net.init(key, jnp.ones((1, 5, 7)), train=False))
    variables = nn.unbox(init(KEY))
    params, stats = variables["params"], variables["batch_stats"]
    transform = optimizer(0.1)
    slots, losses, sown = transform.init(params), [], []

    def loss_fn(params, stats, batch, rngs):
        logits, changed = net.apply(
            {"params": params, "batch_stats": stats}, batch["x"], train=rngs is not None,
            rngs=rngs, mutable=["batch_stats", "losses"],
        )
        added = sum(jnp.sum(x) for x in jax.tree.leaves(changed["losses"]))
        xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.mean(xent) + 0.01 * added, (added, changed["batch_stats"])

    @jax.jit
    def step(params, stats, slots, batch, n):
        key = jax.random.fold_in(KEY, n)
        rngs = {"dropout": key, "params": jax.random.fold_in(key, zlib.crc32(b"other streams"))}
        (loss, (added, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, stats, batch, rngs
        )
        updates, slots = transform.update(grads, slots, params)
        return optax.apply_updates(params, updates), stats, slots, loss, added

    for n, batch in enumerate(batches(4)):
        params, stats, slots, value, added = step(params, stats, slots, batch, n)
        losses.append(float(value))
        sown.append(float(added))
    heldout = jax.jit(lambda: loss_fn(params, stats, batch, None)[0])()
    trained = {"params": params, "batch_stats": stats}
    return losses, sown, {name: variables[name] for name in trained}, trained, float(heldout)


@pytest.mark.parametrize(("sizes", "shape"), [
    ("uneven", (1, 4, 2)),
    pytest.param("even", (1, 4, 2), marks=pytest.mark.slow),
    pytest.param("uneven", (2, 1, 3), marks=pytest.mark.slow),
])
def test_training_is_that_of_flax_and_optax_on_one_device(sizes, shape):
    losses, sown, fresh, trained, heldout = on_mesh(sizes, shape)
    wanted_losses, wanted_sown, wanted_fresh, wanted, wanted_heldout = plain(sizes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), fresh, wanted_fresh)
    np.testing.assert_allclose(losses, wanted_losses, atol=1e-5)
    np.testing.assert_allclose(sown, wanted_sown, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), trained, wanted)
    assert heldout == pytest.approx(wanted_heldout, abs=1e-5)


def test_padding_is_there_and_the_names_are_resolved(mesh_of):
    partitioner = Partitioner(task_of("uneven"), mesh_of(1, 4, 2))
    leaves = {leaf.path: leaf for leaf in partitioner.layout.leaves()}
    query = leaves["mdl_vars/params/blocks/MultiHeadDotProductAttention_0/query/kernel"]
    assert query.spec == PartitionSpec(None, "data", "mdl", None)
    assert query.shape == (2, 15, 3, 5) and query.padded_shape == (2, 16, 4, 5)
    head = leaves["mdl_vars/params/Dense_1/kernel"]
    assert head.spec == PartitionSpec(None, "mdl") and head.padded_shape == (15, 4)
    assert "nn.with_partitioning (None, 'mdl')" in head.declared_by


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
    wanted = Tiny().init(KEY, x, train=False)
    jax.tree.map(np.testing.assert_array_equal, mdl_vars["params"], wanted["params"])
    specs = jax.tree.map(lambda spec: spec.shape, model.weight_specs(), is_leaf=is_spec)
    assert specs == jax.tree.map(jnp.shape, mdl_vars)


def test_what_is_sown_is_reached_but_not_kept():
    model, mdl_vars, x = tiny()
    assert sorted(mdl_vars["non_trainable"]) == ["carry", "counters"]
    assert jax.tree.map(jnp.shape, mdl_vars["non_trainable"]["carry"]["state"]) == {
        "0": (2,), "1": (3,)
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
    variables = {"params": mdl_vars["params"], "counters": {"count": jnp.int32(0)},
                 "carry": {"state": (jnp.zeros(2), jnp.ones(3))}}
    wanted = Tiny().apply(variables, x, True, rngs={"dropout": KEY}, mutable=True)[0]
    np.testing.assert_array_equal(first, wanted)


def test_evaluation_changes_nothing_and_draws_nothing():
    model, mdl_vars, x = tiny()
    bound = model.module(mdl_vars)
    np.testing.assert_array_equal(bound(x), bound(x))
    assert int(model.non_trainable(bound)["counters"]["count"]) == 0
    assert float(bound.sown["aux"]["total"][0]) == 10.0
    with pytest.raises(ConfigError, match='Tiny cannot be applied.*needs PRNG for "anything"'):
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
    bound = model.module(model.init(KEY))
    decoding = bound.clone(decode=True)
    decoding(x)  # Makes the cache.
    steps = [decoding(x[:, n : n + 1]) for n in range(3)]
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), bound(x), atol=1e-6)
    assert "cache" not in bound.variables


def test_an_optimizer_of_whole_tensors_sees_one_layer_of_a_scan(mesh_of):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(nn.Dense(5)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(Body, length=3, **lifted)(name="body")(x, None)[0]

    adafactor = functools.partial(optax.adafactor, min_dim_size_to_factor=2)
    model, x = LinenModel(Stack(), [(1, 5)]), jax.random.normal(KEY, (7, 5))
    task = LossTask(model, lambda m, x, key: jnp.mean(m(x["x"]) ** 2), Learner(adafactor, 0.1),
                    inputs_split_mapping={"map_2d": (("replica", "data"), None)})
    partitioner = Partitioner(task, mesh_of(1, 4, 2))
    state, batch = partitioner.init(KEY), partitioner.global_batch({"x": np.asarray(x)})
    stacked = model.init(KEY)["params"]["body"]["Dense_0"]
    layers = [{name: w[n] for name, w in stacked.items()} for n in range(3)]

    def loss_fn(layers):
        y = x
        for layer in layers:
            y = jnp.tanh(y @ layer["kernel"] + layer["bias"][None])
        return jnp.mean(y**2)

    transform = adafactor(0.1)

    @jax.jit
    def step(layers, slots):
        loss, grads = jax.value_and_grad(loss_fn)(layers)
        updates, slots = transform.update(grads, slots, layers)
        return optax.apply_updates(layers, updates), slots, loss

    slots = jax.jit(transform.init)(layers)
    for _ in range(3):
        state, outputs = partitioner.train_step(state, batch, KEY)
        layers, slots, wanted = step(layers, slots)
        assert float(outputs["metrics"]["loss"][0]) == pytest.approx(float(wanted), abs=1e-6)
    assert wanted < 0.9 * loss_fn([{n: w[i] for n, w in stacked.items()} for i in range(3)])


def test_a_block_of_a_weight_is_gathered_at_entry():
    model, mdl_vars, x = tiny()
    kernel = mdl_vars["params"]["Dense_0"]["kernel"]
    block = ShardedWeight(jnp.pad(kernel, ((0, 1), (0, 0))), lambda block: block[:5])
    params = {"Dense_0": {**mdl_vars["params"]["Dense_0"], "kernel": block}}
    found = model.module({**mdl_vars, "params": params})(x)
    np.testing.assert_array_equal(found, model.module(mdl_vars)(x))


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
            lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True},
                      "metadata_params": {nn.PARTITION_NAME: "layers"}}
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
    (spec,) = [s for s in jax.tree.leaves(model.weight_specs()["params"], is_leaf=is_spec)
               if len(s.shape) > 1 and s.split_dims_mapping]
    assert spec.split_dims_mapping == ("data", "mdl")
    assert spec.stack_split_dims_mapping == (() if transform == "remat" else ("layers",))
    bound = model.module(model.init(KEY))
    np.testing.assert_array_equal(bound(x), stack.apply(boxed, x))


def test_names_of_a_weight_are_declared():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            rules = (("mlp", "mdl"),)
            short = nn.with_logical_partitioning(lecun, ("embed",), rules=rules)
            tuples = nn.with_partitioning(lecun, (("replica", "data"), None))
            x = nn.Dense(3, kernel_init=short)(x)
            return nn.Dense(3, kernel_init=tuples)(x)

    specs = LinenModel(Named(), [(1, 5)]).weight_specs()["params"]
    short = specs["Dense_0"]["kernel"]
    assert short.logical_axes == ("embed", None) and short.split_dims_mapping is None
    assert short.logical_axis_rules == (("mlp", "mdl"),)
    assert short.declared_by == "nn.with_logical_partitioning ('embed',)"
    tuples = specs["Dense_1"]["kernel"]
    assert tuples.split_dims_mapping == (("replica", "data"), None)
    assert tuples.logical_axes is None
    assert specs["Dense_0"]["bias"].declared_by == ""


def test_activations_find_the_rules_and_the_mesh(mesh_of):
    seen = []

    class Looking(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            rules = flax.core.spmd.get_logical_axis_rules()
            seen.append((rules, jax.sharding.get_abstract_mesh().axis_names))
            x = nn.with_logical_constraint(nn.Dense(3)(x), ("batch", "embed"))
            return jax.lax.with_sharding_constraint(x, PartitionSpec(None, "mdl"))

    rules = (("batch", ("replica", "data")), ("embed", "mdl"))
    task = LossTask(
        LinenModel(Looking(), [(1, 7)]), lambda model, x, key: jnp.mean(model(x["x"]) ** 2),
        Learner(optax.sgd, 0.1), weight_sharding=WeightSharding(logical_axis_rules=rules),
        inputs_split_mapping={"map_2d": (("replica", "data"), None)},
    )
    partitioner = Partitioner(task, mesh_of(1, 4, 2))
    batch = {"x": jax.ShapeDtypeStruct((11, 7), jnp.float32)}
    jaxpr = str(partitioner.trace("eval", batch).jaxpr)
    assert seen[-1] == (rules, ("replica", "data", "mdl"))
    assert "P(('replica', 'data'), 'mdl')" in jaxpr and "P(None, 'mdl')" in jaxpr


class Two(nn.Module):
    """Takes two inputs; its second layer has a wrong width when `wrong`."""

    wrong: bool = False

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Embed(11, 6, name="embed")(ids) * mask[..., None]
        return Second(name="second")(x, 5 if self.wrong else 6)


class Second(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, dims: int) -> jax.Array:
        names = ("embed", "mlp", "more") if dims == 7 else ("embed",)
        kernel = self.param("kernel", nn.with_partitioning(lecun, names), (dims, 3))
        return x @ kernel


ids = ("int32", (1, 4))
WRONG = {
    "an input that is missing": (
        lambda: LinenModel(Two(), {"ids": ids}),
        ["Two.__call__(ids, mask, train)", "missing a required argument: 'mask'", "has ['ids']",
         "Add what is missing"],
    ),
    "an input by another name": (
        lambda: LinenModel(Two(), {"ids": ids, "maks": (1, 4)}),
        ["has 'maks', which Two.__call__", "Did you mean mask?"],
    ),
    "inputs by position": (
        lambda: LinenModel(Two(), [ids]), ["missing a required argument: 'mask'", "1 by position"]
    ),
    "a wrong shape": (
        lambda: LinenModel(Two(wrong=True), [ids, (1, 4)]),
        ["Two cannot be initialised with init_inputs (int32(1, 4), float32(1, 4), train=False)",
         "dot_general", "(6,) and (5,)", "layer: second", "test_linen_model.py:"],
    ),
    "a wrong dtype": (
        lambda: LinenModel(Two(), {"ids": (1, 4), "mask": (1, 4)}),
        ["must be an integer", "layer: embed"],
    ),
    "no dtype": (
        lambda: LinenModel(Two(), {"ids": ("int23", (1, 4))}),
        ["LinenModel.init_inputs['ids'] is ('int23', (1, 4))", "a pair of dtype and shape"],
    ),
    "no inputs": (lambda: LinenModel(Two(), 784), ["LinenModel.init_inputs is 784"]),
    "a module that is not built": (
        lambda: LinenModel(Two, [(1, 4)]), ["LinenModel.module is", "that is built"]
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_before_anything_compiles(wrong):
    make, words = WRONG[wrong]
    with pytest.raises(ConfigError) as refused:
        make().weight_specs()
    for word in words:
        assert word in str(refused.value), str(refused.value)


def test_more_names_than_dims_are_refused_with_the_weights_path():
    class Long(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            bias = nn.with_partitioning(nn.initializers.zeros, ("data", "mdl"))
            return nn.Dense(3, bias_init=bias, name="out")(x)

    with pytest.raises(ConfigError, match=r"params/out/bias: .* 2 names, .* 1 dims, \(3,\)"):
        LinenModel(Long(), [(1, 5)]).weight_specs()


def test_a_call_with_other_shapes_is_refused_while_it_is_traced():
    model, mdl_vars, _ = tiny()
    with pytest.raises(ConfigError, match="Tiny cannot be applied to .*Dense_0") as refused:
        model.module(mdl_vars)(jnp.ones((2, 6)))
    assert "(5, 64)" in str(refused.value) and "(6, 64)" in str(refused.value)
