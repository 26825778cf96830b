"""Linen models trained on meshes: against plain Flax and optax on one device."""

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

from praxis_lite.core import Learner, MeshConfig, Partitioner, WeightSharding, make_mesh
from praxis_lite.models import LinenModel
from praxis_lite.tasks.loss import LossTask

lecun = nn.initializers.lecun_normal()
KEY = jax.random.key(3)


class Block(nn.Module):
    """Attention with three names on kernels that Flax draws flat, statistics, dropout, a sow."""

    heads: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.MultiHeadDotProductAttention(
            self.heads,
            kernel_init=nn.with_logical_partitioning(lecun, ("embed", "heads", "kv")),
            out_kernel_init=nn.with_partitioning(lecun, ("mdl", None, "data")),
        )(x)
        y = nn.with_logical_constraint(y, ("batch", None, "act"))
        y = nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(y)
        self.sow("losses", "square", jnp.mean(y**2))
        return x + nn.Dropout(0.2, deterministic=not self.train)(y), None


class Net(nn.Module):
    """Logits [B, 3] of [B, T, D]: rematerialized blocks in a scan."""

    dims: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(self.dims)(x)
        stack = nn.scan(
            nn.remat(Block, prevent_cse=False),
            length=2,
            variable_axes={"params": 0, "batch_stats": 0, "losses": 0},
            split_rngs={"params": True, "dropout": True},
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = stack(self.heads, train, name="blocks")(x, None)
        if train:
            x = x + 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(3, kernel_init=nn.with_partitioning(lecun, (None, "mdl")))(x.mean(1))


RULES = (
    ("batch", ("replica", "data")),
    ("embed", "data"),
    ("heads", "mdl"),
    ("kv", None),
    ("act", None),
)
DIMS, HEADS = 15, 3
optimizer = functools.partial(optax.sgd, momentum=0.9)


def batches(num: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    return [
        {
            "x": rng.normal(size=(11, 5, 7)).astype(np.float32),
            "labels": rng.integers(0, 3, 11).astype(np.int32),
        }
        for _ in range(num)
    ]


def loss(model: Any, inputs: Any, key: Any) -> Any:
    xent = optax.softmax_cross_entropy_with_integer_labels(model(inputs["x"]), inputs["labels"])
    sown = sum(jnp.sum(x) for x in jax.tree.leaves(model.sown["losses"]))
    return jnp.mean(xent) + 0.01 * sown, {"sown": sown}


def task_of() -> LossTask:
    model = LinenModel(Net(DIMS, HEADS), {"x": (1, 5, 7)})
    return LossTask(
        model,
        loss,
        Learner(optimizer, 0.1),
        weight_sharding=WeightSharding(logical_axis_rules=RULES),
        inputs_split_mapping={"map_1d": (("replica", "data"),), "map_3d": (("replica", "data"),)},
    )


def on_mesh(shape: tuple[int, ...]) -> tuple[list, list, Any, Any, float]:
    """Returns losses, what was sown, fresh and trained variables and the evaluation's loss."""
    partitioner = Partitioner(task_of(), make_mesh(MeshConfig(ici_mesh_shape=shape)))
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
        state.mdl_vars,
        partitioner.layout.shapes.mdl_vars,
    )
    return {"params": mdl_vars["params"], **mdl_vars["non_trainable"]}


def plain() -> tuple[list, list, Any, Any, float]:
    """Returns the same by Flax and optax alone."""
    net = Net(DIMS, HEADS)
    init = jax.jit(lambda key: net.init(key, jnp.ones((1, 5, 7)), train=False))
    variables = nn.unbox(init(KEY))
    params, stats = variables["params"], variables["batch_stats"]
    transform = optimizer(0.1)
    slots, losses, sown = transform.init(params), [], []

    def loss_fn(params, stats, batch, rngs):
        logits, changed = net.apply(
            {"params": params, "batch_stats": stats},
            batch["x"],
            train=rngs is not None,
            rngs=rngs,
            mutable=["batch_stats", "losses"],
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


@pytest.mark.slow
def test_training_is_that_of_flax_and_optax_on_one_device():
    losses, sown, fresh, trained, heldout = on_mesh((2, 2, 2))
    wanted_losses, wanted_sown, wanted_fresh, expected, wanted_heldout = plain()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), fresh, wanted_fresh)
    np.testing.assert_allclose(losses, wanted_losses, atol=1e-5)
    np.testing.assert_allclose(sown, wanted_sown, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), trained, expected)
    assert heldout == pytest.approx(wanted_heldout, abs=1e-5)


def test_padding_is_there_and_the_names_are_resolved(mesh_of):
    partitioner = Partitioner(task_of(), mesh_of(1, 4, 2))
    leaves = {leaf.path: leaf for leaf in partitioner.layout.leaves()}
    query = leaves["mdl_vars/params/blocks/MultiHeadDotProductAttention_0/query/kernel"]
    assert query.spec == PartitionSpec(None, "data", "mdl", None)
    assert query.shape == (2, 15, 3, 5) and query.padded_shape == (2, 16, 4, 5)
    head = leaves["mdl_vars/params/Dense_1/kernel"]
    assert head.spec == PartitionSpec(None, "mdl") and head.padded_shape == (15, 4)
    assert "nn.with_partitioning (None, 'mdl')" in head.declared_by


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
        LinenModel(Looking(), [(1, 7)]),
        lambda model, x, key: jnp.mean(model(x["x"]) ** 2),
        Learner(optax.sgd, 0.1),
        weight_sharding=WeightSharding(logical_axis_rules=rules),
        inputs_split_mapping={"map_2d": (("replica", "data"), None)},
    )
    partitioner = Partitioner(task, mesh_of(1, 4, 2))
    batch = {"x": jax.ShapeDtypeStruct((11, 7), jnp.float32)}
    jaxpr = str(partitioner.eval_step.trace(batch).jaxpr)
    assert seen[-1] == (rules, ("replica", "data", "mdl"))
    assert "P(('replica', 'data'), 'mdl')" in jaxpr and "P(None, 'mdl')" in jaxpr
