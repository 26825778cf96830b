"""layout.txt: every column counted by hand."""

import functools
import json
import re

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite import Task
from praxis_lite.core import Learner, StateLayout
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.layers import BaseLayer
from praxis_lite.layers.base.variables import stacked
from praxis_lite.trainer.layout_table import (
    MAX_DECISION_CHARS,
    bytes_per_device,
    layout_json,
    layout_table,
    layout_warnings,
    leaf_table,
    padding_notes,
    read_layout,
)
from tests.support.job_runs import home

BLOCKS = "mdl_vars/params/transformer/blocks"

# Tiny on (1, 4, 2): model dims 7 over data 4, hidden 11, heads 3 and vocabulary 257 over mdl 2; two
# layers stacked. Path: true shape, padded shape, spec, bytes on one device, share of padding.
BY_HAND = {
    "mdl_vars/params/final_ln/scale": ("[7]", "", "(-)", 7 * 4, ""),
    "mdl_vars/params/softmax/logits_ffn/linear/w": (
        "[7, 257]",
        "[8, 258]",
        "(data, mdl)",
        2 * 129 * 4,
        f"{1 - 7 * 257 / (8 * 258):.1%}",
    ),
    f"{BLOCKS}/ff_layer/ffn_layer1/bias/b": (
        "[2, 11]",
        "[2, 12]",
        "(-, mdl)",
        2 * 6 * 4,
        f"{1 / 12:.1%}",
    ),
    f"{BLOCKS}/ff_layer/ffn_layer1/linear/w": (
        "[2, 7, 11]",
        "[2, 8, 12]",
        "(-, data, mdl)",
        2 * 2 * 6 * 4,
        f"{1 - 77 / 96:.1%}",
    ),
    f"{BLOCKS}/ff_layer/ffn_layer2/bias/b": (
        "[2, 7]",
        "[2, 8]",
        "(-, data)",
        2 * 2 * 4,
        f"{1 / 8:.1%}",
    ),
    f"{BLOCKS}/ff_layer/ffn_layer2/linear/w": (
        "[2, 11, 7]",
        "[2, 12, 8]",
        "(-, mdl, data)",
        2 * 6 * 2 * 4,
        f"{1 - 77 / 96:.1%}",
    ),
    f"{BLOCKS}/ff_layer/layer_norm/scale": ("[2, 7]", "", "(-, -)", 2 * 7 * 4, ""),
    f"{BLOCKS}/layer_norm/scale": ("[2, 7]", "", "(-, -)", 2 * 7 * 4, ""),
} | {
    f"{BLOCKS}/self_attention/{name}/w": (
        "[2, 7, 3, 6]",
        "[2, 8, 4, 6]",
        "(-, data, mdl, -)",
        2 * 2 * 2 * 6 * 4,
        f"{1 - 21 / 32:.1%}",
    )
    for name in ("query", "key", "value", "post")
}


@pytest.fixture(scope="module")
def tiny_layout():
    home()
    from jobzoo.experiments import Tiny

    task = fdl.build(Tiny().config().task)
    return layout_and_learner(task, {"replica": 1, "data": 4, "mdl": 2})[0]


ROW = re.compile(
    r"(\S+) +(\[.*?\]) +(\[.*?\])? *(\w+) +(\(.*?\)) +([\d,]+) *([\d.]+%)?(?: +(\D.*))?"
)


def rows_of(table):
    """Returns the table's rows as {path: the other cells}."""
    header, rule, *lines = table.splitlines()
    assert re.split(r"  +", header) == [
        "path",
        "shape",
        "padded",
        "dtype",
        "spec",
        "bytes/device",
        "padding",
        "decided by",
    ]
    assert set(rule) == {"-"}
    rows = [ROW.fullmatch(line).groups(default="") for line in lines[: lines.index("")]]
    return {path: tuple(cells) for path, *cells in rows}


