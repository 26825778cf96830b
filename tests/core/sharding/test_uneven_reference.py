"""Every run of reference/uneven_padding.json: four small language models on five meshes.

The golden file gives shapes, splits and collectives, from which the model is plain, but neither its
initial weights nor its batch. So the layout and the bytes are compared with the golden file, and
the losses with the same steps in plain JAX and optax on one device.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import Task
from praxis_lite.core import Learner, MeshConfig, Partitioner, constrain, make_mesh
from praxis_lite.layers import BaseLayer
from praxis_lite.layers.base.base_layer import ones, zeros
from praxis_tools.explain import hlo
from tests.support.goldens import golden, trimmed

FILE = "reference/uneven_padding.json"
RUNS = sorted(golden(FILE)["runs"])
NUM_ROWS, NUM_TOKENS = 8, 6  # the golden's all-gathers of s32[8,6]


def waves(phase):
    """Returns an initializer that compiles in no time, unlike random draws."""

    def init(key, shape, dtype):
        places = jnp.arange(math.prod(shape), dtype=dtype).reshape(shape)
        return 0.4 * jnp.sin(1.7 * places + phase)

    return init


class ResidualLm(BaseLayer):
    """Returns logits [B, T, V] of ids [B, T]: embedding, residual MLPs, RMS norm, softmax."""

    def __init__(self, vocab, d, ff, layers, splits, constrained, *, rngs):
        def weight(name, shape, init):
            setattr(self, name, self.weight(shape, splits[name], init=init, rngs=rngs))

        weight("emb", (vocab, d), waves(0.0))
        for i in range(layers):
            weight(f"l{i}_up", (d, ff), waves(i + 1.0))
            weight(f"l{i}_up_b", (ff,), zeros)
            weight(f"l{i}_down", (ff, d), waves(i + 1.5))
        weight("scale", (d,), ones)
        weight("out_w", (d, vocab), waves(0.5))
        weight("out_b", (vocab,), zeros)
        self.layers, self.constrained = layers, constrained

    def __call__(self, ids):
        residual, hidden = (("data", None, None), ("data", None, "mdl"))
        if not self.constrained:
            residual = hidden = None
        x = constrain(jnp.take(self.emb[...], ids, axis=0), residual)
        for i in range(self.layers):
            up, bias, down = (getattr(self, f"l{i}_{name}")[...] for name in ("up", "up_b", "down"))
            h = constrain(jax.nn.relu(x @ up + bias[None, None]), hidden)
            x = constrain(x + h @ down, residual)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        logits = x * self.scale[...][None, None] @ self.out_w[...] + self.out_b[...][None, None]
        return constrain(logits, hidden)


def mean_loss(model, ids):
    log_probs = jax.nn.log_softmax(model(ids))
    labels = jnp.roll(ids, -1, axis=1)
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


class NextToken(Task):
    def compute_loss(self, model, inputs, key):
        return {"loss": (mean_loss(model, inputs["ids"]), jnp.float32(inputs["ids"].size))}


def batch(config):
    ids = np.random.default_rng(17).integers(0, config["vocab"], (NUM_ROWS, NUM_TOKENS))
    return {"ids": ids.astype(np.int32)}


def task_of(run_name):
    run = golden(FILE)["runs"][run_name]
    config = golden(FILE)["configs"][run_name.split("|")[0]]
    splits = {
        name: tuple(tuple(e) if isinstance(e, list) else e for e in spec)
        for name, spec in run["specs"].items()
    }
    constrained = not run_name.endswith("activations_free")
    model = functools.partial(ResidualLm, **config, splits=splits, constrained=constrained)
    return NextToken(model, Learner(optax.adamw, 1e-2), inputs_split_mapping={"map_2d": ("data",)})


def mesh_of(run_name):
    axes = re.findall(r"([a-z]+)(\d+)", run_name.split("|")[1])
    names, sizes = zip(*axes, strict=True)
    return make_mesh(MeshConfig(ici_mesh_shape=tuple(map(int, sizes)), axis_names=names))


@functools.cache
def one_device_losses(model_name, num_steps):
    """Losses in plain JAX and optax: no Partitioner, no Learner, no padding."""
    run_name = next(name for name in RUNS if name.startswith(model_name))
    config = golden(FILE)["configs"][model_name]
    model = task_of(run_name).model
    optimizer = optax.adamw(1e-2)
    params = jax.jit(model.init)(jax.random.key(0))["params"]
    ids = batch(config)["ids"]

    @jax.jit
    def step(params, slots):
        loss, grads = jax.value_and_grad(
            lambda params: mean_loss(model.module({"params": params, "non_trainable": {}}), ids)
        )(params)
        updates, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots, loss

    slots, losses = optimizer.init(params), []
    for _ in range(num_steps):
        params, slots, loss = step(params, slots)
        losses.append(float(loss))
    return losses


@functools.cache
def partitioner_of(run_name):
    return Partitioner(task_of(run_name), mesh_of(run_name))


@pytest.mark.parametrize("run_name", RUNS)
def test_the_layout_is_that_of_the_reference(run_name):
    """Specs and padded shapes, of the weights and of AdamW's two slots of each; bytes."""
    run, leaves = golden(FILE)["runs"][run_name], list(partitioner_of(run_name).layout.leaves())
    for name, spec in run["specs"].items():
        same = [leaf for leaf in leaves if leaf.path.split("/")[-1] == name]
        assert len(same) == 3, name
        for leaf in same:
            assert trimmed(leaf.spec) == trimmed(spec), leaf.path
            assert list(leaf.padded_shape) == run["padded_shapes"].get(name, list(leaf.shape))
    # Three int32 scalars more than the reference: counts of updates and of skipped steps.
    assert len(leaves) == run["aliased_inputs"] + 3
    assert sum(leaf.bytes_per_device for leaf in leaves) == run["state_bytes_per_device"] + 12


