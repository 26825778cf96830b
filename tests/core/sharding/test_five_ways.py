"""One model declared in five ways: the same specs, the same layout, the same losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from praxis_lite.core import Learner, MeshConfig, Partitioner, WeightSharding, make_mesh
from praxis_lite.layers import BaseLayer, Embedding, Linear
from praxis_lite.models import FunctionModel, LinenModel
from praxis_lite.tasks.loss import LossTask
from tests.support.marks import slow_but

# V classes, D model dims, F hidden dims, B batch, T time.
# All axes divide the first, none the second.
SIZES = {"even": ((40, 16, 24), (1, 2, 4)), "uneven": ((37, 13, 29), (1, 4, 2))}
B, T, NUM_BLOCKS, NUM_STEPS = 11, 5, 2, 4
LEARNING_RATE = 0.01
# Of the weights by what they are called here, mesh axes and names for them.
AXES = {
    "emb": ("mdl", "data"),
    "gate": ("data", "mdl"),
    "up": ("data", "mdl"),
    "down": ("mdl", "data"),
    "out": ("data", "mdl"),
}
NAMES = {
    "emb": ("vocab", "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "out": ("embed", "vocab"),
}
AXIS_RULES = (("embed", "data"), ("mlp", "mdl"), ("vocab", "mdl"))


def shapes_of(sizes):
    V, D, F = sizes
    item = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    blocks = {f"{i}/{name}": shape for i in range(NUM_BLOCKS) for name, shape in item.items()}
    return {"emb": (V, D), **blocks, "out": (D, V)}


class Ours(BaseLayer):
    """Layers of this library, each with its split-dims mapping."""

    def __init__(self, sizes, *, rngs):
        V, D, F = sizes

        def linear(name, num_in, num_out):
            return Linear(num_in, num_out, weight_split_dims_mapping=AXES[name], rngs=rngs)

        self.emb = Embedding(V, D, weight_split_dims_mapping=AXES["emb"], rngs=rngs)
        self.gate = nnx.List([linear("gate", D, F) for _ in range(NUM_BLOCKS)])
        self.up = nnx.List([linear("up", D, F) for _ in range(NUM_BLOCKS)])
        self.down = nnx.List([linear("down", F, D) for _ in range(NUM_BLOCKS)])
        self.out = Linear(D, V, weight_split_dims_mapping=AXES["out"], rngs=rngs)

    def __call__(self, ids):
        x = self.emb(ids)
        for gate, up, down in zip(self.gate, self.up, self.down, strict=True):
            x = x + down(jax.nn.silu(gate(x)) * up(x))
        return self.out(x)


class NnxBlock(nnx.Module):
    """As a user of Flax NNX writes it; `of` says what a weight's metadata names."""

    def __init__(self, D, F, of, rngs):
        def linear(name, num_in, num_out):
            kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), of[name])
            return nnx.Linear(num_in, num_out, use_bias=False, kernel_init=kernel_init, rngs=rngs)

        self.gate, self.up, self.down = (
            linear("gate", D, F),
            linear("up", D, F),
            linear("down", F, D),
        )

    def __call__(self, x):
        return x + self.down(nnx.silu(self.gate(x)) * self.up(x))


class NnxLm(nnx.Module):
    """Of NnxBlocks; its own two weights are nnx.Params."""

    def __init__(self, sizes, of, *, rngs):
        V, D, F = sizes
        normal = nnx.initializers.normal()
        self.emb = nnx.Param(normal(rngs.params(), (V, D)), out_sharding=of["emb"])
        self.blocks = nnx.List([NnxBlock(D, F, of, rngs) for _ in range(NUM_BLOCKS)])
        out_init = nnx.with_metadata(normal, out_sharding=of["out"])
        self.out = nnx.Param(out_init(rngs.params(), (D, V)))

    def __call__(self, ids):
        x = self.emb[...][ids]
        for block in self.blocks:
            x = block(x)
        return x @ self.out[...]