def test_every_weight_stands_in_the_table_as_counted_by_hand(tiny_layout):
    rows = rows_of(layout_table(tiny_layout))
    weights = {path: cells for path, cells in rows.items() if path.startswith("mdl_vars/")}
    decided_by = dict(tiny_layout.declared_by)
    assert all(len(text) <= MAX_DECISION_CHARS for text in decided_by.values())
    assert weights == {
        path: (shape, padded, "float32", spec, f"{size:,}", share, decided_by[path])
        for path, (shape, padded, spec, size, share) in BY_HAND.items()
    }
    # Only what the layers wrote splits these weights.
    split = {path for path, (_, _, spec, _, _) in BY_HAND.items() if set(spec) - set("(-, )")}
    assert {decided_by[path] for path in split} == {"weight_split_dims_mapping"}
    assert "weight_split_dims_mapping" not in {decided_by[p] for p in BY_HAND.keys() - split}


def test_programs_read_the_arrays_as_counted_by_hand(tiny_layout, tmp_path):
    (tmp_path / "layout.json").write_text(layout_json(tiny_layout))
    arrays, totals = read_layout(tmp_path / "layout.json")
    assert totals == layout_table(tiny_layout).splitlines()[-1]
    weights = [array for array in arrays if array.path.startswith("mdl_vars/")]
    assert {
        array.path: (array.shape, array.padded_shape, array.dtype, array.spec, array.num_bytes)
        for array in weights
    } == {
        path: (shape, padded or shape, "float32", spec, size)
        for path, (shape, padded, spec, size, _) in BY_HAND.items()
    }


@pytest.mark.parametrize("record", [[], {}, {"arrays": [{"path": "a"}], "totals": ""}])
def test_a_layout_of_others_is_refused(record, tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"layout\.json is damaged"):
        read_layout(path)


def test_a_long_decision_is_numbered_and_written_out_once_below_the_table():
    struct, spec = jax.ShapeDtypeStruct((7,), "float32"), PartitionSpec(None)
    long = f"rule {'y' * MAX_DECISION_CHARS}"
    by = {"a": "x" * MAX_DECISION_CHARS, "b": long, "c": "a rule  of\ntwo lines", "d": long}
    layout = StateLayout(dict.fromkeys("abcd", struct), dict.fromkeys("abcd", spec), {}, by)
    lines = leaf_table(layout.leaves()).splitlines()
    ends = [line.split("  ")[-1].strip() for line in lines[2:6]]
    assert ends == [by["a"], "(1)", "a rule of two lines", "(1)"]
    assert lines[6:] == [f"(1) {long}"]


def test_every_slot_stands_in_the_table_as_its_weight(tiny_layout):
    rows = rows_of(layout_table(tiny_layout))
    for path, cells in rows.items():
        slot = re.fullmatch(r"opt_states/slots/\w+/0/[mn]u/(.*)", path)
        if slot:
            # A slot lies as its weight does: nothing was decided of it.
            assert cells == (*rows[f"mdl_vars/params/{slot.group(1)}"][:-1], "")
    assert sum("/mu/" in path for path in rows) == sum("/nu/" in path for path in rows) == 12
    assert rows["step"] == ("[]", "", "int32", "()", "4", "", "")


def test_the_last_line_sums_up(tiny_layout):
    # True weights, without padding, and what a device holds of them, with it.
    num_parameters = 7 + 7 * 257 + 2 * (11 + 77 + 7 + 77 + 7 + 7 + 4 * 126)
    weight_bytes = sum(size for *_, size, _ in BY_HAND.values())
    # Steps, updates, skipped ones, in a row; counts of the stack; and of the rest.
    counts = 4 * 4 + 8 * 2 + 4 * 2
    assert bytes_per_device(tiny_layout) == {
        "weights": weight_bytes,
        "optimizer slots": 2 * weight_bytes + counts,
    }
    assert layout_table(tiny_layout).splitlines()[-1] == (
        f"{len(BY_HAND)} weights with {num_parameters:,} parameters; the training state takes "
        f"{(12 * num_parameters + counts) / 1024:.1f} KiB. Each device of the mesh (replica 1, "
        f"data 4, mdl 2) holds {weight_bytes / 1024:.1f} KiB of weights + "
        f"{(2 * weight_bytes + counts) / 1024:.1f} KiB of optimizer slots = "
        f"{(3 * weight_bytes + counts) / 1024:.1f} KiB."
    )