QUICK_RUNS = {"uneven_257_12_30|replica2_data2_mdl2|1d|pad"}
# With the quick one every model, mesh and way to split; the others are of the same kinds.
SLOW_RUNS = {
    "tiny_dims_below_mesh|data1_mdl8|1d|pad",
    "uneven_257_12_30|data1_mdl8|1d|drop",
    "uneven_257_12_30|data1_mdl8|2d|pad",
}


def marks_of(run_name):
    if run_name in QUICK_RUNS:
        return []
    return [pytest.mark.slow] if run_name in SLOW_RUNS else [pytest.mark.nightly]


@pytest.mark.parametrize("run_name", [pytest.param(n, marks=marks_of(n)) for n in RUNS])
def test_a_run_of_the_reference(run_name):
    run, partitioner = golden(FILE)["runs"][run_name], partitioner_of(run_name)
    model_name, leaves = run_name.split("|")[0], list(partitioner.layout.leaves())
    inputs, state_bytes = batch(golden(FILE)["configs"][model_name]), run["state_bytes_per_device"]
    element_spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    compiled = partitioner.train_step.lower(element_spec).compile()
    assert hlo.num_donated(compiled) == run["aliased_inputs"] + 3
    assert hlo.donated_bytes(compiled) == state_bytes + 12

    key = partitioner.key(0)
    state, losses = partitioner.init(key), []
    assert device_bytes(state) == {state_bytes + 12}
    for _ in run["losses"]:
        old = state
        state, outputs = partitioner.train_step(old, partitioner.global_batch(inputs), key)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        losses.append(float(outputs["metrics"]["loss"][0]))
    expected = one_device_losses(model_name, 20)[: len(losses)]
    np.testing.assert_allclose(losses, expected, atol=1e-5, rtol=0)
    assert expected[0] > 2 * expected[-1] or len(expected) < 20 or model_name.startswith("tiny")

    padding = {
        leaf.path: x[outside(leaf.shape, x.shape)]
        for leaf, x in zip(leaves, map(np.asarray, jax.tree.leaves(state)), strict=True)
    }
    assert all(np.all(x == 0.0) for x in padding.values())
    assert any(x.size for x in padding.values()) == bool(run["padded_shapes"])


def outside(shape, padded_shape):
    """Returns the mask of what lies beyond `shape`."""
    mask = np.ones(padded_shape, bool)
    mask[tuple(slice(dim) for dim in shape)] = False
    return mask


def device_bytes(state):
    """Returns the distinct totals of bytes that devices hold of a state."""
    held = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            size = math.prod(shard.data.shape) * shard.data.dtype.itemsize
            held[shard.device] = held.get(shard.device, 0) + size
    return set(held.values())