class LinenLm(nn.Module):
    """As a user of Flax Linen writes it."""

    sizes: tuple[int, int, int]

    @nn.compact
    def __call__(self, ids):
        V, D, F = self.sizes

        def init(name):
            return nn.with_partitioning(nn.initializers.lecun_normal(), AXES[name])

        def dense(name, features, block):
            return nn.Dense(
                features, use_bias=False, kernel_init=init(name), name=f"{name}_{block}"
            )

        x = nn.Embed(V, D, embedding_init=init("emb"), name="emb")(ids)
        for i in range(NUM_BLOCKS):
            x = x + dense("down", D, i)(nn.silu(dense("gate", F, i)(x)) * dense("up", F, i)(x))
        return x @ self.param("out", init("out"), (D, V))


def plain_init(key, sizes):
    """The params of `plain`: a dict with a list of dicts."""
    drawn = {path: jax.random.normal(key, shape) for path, shape in shapes_of(sizes).items()}
    blocks = [
        {name: drawn[f"{i}/{name}"] for name in ("gate", "up", "down")} for i in range(NUM_BLOCKS)
    ]
    return {"emb": drawn["emb"], "blocks": blocks, "out": drawn["out"]}


def plain(params, ids):
    """The model as a function."""
    x = params["emb"][ids]
    for w in params["blocks"]:
        x = x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
    return x @ params["out"]


def loss(model, inputs, key):
    """Nats per token [B, T] of any of the five."""
    logits = model(inputs["ids"]) if callable(model) else plain(model, inputs["ids"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, inputs["labels"])


def ways(sizes):
    """Returns by name a model, its rules, and where in its tree a weight lies."""
    by_path = (
        (".*(gate|up|out)", 'shard_dim("data", 0)|shard_dim("mdl", 1)'),
        (".*(emb|down)", 'shard_dim("mdl", 0)|shard_dim("data", 1)'),
    )
    logical = WeightSharding(logical_axis_rules=AXIS_RULES)
    ours = "{name}/{i}/w", {"emb": "emb/emb_var", "out": "out/w"}
    flax_nnx = "blocks/{i}/{name}/kernel", {"emb": "emb", "out": "out"}
    linen = "{name}_{i}/kernel", {"emb": "emb/embedding", "out": "out"}
    functions = "blocks/{i}/{name}", {"emb": "emb", "out": "out"}
    return {
        "layers": (functools.partial(Ours, sizes), None, *ours),
        "logical": (functools.partial(NnxLm, sizes, NAMES), logical, *flax_nnx),
        "nnx": (functools.partial(NnxLm, sizes, AXES), None, *flax_nnx),
        "linen": (LinenModel(LinenLm(sizes), {"ids": ("int32", (1, T))}), None, *linen),
        "rules": (
            FunctionModel(functools.partial(plain_init, sizes=sizes)),
            WeightSharding(strategy=by_path),
            *functions,
        ),
    }


WAYS = tuple(ways((2, 3, 5)))
CASES = [(size, way) for size in SIZES for way in WAYS]


@functools.cache
def partitioner_of(size, way):
    sizes, shape = SIZES[size]
    model, weight_sharding, *_ = ways(sizes)[way]
    task = LossTask(
        model,
        loss,
        Learner(optax.adamw, LEARNING_RATE),
        weight_sharding=weight_sharding,
        inputs_split_mapping={"map_2d": ("data", None)},
    )
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


def own_path(size, way, path):
    """Returns where in a model's tree the weight lies that is called `path` here."""
    *_, in_block, others = ways(SIZES[size][0])[way]
    i, _, name = path.rpartition("/")
    return in_block.format(i=i, name=name) if i else others[name]


def leaves_of(size, way):
    """Returns the layout of each leaf of the state, by the names that weights have here."""
    here = {own_path(size, way, path): path for path in shapes_of(SIZES[size][0])}
    leaves = {}
    for leaf in partitioner_of(size, way).layout.leaves():
        local = next((own for own in here if leaf.path.endswith("/" + own)), None)
        path = leaf.path if local is None else leaf.path.removesuffix(local) + here[local]
        leaves[path] = (leaf.shape, leaf.padded_shape, leaf.dtype, leaf.spec, leaf.bytes_per_device)
    return leaves


@functools.cache
def initial(size):
    rng = np.random.default_rng(53)
    return {
        path: rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)
        for path, shape in shapes_of(SIZES[size][0]).items()
    }


