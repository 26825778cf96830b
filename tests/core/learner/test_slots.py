"""Each slot of an optimizer splits as the dims of its weight that it has; Pax's layouts, too."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from praxis_lite import ConfigError
from praxis_lite.core import Learner, WeightSpec
from praxis_lite.core.learner.slots import slot_specs
from praxis_lite.core.learner.weight_groups import Group
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.optimizers import (
    adafactor,
    low_precision_slots,
    muon_matrices,
    soap,
)
from tests.support.goldens import golden, trimmed
from tests.support.marks import slow_but

P = PartitionSpec
AXES = ("replica", "data", "mdl")
SIZES = {"replica": 1, "data": 4, "mdl": 2}


class PaxAdafactorState(NamedTuple):
    count: jax.Array
    m: dict
    m_scale: dict
    v: dict
    vr: dict
    vc: dict


def pax_adafactor(learning_rate):
    """Slots of Pax's sharded_adafactor with an int8 momentum, in the chain Pax puts it in."""

    def init(params):
        def tree(shape_of, dtype=jnp.float32):
            return jax.tree.map(lambda w: jnp.zeros(shape_of(w.shape), dtype), params)

        return (
            {"count": jnp.zeros((), jnp.int32)},
            {"count": jnp.zeros((), jnp.int32)},
            PaxAdafactorState(
                count=jnp.zeros((), jnp.int32),
                m=tree(lambda shape: shape, jnp.int8),
                # An int8 matrix has a scale per column: the first dim is reduced.
                m_scale=tree(lambda shape: shape[1:]),
                # The last two dims are factored, whatever their sizes.
                v=tree(lambda shape: (1,) if len(shape) > 1 else shape),
                vr=tree(lambda shape: shape[:-1] if len(shape) > 1 else (1,)),
                vc=tree(lambda shape: shape[:-2] + shape[-1:] if len(shape) > 1 else (1,)),
            ),
            {"count": jnp.zeros((), jnp.int32)},
        )

    def update(updates, state, params=None):
        return updates, state

    return optax.GradientTransformation(init, update)


class DeclaredModel:
    """As much of a model as its state's layout asks: what the weights declare."""

    packed_forms = {}

    def __init__(self, weight_specs):
        self.specs = {"params": weight_specs, "non_trainable": {}}

    def weight_specs(self):
        return self.specs

    def init(self, key):
        return jax.tree.map(
            lambda w: jnp.zeros(w.shape, w.dtype),
            self.specs,
            is_leaf=lambda x: isinstance(x, WeightSpec),
        )


class DeclaredTask(NamedTuple):
    model: DeclaredModel
    learner: Learner
    weight_sharding: None = None


def layout_of(weight_specs, optimizer, axis_sizes, **settings):
    task = DeclaredTask(DeclaredModel(weight_specs), Learner(optimizer, 1e-3, **settings))
    return {leaf.path: leaf for leaf in layout_and_learner(task, axis_sizes)[0].leaves()}


def specs_of(optimizer, weights):
    """Returns the specs of the slots of weights that are not stacked."""
    splits = {n: P(*w.split_dims_mapping) for n, w in weights.items()}
    group = Group(optimizer, (), tuple((name,) for name in weights))
    return slot_specs({"": group}, weights, splits)[""]


def parts(pax_path):
    """Returns the parts of a path such as .opt_states[0]['no_prefix'][2].m['params']['lm']."""
    return [a or b or c for a, b, c in re.findall(r"\.(\w+)|\['(.*?)'\]|\[(\d+)\]", pax_path)]


@pytest.mark.parametrize("index", range(4))
def test_every_leaf_of_a_train_state_of_pax(index):
    states = golden("pax/partitioning.json")["train_state_metadata"]
    assert len(states) == 4
    case = states[index]
    weight_specs = {}
    for path, leaf in case["state"].items():
        if not path.startswith(".mdl_vars"):
            continue
        stack_rank = 1 if "'repeat'" in path else 0
        node, (*names, last) = weight_specs, parts(path)[2:]  # without mdl_vars, params
        for name in names:
            node = node.setdefault(name, {})
        split = tuple(leaf["spec"])
        node[last] = WeightSpec(
            tuple(leaf["unpadded"]),
            jnp.dtype(leaf["dtype"]),
            split[stack_rank:],
            split[:stack_rank],
        )
    actual = layout_of(
        weight_specs, pax_adafactor, dict(zip(AXES, case["mesh_shape"], strict=True))
    )

    def our_path(pax_path):
        names = parts(pax_path)
        if names[0] != "opt_states":
            return "/".join(names)
        group = {"no_prefix": "unstacked", "p_2_i-1": "stack_2"}[names[2]]
        return "/".join(["opt_states/slots", group, *(n for n in names[3:] if n != "params")])

    expected = {our_path(path): leaf for path, leaf in case["state"].items()}
    assert actual.keys() - expected.keys() == {
        "opt_states/num_updates",
        "opt_states/num_skipped_steps",
        "opt_states/num_skipped_in_a_row",
    }
    assert len(expected) == len(case["state"]) == len(actual) - 3
    uneven = 0
    for path, leaf in expected.items():
        assert list(actual[path].shape) == leaf["unpadded"], path
        assert list(actual[path].padded_shape) == leaf["padded"], path
        assert trimmed(actual[path].spec) == trimmed(leaf["spec"]), path
        if path != "step":  # uint32 in Pax
            assert str(actual[path].dtype) == leaf["dtype"], path
        uneven += leaf["padded"] != leaf["unpadded"]
    assert (uneven > 0) == (case["vocab"] != 256)


