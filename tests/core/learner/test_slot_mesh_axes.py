"""ZeRO-1: where slots go besides their weights' axes, and what the compiled step then sends."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite import Task
from praxis_lite.core import Learner, Partitioner, WeightSpec
from praxis_lite.core.errors import warn_once
from praxis_lite.core.learner.slots import extended_specs
from praxis_lite.core.learner.update import SCOPE
from praxis_lite.layers import BaseLayer
from praxis_lite.layers.base.variables import stacked
from praxis_lite.optimizers import muon_matrices
from praxis_tools.explain import hlo
from tests.core.learner import zero1_runs
from tests.support.goldens import trimmed
from tests.support.on_tpu import needs_libtpu, printed_by

SIZES = {"replica": 1, "data": 4, "mdl": 2}


def extended(shape, split=None, stack=(), axes=("data",), sizes=SIZES):
    weight = WeightSpec(shape, jnp.float32, split, stack)
    return extended_specs({"a": {"w": weight}}, axes, sizes)["a"]["w"]


@pytest.mark.parametrize(
    ("shape", "split", "stack", "wanted"),
    [
        ((8, 12), None, (), P(None, "data")),  # Both divide: the larger.
        ((12, 8), None, (), P("data", None)),
        ((8, 8), None, (), P("data", None)),
        ((8, 13), None, (), P("data", None)),  # 13 would become 16.
        ((7, 13), None, (), P("data", None)),  # 8 x 13 = 104 are fewer than 7 x 16 = 112.
        ((13, 37), ("mdl", None), (), P("mdl", "data")),  # 14 x 40, not 16 x 37 = 592.
        ((16, 3), ("mdl", None), (), P(("mdl", "data"), None)),  # A part of the weight's part.
        ((8, 12), ("data", None), (), P("data", None)),  # The weight has the axis.
        ((8, 12), (("data", "mdl"), None), (), P(("data", "mdl"), None)),
        ((4, 8, 12), None, (None,), P(None, None, "data")),
        ((4, 3, 7), None, (None,), P(None, None, "data")),  # Padded, but not the layers.
        ((4, 3), None, (None,), P("data", None)),  # No dim of its own will do.
        ((4, 3), None, ("data",), P("data", None)),
        ((3,), None, (), P(None)),  # Fewer elements than devices.
        ((2, 3), None, (), P(None, None)),
        ((7,), ("mdl",), (), P("mdl")),  # Fewer than both axes' 8 devices.
        ((), None, (), P()),
    ],
)
def test_a_slots_axis_goes_where_it_costs_the_least_padding(shape, split, stack, wanted):
    assert extended(shape, split, stack) == wanted
    local = WeightSpec(shape, jnp.float32, split, stack).partition_spec(tuple(SIZES), "w")
    assert extended(shape, split, stack, axes=()) == local


@pytest.mark.parametrize(
    ("shape", "split", "stack", "expected"),
    [
        ((4, 13, 37), ("data", "mdl"), (None,), P("data", None, "mdl")),
        ((5, 13, 37), (("mdl", "data"), None), (None,), P("data", "mdl", None)),
        ((8, 13), ("data",), ("mdl",), P(("mdl", "data"), None)),
        ((3, 13, 37), ("data", "mdl"), (None,), P(None, "data", "mdl")),  # Three layers.
        ((4, 13), ("data",), ("mdl",), P("mdl", "data")),  # Fewer layers than both axes' devices.
        ((13, 37), ("data", "mdl"), (), P("data", "mdl")),
    ],
)
def test_stacked_slot_mesh_axes_split_the_slots_of_a_stack_by_layer(shape, split, stack, expected):
    weight = WeightSpec(shape, jnp.float32, split, stack)
    assert extended_specs({"w": weight}, (), SIZES, ("data",))["w"] == expected


@pytest.mark.parametrize(
    ("shape", "stack", "expected"),
    [
        ((3, 13, 37), (None,), "3 layers.* 4 shards .* at most 3 devices"),
        ((13, 37), (), "no stacked layers"),
    ],
)
def test_stacked_slot_mesh_axes_without_effect_are_reported(shape, stack, expected, caplog):
    weight = WeightSpec(shape, jnp.float32, ("data", "mdl"), stack)
    warn_once.cache_clear()
    extended_specs({"w": weight, "b": weight}, (), SIZES, ("data",))
    (message,) = caplog.messages
    assert re.search(r"stacked_slot_mesh_axes=\('data',\) has no effect.*" + expected, message)


class Stack(BaseLayer):
    """Four residual layers that multiply by a matrix and its transpose."""

    def __init__(self, *, rngs):
        def weight(key):
            return self.weight((13, 37), ("data", "mdl"), rngs=nnx.Rngs(key))

        self.w = stacked(jax.vmap(weight)(jax.random.split(rngs.params(), 4)), None)

    def __call__(self, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w) @ w.T, None

        return jax.lax.scan(layer, x, self.w[...])[0]


class Regression(Task):
    def compute_loss(self, model, inputs, key):
        return {"loss": (jnp.mean((model(inputs["x"]) - 1.0) ** 2), jnp.float32(1.0))}


def muon_steps(mesh, axes):
    """Returns the loss of each of five steps, and the number of all-gathers in an update."""
    muon = functools.partial(
        optax.contrib.muon, consistent_rms=0.2, muon_weight_dimension_numbers=muon_matrices()
    )
    learner = Learner(muon, 0.02, stacked_slot_mesh_axes=axes)
    partitioner = Partitioner(
        Regression(Stack, learner, inputs_split_mapping={"map_2d": ("data", None)}), mesh
    )
    state, key = partitioner.init(partitioner.key(0)), partitioner.key(0)
    x = np.random.default_rng(0).normal(size=(8, 13)).astype(np.float32)
    compiled = partitioner.train_step.lower({"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}).compile()
    losses = []
    for _ in range(5):
        state, outputs = partitioner.train_step(state, partitioner.global_batch({"x": x}), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
    gathers = [x for x in hlo.collectives(compiled) if x.kind == "all-gather"]
    return losses, sum(x.count for x in gathers if f"/{SCOPE}/" in x.op_name)


def test_with_slots_by_layer_muon_gathers_less_and_computes_the_same(mesh_of):
    expected, _ = muon_steps(mesh_of(1, 1, 1), ())
    as_weights, num_as_weights = muon_steps(mesh_of(1, 4, 2), ())
    by_layer, num_by_layer = muon_steps(mesh_of(1, 4, 2), ("data",))
    np.testing.assert_allclose(as_weights, expected, rtol=1e-5)
    np.testing.assert_allclose(by_layer, expected, rtol=1e-5)
    assert num_by_layer < num_as_weights / 5


def test_axes_that_the_weight_has_are_left_out_of_several():
    axes = ("replica", "data")
    sizes = {"replica": 2, "data": 2, "mdl": 2}
    assert extended((8, 4), None, axes=axes, sizes=sizes) == P(("replica", "data"), None)
    assert extended((8, 4), ("data", None), axes=axes, sizes=sizes) == P(("data", "replica"), None)
    assert extended((8, 4), axes, axes=axes, sizes=sizes) == P("replica", "data")


def test_without_a_mesh_or_axes_nothing_is_stated(mesh_of):
    mesh, tree = mesh_of(1, 4, 2), {"w": jnp.ones((8, 3))}
    learner = Learner(optax.sgd, 0.1, slot_mesh_axes=("data",))
    specs = {"w": WeightSpec((8, 3), jnp.float32), "frozen": WeightSpec((8, 3), jnp.float32)}
    assert learner.bind(specs).groups.lay_out(tree) is tree
    assert Learner(optax.sgd, 0.1).bind(specs, mesh.shape).groups.lay_out(tree) is tree
    with jax.set_mesh(mesh):  # Frozen weights have no gradient.
        actual = jax.jit(learner.bind(specs, mesh.shape).groups.lay_out)(tree)
    assert actual.keys() == {"w"} and trimmed(actual["w"].sharding.spec) == ["data"]


def collective_bytes(compiled):
    totals = hlo.summarize(hlo.collectives(compiled))
    return {kind: size for kind, (_, size) in totals.items()}


def test_with_zero_1_a_device_updates_its_part_and_gathers_the_weights(mesh_of):
    mesh, num_bytes = mesh_of(1, 8, 1), 4 * zero1_runs.NUM_WEIGHTS
    _, whole = zero1_runs.compiled_step(mesh, ())
    scalars = 4 * 4  # The loss, its weight, the gradients' norm: some once more.
    assert collective_bytes(whole).keys() == {"all-reduce"}
    partitioner, split = zero1_runs.compiled_step(mesh, ("data",))
    actual = collective_bytes(split)
    # The CPU's compiler has no reduce-scatter: it sums everything, and keeps a part.
    assert actual.keys() == {"all-reduce", "all-gather"}
    assert num_bytes <= actual["all-reduce"] <= num_bytes + scalars
    assert actual["all-gather"] == num_bytes
    by_path = {leaf.path: leaf for leaf in partitioner.layout.leaves()}
    for leaf, x in zip(by_path.values(), jax.tree.leaves(split.input_shardings[0][0]), strict=True):
        held = x.shard_shape(leaf.padded_shape)
        if "/mu/" in leaf.path or "/nu/" in leaf.path:
            assert math.prod(held) == math.prod(leaf.shape) // 8
        else:
            assert held == leaf.shape
    # Of what the update holds besides: the gradients whole, nothing else of that size.
    sizes = [hlo.memory_per_device(compiled).temp for compiled in (whole, split)]
    assert sizes[1] <= sizes[0]


@pytest.mark.slow
@needs_libtpu
def test_a_tpu_reduce_scatters_the_gradients_and_gathers_the_weights():
    whole, split = printed_by("tests.core.learner.zero1_runs")
    num_bytes = 4 * zero1_runs.NUM_WEIGHTS
    assert whole.keys() == {"all-reduce"} and 0 <= whole["all-reduce"] - num_bytes <= 64
    assert split.pop("reduce-scatter") == num_bytes // zero1_runs.NUM_DEVICES
    assert split.pop("all-gather") == num_bytes
    assert split.pop("all-reduce") <= 64 and not split  # Norms and losses.