def layout_with(split, slot_mesh_axes, shapes, ema_decay=0.0):
    """Returns the layout of a model of matrices, and of a stack of three, on a mesh (1, 4, 2)."""

    class Matrices(BaseLayer):
        def __init__(self, *, rngs):
            for i, shape in enumerate(shapes):
                setattr(self, f"w{i}", self.weight(shape, split, rngs=rngs))
            keys = jax.random.split(rngs(), 3)
            block = functools.partial(Block, shapes[0], split)
            self.blocks = stacked(jax.vmap(lambda key: block(rngs=nnx.Rngs(key)))(keys), None)

    learner = Learner(optax.adamw, 0.1, slot_mesh_axes=slot_mesh_axes, ema_decay=ema_decay)
    return layout_and_learner(Untrained(Matrices, learner), {"replica": 1, "data": 4, "mdl": 2})[0]


class Block(BaseLayer):
    def __init__(self, shape, split, *, rngs):
        self.w = self.weight(shape, split, rngs=rngs)


class Untrained(Task):
    def compute_loss(self, model, inputs, key):
        raise NotImplementedError


EVEN, UNEVEN = ((8, 24), (16, 8)), ((13, 37), (7, 5))
# Of AdamW with a stack of three: steps, updates, skipped ones, in a row; a count; and three.
COUNTS = 4 * (4 + 1 + 3)
ALL_AXES = ("data", "mdl")
# Elements that the fullest device holds of each matrix, the first one also in a stack of three.
PLACES = {
    "data parallel": (None, (), [13 * 37, 7 * 5], [13 * 37, 7 * 5]),
    # 13 x 37 as 16 x 37, not 13 x 40; 7 x 5 as 8 x 5, not 7 x 8.
    "ZeRO-1": (None, ("data",), [13 * 37, 7 * 5], [13 * 10, 2 * 5]),
    # 13 x 40; no dim of 7 x 5 has 8 elements.
    "ZeRO-1 over both": (None, ALL_AXES, [13 * 37, 7 * 5], [13 * 5, 7 * 5]),
    "fully sharded": (("data", "mdl"), (), [4 * 19, 2 * 3], [4 * 19, 2 * 3]),
}


@pytest.mark.parametrize("place", PLACES)
def test_bytes_of_a_device_are_those_of_the_formula(place):
    split, axes, *_ = PLACES[place]
    num_weights = 4 * 8 * 24 + 16 * 8
    num_devices = {"ZeRO-1": 4, "ZeRO-1 over both": 8, "fully sharded": 8}.get(place, 1)
    of_weights = num_devices if place == "fully sharded" else 1
    assert bytes_per_device(layout_with(split, axes, EVEN, ema_decay=0.9)) == {
        "weights": 4 * num_weights // of_weights,
        "optimizer slots": 8 * num_weights // num_devices + COUNTS,
        "averaged weights (EMA)": 4 * num_weights // num_devices,
    }


@pytest.mark.parametrize("place", PLACES)
def test_bytes_of_a_device_with_padding_are_those_that_arrays_have(place, mesh_of):
    split, axes, weights, slots = PLACES[place]
    layout = layout_with(split, axes, UNEVEN)
    held = bytes_per_device(layout)
    assert held == {
        "weights": 4 * (4 * weights[0] + weights[1]),
        "optimizer slots": 8 * (4 * slots[0] + slots[1]) + COUNTS,
    }
    state = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
        layout.abstract(mesh_of(1, 4, 2)),
    )
    on_device_0 = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    assert sum(held.values()) == sum(on_device_0)