# Of those whose slots have the shapes of weights, one.
OPTIMIZERS = {
    "adamw": optax.adamw,
    "adafactor": functools.partial(optax.adafactor, min_dim_size_to_factor=2, momentum=0.9),
    "factored_rms": lambda learning_rate: optax.scale_by_factored_rms(min_dim_size_to_factor=3),
    "muon": functools.partial(
        optax.contrib.muon,
        muon_weight_dimension_numbers=muon_matrices({r"\(\d+, \d+\)": "d,df->f", ".+": None}),
    ),
    "schedule_free": optax.contrib.schedule_free_adamw,
    "low_precision": functools.partial(low_precision_slots, optimizer=optax.adamw),
    # The dims that are factored are the last two, or the largest two.
    **{
        f"pax_adafactor {dtype}{' sorted' if is_sorted else ''}": functools.partial(
            adafactor,
            decay_method="pow",
            decay_pow=0.8,
            beta1=0.9,
            min_dim_size_to_factor=3,
            quantized_dtype=dtype,
            sort_factored_second_moment_dims=is_sorted,
        )
        for dtype in ("float32", "int8")
        for is_sorted in (False, True)
    },
}


SHAPES = ((7,), (7, 7), (5, 3), (2, 11), (5, 5, 5), (13, 7, 13), (3, 2, 3), (7, 1))


QUICK = {"adafactor"}


@pytest.mark.parametrize("name", slow_but(QUICK, OPTIMIZERS))
def test_a_slot_splits_as_the_dims_that_its_values_follow(name):
    """Independent of shapes: a gradient that varies along one dim changes the slot along it."""
    optimizer = OPTIMIZERS[name](learning_rate=0.1)
    weights = {str(shape): WeightSpec(shape, jnp.float32, AXES[: len(shape)]) for shape in SHAPES}
    specs = specs_of(optimizer, weights)
    spec_of_slot = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_flatten_with_path(
            specs, is_leaf=lambda x: isinstance(x, P)
        )[0]
    }
    params = {n: jnp.ones(w.shape) for n, w in weights.items()}
    update = jax.jit(optimizer.update)
    # Adafactor divides a first gradient by itself: only a second one shows in its momentum.
    _, state = update(params, jax.jit(optimizer.init)(params), params)

    def slots_after_a_ramp_along(dim):
        grads = {}
        for n, w in weights.items():
            local = dim % len(w.shape)
            ramp = np.arange(1.0, w.shape[local] + 1.0, dtype=np.float32)
            along = ramp.reshape([-1 if d == local else 1 for d in range(len(w.shape))])
            grads[n] = jnp.array(np.broadcast_to(along, w.shape))
        after = update(grads, state, params)[1]
        leaves = jax.tree_util.tree_flatten_with_path(after)[0]
        return {
            jax.tree_util.keystr(path): np.asarray(new, np.float32) - np.asarray(old, np.float32)
            for (path, new), old in zip(leaves, jax.tree.leaves(state), strict=True)
        }

    ramps = [slots_after_a_ramp_along(dim) for dim in range(3)]
    assert ramps[0].keys() == spec_of_slot.keys()
    for path, slot in ramps[0].items():
        owners = [w for n, w in weights.items() if f"'{n}'" in path]
        expected = [None] * slot.ndim
        # More than what bfloat16 rounds to, up or down at random.
        least = max(1e-6, 0.05 * float(np.abs(slot).max(initial=0)))
        for dim, axis in enumerate(owners[0].split_dims_mapping if owners else ()):
            for slot_dim in range(slot.ndim):
                if np.any(np.ptp(ramps[dim][path], axis=slot_dim) > least):
                    expected[slot_dim] = axis
        if "int8" in name and path.startswith(".m["):
            # Each column reaches as far as int8 goes, whatever the gradient's ramp.
            expected = list(owners[0].split_dims_mapping)
        # A dim of size 1 cannot vary, and its split costs nothing.
        actual = spec_of_slot[path]
        sizes = slot.shape
        assert [f for f, n in zip(actual, sizes, strict=True) if n > 1] == [
            w for w, n in zip(expected, sizes, strict=True) if n > 1
        ], path