@functools.cache
def batch_of(size):
    V, rng = SIZES[size][0][0], np.random.default_rng(54)
    ids, labels = (rng.integers(0, V, (B, T), np.int32) for _ in range(2))
    return {"ids": ids, "labels": labels, "weights": rng.uniform(size=(B, T)).astype(np.float32)}


@functools.cache
def losses_of(size, way):
    """Returns the losses of some steps on the mesh, from the same initial weights."""
    partitioner = partitioner_of(size, way)
    weights = {own_path(size, way, path): w for path, w in initial(size).items()}

    def placed(path, like):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        x = np.zeros(like.shape, like.dtype)
        if path.startswith("mdl_vars/params/"):
            w = weights[path.removeprefix("mdl_vars/params/")]
            x[tuple(map(slice, w.shape))] = w
        return jax.device_put(x, like.sharding)

    state = jax.tree_util.tree_map_with_path(placed, partitioner.layout.abstract(partitioner.mesh))
    key, losses = partitioner.key(0), []
    batch = partitioner.global_batch(batch_of(size))
    for _ in range(NUM_STEPS):
        state, outputs = partitioner.train_step(state, batch, key)
        losses.append(float(outputs["metrics"]["loss"][0]))
    return losses


@functools.cache
def losses_on_one_device(size):
    """The plain functions and optax, without this library."""
    w = {path: jnp.asarray(x) for path, x in initial(size).items()}
    blocks = [{n: w[f"{i}/{n}"] for n in ("gate", "up", "down")} for i in range(NUM_BLOCKS)]
    params = {"emb": w["emb"], "blocks": blocks, "out": w["out"]}
    optimizer = optax.adamw(LEARNING_RATE)
    slots, losses = optimizer.init(params), []

    def mean(params, batch):
        weights = batch["weights"]
        return jnp.sum(loss(params, batch, None) * weights) / jnp.sum(weights)

    @jax.jit
    def step(params, slots, batch):
        value, grads = jax.value_and_grad(mean)(params, batch)
        updates, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots, value

    for _ in range(NUM_STEPS):
        params, slots, value = step(params, slots, batch_of(size))
        losses.append(float(value))
    return losses


@pytest.mark.parametrize(("size", "way"), CASES)
def test_each_way_ends_in_the_same_specs_and_layout(size, way):
    leaves = leaves_of(size, way)
    for path in shapes_of(SIZES[size][0]):
        spec = leaves[f"mdl_vars/params/{path}"][3]
        assert tuple(spec) == AXES[path.rpartition("/")[2]], path
    assert leaves == leaves_of(size, "layers")
    num_padded = sum(padded != shape for shape, padded, *_ in leaves.values())
    # Weights, and two slots of each.
    assert num_padded == (0 if size == "even" else 3 * len(shapes_of(SIZES[size][0])))


@pytest.mark.parametrize("way", slow_but({"layers", "linen", "rules"}, WAYS))
def test_each_way_has_the_same_losses(way):
    losses = losses_of("uneven", way)
    assert losses[-1] < losses[0] - 0.1
    np.testing.assert_allclose(losses, losses_of("uneven", "layers"), rtol=0, atol=1e-6)
    np.testing.assert_allclose(losses, losses_on_one_device("uneven"), rtol=1e-6)


def test_the_layout_tells_the_ways_apart():
    declared_by = {}
    for way in WAYS:
        leaves = {leaf.path: leaf for leaf in partitioner_of("even", way).layout.leaves()}
        path = own_path("even", way, "0/gate")
        declared_by[way] = leaves[f"mdl_vars/params/{path}"].declared_by
    assert len(set(declared_by.values())) == len(WAYS), declared_by
