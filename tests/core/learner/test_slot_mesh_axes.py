"""ZeRO-1: where slots go besides their weights' axes, and what the compiled step then sends."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.core import Learner, WeightSpec
from praxis_lite.core.learner.slots import extended_specs
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
