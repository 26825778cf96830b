"""layout.txt: every column counted by hand."""

import re

import fiddle as fdl
import jax
import pytest
from jax.sharding import PartitionSpec

from praxis_lite.layout_table import layout_table, layout_warnings
from praxis_lite.train_state import StateLayout, state_layout
from tests.job_runs import home

BLOCKS = "mdl_vars/params/transformer/blocks"

# Tiny on (1, 4, 2): model dims 7 over data 4, hidden 11, heads 3 and vocabulary 257 over mdl 2; two
# layers stacked. Path: true shape, padded shape, spec, bytes on one device, share of padding.
BY_HAND = {
    "mdl_vars/params/final_ln/scale": ("[7]", "", "(-)", 7 * 4, ""),
    "mdl_vars/params/softmax/logits_ffn/linear/w": (
        "[7, 257]", "[8, 258]", "(data, mdl)", 2 * 129 * 4, f"{1 - 7 * 257 / (8 * 258):.1%}"
    ),
    f"{BLOCKS}/ff_layer/ffn_layer1/bias/b": (
        "[2, 11]", "[2, 12]", "(-, mdl)", 2 * 6 * 4, f"{1 / 12:.1%}"
    ),
    f"{BLOCKS}/ff_layer/ffn_layer1/linear/w": (
        "[2, 7, 11]", "[2, 8, 12]", "(-, data, mdl)", 2 * 2 * 6 * 4, f"{1 - 77 / 96:.1%}"
    ),
    f"{BLOCKS}/ff_layer/ffn_layer2/bias/b": (
        "[2, 7]", "[2, 8]", "(-, data)", 2 * 2 * 4, f"{1 / 8:.1%}"
    ),
    f"{BLOCKS}/ff_layer/ffn_layer2/linear/w": (
        "[2, 11, 7]", "[2, 12, 8]", "(-, mdl, data)", 2 * 6 * 2 * 4, f"{1 - 77 / 96:.1%}"
    ),
    f"{BLOCKS}/ff_layer/layer_norm/scale": ("[2, 7]", "", "(-, -)", 2 * 7 * 4, ""),
    f"{BLOCKS}/layer_norm/scale": ("[2, 7]", "", "(-, -)", 2 * 7 * 4, ""),
} | {
    f"{BLOCKS}/self_attention/{name}/w": (
        "[2, 7, 3, 6]", "[2, 8, 4, 6]", "(-, data, mdl, -)", 2 * 2 * 2 * 6 * 4, f"{1 - 21 / 32:.1%}"
    )
    for name in ("query", "key", "value", "post")
}


@pytest.fixture(scope="module")
def tiny_layout():
    home()
    from jobzoo.experiments import Tiny

    return state_layout(fdl.build(Tiny().config().task), {"replica": 1, "data": 4, "mdl": 2})


ROW = re.compile(
    r"(\S+) +(\[.*?\]) +(\[.*?\])? *(\w+) +(\(.*?\)) +([\d,]+) *([\d.]+%)?"
)


def rows_of(table):
    """Returns the table's rows as {path: the other cells}."""
    header, rule, *lines = table.splitlines()
    assert header.split() == ["path", "shape", "padded", "dtype", "spec", "bytes/device", "padding"]
    assert set(rule) == {"-"}
    rows = [ROW.fullmatch(line).groups(default="") for line in lines[: lines.index("")]]
    return {path: tuple(cells) for path, *cells in rows}


def test_every_weight_stands_in_the_table_as_counted_by_hand(tiny_layout):
    rows = rows_of(layout_table(tiny_layout))
    weights = {path: cells for path, cells in rows.items() if path.startswith("mdl_vars/")}
    assert weights == {
        path: (shape, padded, "float32", spec, f"{size:,}", share)
        for path, (shape, padded, spec, size, share) in BY_HAND.items()
    }


def test_every_slot_stands_in_the_table_as_its_weight(tiny_layout):
    rows = rows_of(layout_table(tiny_layout))
    for path, cells in rows.items():
        slot = re.fullmatch(r"opt_states/slots/\w+/0/[mn]u/(.*)", path)
        if slot:
            assert cells == rows[f"mdl_vars/params/{slot.group(1)}"]
    assert sum("/mu/" in path for path in rows) == sum("/nu/" in path for path in rows) == 12
    assert rows["step"] == ("[]", "", "int32", "()", "4", "")


def test_the_last_line_sums_up(tiny_layout):
    # True weights, without padding, and what a device holds of them, with it.
    num_weights = 7 + 7 * 257 + 2 * (11 + 77 + 7 + 77 + 7 + 7 + 4 * 126)
    weight_bytes = sum(size for *_, size, _ in BY_HAND.values())
    other_bytes = 4 * 2 + 8 * 2 + 4 * 2  # step, skipped; counts of the stack; and of the rest
    state_bytes = 3 * weight_bytes + other_bytes
    assert layout_table(tiny_layout).splitlines()[-1] == (
        f"{num_weights:,} weights. On each device of the mesh (replica 1, data 4, mdl 2): "
        f"{weight_bytes / 1024:.1f} KiB of weights, {state_bytes / 1024:.1f} KiB of state."
    )


def layout_of(shape, spec, **axis_sizes):
    struct = jax.ShapeDtypeStruct(shape, "float32")
    return StateLayout({"mdl_vars": {"w": struct}}, {"mdl_vars": {"w": spec}}, axis_sizes)


def test_a_dim_over_two_axes_is_split_by_their_product():
    layout = layout_of((13, 5), PartitionSpec(("data", "mdl"), None), data=4, mdl=2)
    assert rows_of(layout_table(layout))["mdl_vars/w"] == (
        "[13, 5]", "[16, 5]", "float32", "(data+mdl, -)", str(2 * 5 * 4), f"{3 / 16:.1%}"
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


@pytest.mark.parametrize(("dim", "is_waste"), [(37, False), (36, False), (35, True), (8, False)])
def test_a_dim_that_wastes_more_than_a_tenth_is_warned_of(dim, is_waste):
    # Over 8: 37 -> 40 wastes 7.5%, 36 -> 40 exactly 10%, 35 -> 40 12.5%.
    warnings = layout_warnings(layout_of((3, dim), PartitionSpec(None, "data"), data=8))
    if not is_waste:
        assert warnings == []
        return
    (warning,) = warnings
    assert "mdl_vars/w: dim 1 is padded from 35 to 40 to split over data: 12% of it" in warning
    assert "Change the size, the mesh, or the mapping" in warning