def test_a_preconditioner_splits_once_over_the_axes_of_its_dim():
    weights = {
        "blocks": {"w": WeightSpec((3, 7, 7), jnp.float32, ("data", "mdl"), ("replica",))},
        "head": {"w": WeightSpec((7, 13), jnp.float32, ("mdl", "data"))},
    }
    actual = layout_of(weights, functools.partial(soap, max_precond_dim=7), SIZES)
    specs = {
        (path.split("/")[2], int(path[-1])): (leaf.shape, leaf.spec)
        for path, leaf in actual.items()
        if "/covariances/" in path
    }
    assert specs == {
        # A square weight's too, which have its shape.
        ("stack_3", 0): ((3, 7, 7), P("replica", "data", None)),
        ("stack_3", 1): ((3, 7, 7), P("replica", "mdl", None)),
        ("unstacked", 0): ((7, 7), P("mdl", None)),
        ("unstacked", 1): ((1, 1), P(None, None)),  # 13 is above the largest: not rotated.
    }
    assert actual["opt_states/slots/stack_3/0/mu/blocks/w"].spec == P("replica", "data", "mdl")


def test_a_stacked_weights_slots_have_the_stacks_entry_first():
    weight_specs = {
        "blocks": {"w": WeightSpec((3, 11, 7), jnp.float32, ("data", "mdl"), ("replica",))},
        "head": {"w": WeightSpec((11, 7), jnp.float32, ("mdl", None))},
    }
    optimizer = functools.partial(optax.adafactor, min_dim_size_to_factor=2)
    actual = layout_of(weight_specs, optimizer, {"replica": 2, "data": 4, "mdl": 2})
    slots = {p.removeprefix("opt_states/slots/"): leaf for p, leaf in actual.items()}
    stack = {p: leaf for p, leaf in slots.items() if p.startswith("stack_3")}
    rows, columns = (
        next(leaf for p, leaf in stack.items() if f"/{name}/" in p) for name in ("v_row", "v_col")
    )
    # optax: the row statistics lose the largest dim, the column statistics the second largest.
    assert (rows.shape, rows.padded_shape, rows.spec) == ((3, 7), (4, 8), P("replica", "mdl"))
    assert (columns.shape, columns.padded_shape) == ((3, 11), (4, 12))
    assert columns.spec == P("replica", "data")
    # Each layer has a count of its own, which is one per layer of the stack.
    counts = [leaf for p, leaf in stack.items() if p.endswith("count")]
    assert counts
    assert all((leaf.shape, leaf.spec) == ((3,), P(None)) for leaf in counts)
    (head,) = [leaf for p, leaf in slots.items() if p.startswith("unstacked") and "v_col" in p]
    assert (head.shape, head.padded_shape, head.spec) == ((11,), (12,), P("mdl"))


@pytest.mark.parametrize("factors", [lambda n: n >= 7, lambda n: n <= 7], ids=["from 7", "to 7"])
def test_an_optimizer_that_decides_by_size_is_asked_on_the_side_where_the_weight_is(factors):
    def init(params):
        # As Adafactor (factors large dims only) or Shampoo (small ones only).
        return jax.tree.map(
            lambda w: (
                (jnp.zeros(w.shape[:1]), jnp.zeros(w.shape[1:]))
                if all(map(factors, w.shape))
                else (jnp.zeros(1), jnp.zeros(1))
            ),
            params,
        )

    optimizer = optax.GradientTransformation(init, lambda updates, state, params: (updates, state))
    specs = specs_of(optimizer, {"w": WeightSpec((7, 7), jnp.float32, ("data", "mdl"))})
    assert specs["w"] == (P("data"), P("mdl"))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("dta",), r"Learner\.slot_mesh_axes.*'dta'.*data\?"),
        (("data", "data"), r"Learner\.slot_mesh_axes.*\(\('data', 'data'\),\)"),
    ],
)
def test_slot_mesh_axes_that_the_mesh_has_not_are_an_error(axes, message):
    with pytest.raises(ConfigError, match=message):
        layout_of({"w": WeightSpec((8, 8), jnp.float32)}, optax.adamw, SIZES, slot_mesh_axes=axes)


def test_slots_and_the_average_split_over_the_slots_axes_and_weights_do_not():
    weight_specs = {
        "frozen": WeightSpec((8, 12), jnp.float32),
        "w": WeightSpec((13, 37), jnp.float32, ("mdl", None)),
    }
    actual = layout_of(
        weight_specs,
        functools.partial(optax.adafactor, min_dim_size_to_factor=2, momentum=0.9),
        SIZES,
        slot_mesh_axes=("data",),
        ema_decay=0.9,
        bprop_variable_exclusion="frozen",
    )
    assert not any(path.endswith("/frozen") for path in actual.keys() - {"mdl_vars/params/frozen"})
    specs = {path: leaf.spec for path, leaf in actual.items() if path.endswith("/w")}
    slots = "opt_states/slots/unstacked"
    assert specs == {
        "mdl_vars/params/w": P("mdl", None),
        "opt_states/ema/w": P("mdl", "data"),
        # optax: the row statistics lose the largest dim, the column statistics the other.
        f"{slots}/0/v_row/w": P("mdl"),
        f"{slots}/0/v_col/w": P("data"),
        f"{slots}/0/v/w": P(None),
        f"{slots}/4/ema/w": P("mdl", "data"),
    }