def layout_of(shape, spec, **axis_sizes):
    struct = jax.ShapeDtypeStruct(shape, "float32")
    return StateLayout({"mdl_vars": {"w": struct}}, {"mdl_vars": {"w": spec}}, axis_sizes)


def test_a_dim_over_two_axes_is_split_by_their_product():
    layout = layout_of((13, 5), PartitionSpec(("data", "mdl"), None), data=4, mdl=2)
    assert rows_of(layout_table(layout))["mdl_vars/w"] == (
        "[13, 5]",
        "[16, 5]",
        "float32",
        "(data+mdl, -)",
        str(2 * 5 * 4),
        f"{3 / 16:.1%}",
        "",
    )


@pytest.mark.parametrize(
    ("rows", "is_large"), [(2**18 - 1, False), (2**18, True)], ids=["below 1 MiB", "1 MiB"]
)
def test_a_large_replicated_array_is_warned_of(rows, is_large):
    replicated = layout_of((rows,), PartitionSpec(None), data=4, mdl=2)
    assert [w.split(":")[0] for w in layout_warnings(replicated)] == (
        [f"mdl_vars/w [{rows}] is replicated"] if is_large else []
    )
    # Split over one of the axes it is not replicated; on one device there is nothing to split.
    assert layout_warnings(layout_of((2**18,), PartitionSpec("mdl"), data=4, mdl=2)) == []
    assert layout_warnings(layout_of((2**18,), PartitionSpec(None), data=1, mdl=1)) == []


def test_a_large_replicated_slot_is_warned_of_with_the_setting_that_splits_it():
    struct, spec = jax.ShapeDtypeStruct((2**18,), "float32"), PartitionSpec(None)
    layout = StateLayout({"opt_states": {"w": struct}}, {"opt_states": {"w": spec}}, {"data": 4})
    (warning,) = layout_warnings(layout)
    assert "opt_states/w [262144] is replicated: 1.0 MiB on each of 4" in warning
    assert "set Learner.slot_mesh_axes" in warning


def test_a_wasteful_dim_counts_the_arrays_that_share_it():
    struct, spec = jax.ShapeDtypeStruct((35,), "float32"), PartitionSpec("data")
    others = {name: struct for name in "abc"}
    shapes = {"mdl_vars": others, "opt_states": {"mu": others, "ema": {}}}
    specs = jax.tree.map(lambda _: spec, shapes)
    (note,) = padding_notes(StateLayout(shapes, specs, {"data": 8}))
    assert note.startswith("mdl_vars/a: dim 0 (and that of 5 other arrays) is padded from")
    (note,) = padding_notes(layout_of((35,), PartitionSpec("data"), data=8))
    assert note.startswith("mdl_vars/w: dim 0 is padded")


@pytest.mark.parametrize(("dim", "is_waste"), [(37, False), (36, False), (35, True), (8, False)])
def test_a_dim_that_wastes_more_than_a_tenth_is_warned_of(dim, is_waste):
    # Over 8: 37 -> 40 wastes 7.5%, 36 -> 40 exactly 10%, 35 -> 40 12.5%.
    # 2^19 rows of 5 floats a device, of which an eighth is padding, are 1.25 MiB of it.
    large = layout_of((2**19, dim), PartitionSpec(None, "data"), data=8)
    small = layout_of((3, dim), PartitionSpec(None, "data"), data=8)
    assert len(padding_notes(small)) == is_waste and not layout_warnings(small)
    assert not padding_notes(large)
    warnings = layout_warnings(large)
    if not is_waste:
        assert warnings == []
        return
    (warning,) = warnings
    assert "mdl_vars/w: dim 1 is padded from 35 to 40 to split over data: 12% of it" in warning
    assert "Change the size, the mesh, or the mapping" in warning
