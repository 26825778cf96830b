"""The layout as a table to read: every weight, and what deserves a warning."""

import collections
import math

from praxis_lite.hlo import format_bytes
from praxis_lite.train_state import LeafLayout, StateLayout

# What is worth a warning: smaller arrays cost less than the reader's attention.
LARGE_BYTES = 1 << 20
WASTEFUL_PADDING = 0.10


def layout_table(layout: StateLayout) -> str:
    """Returns a line per leaf: path, true shape, padded shape, dtype, spec, bytes, padding."""
    header = ("path", "shape", "padded", "dtype", "spec", "bytes/device", "padding")
    rows = [header]
    for leaf in layout.leaves():
        padded = "" if leaf.padded_shape == leaf.shape else _shape(leaf.padded_shape)
        share = f"{leaf.padding_share:.1%}" if padded else ""
        spec = _spec(leaf)
        size = f"{leaf.bytes_per_device:,}"
        rows.append((leaf.path, _shape(leaf.shape), padded, str(leaf.dtype), spec, size, share))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if column >= 5 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", _totals(layout)])


def layout_warnings(layout: StateLayout) -> list[str]:
    """Returns a sentence for the large replicated arrays, and one per wasteful padding."""
    num_devices = math.prod(layout.axis_sizes.values())
    replicated, wasteful = [], collections.defaultdict(list)
    for leaf in layout.leaves():
        if num_devices > 1 and leaf.num_shards == 1 and leaf.bytes_per_device >= LARGE_BYTES:
            replicated.append(leaf)
        for dim, (true, padded) in enumerate(zip(leaf.shape, leaf.padded_shape, strict=True)):
            if padded and 1 - true / padded > WASTEFUL_PADDING:
                wasteful[(dim, true, padded, leaf.spec[dim])].append(leaf)
    warnings = [
        f"{leaf.path} {_shape(leaf.shape)} is replicated: {format_bytes(leaf.bytes_per_device)} on "
        f"each of {num_devices} devices. "
        + (
            "Give it a weight_split_dims_mapping."
            if _kind(leaf) == "weights"
            else "Give its weight a weight_split_dims_mapping, or set Learner.slot_mesh_axes."
        )
        for leaf in replicated
    ]
    for (dim, true, padded, axes), leaves in wasteful.items():
        others = f" (and dim {dim} of {len(leaves) - 1} like it)" if len(leaves) > 1 else ""
        warnings.append(
            f"{leaves[0].path}: dim {dim}{others} is padded from {true} to {padded} to split over "
            f"{axes}: {1 - true / padded:.0%} of it is padding. Change the size, the mesh, or the "
            "mapping."
        )
    return warnings


def bytes_per_device(layout: StateLayout) -> dict[str, int]:
    """Returns the bytes of a device's "weights", "optimizer slots" and "averaged weights (EMA)".

    Weights include variables that are not trained, slots the counts of steps. Padding is included.
    """
    totals: dict[str, int] = collections.defaultdict(int)
    for leaf in layout.leaves():
        totals[_kind(leaf)] += leaf.bytes_per_device
    return {kind: totals[kind] for kind in ("weights", "optimizer slots", _EMA) if kind in totals}


_EMA = "averaged weights (EMA)"


def _kind(leaf: LeafLayout) -> str:
    if leaf.path.startswith("mdl_vars/"):
        return "weights"
    return _EMA if leaf.path.startswith("opt_states/ema/") else "optimizer slots"


def _totals(layout: StateLayout) -> str:
    leaves = list(layout.leaves())
    num_weights = sum(math.prod(leaf.shape) for leaf in leaves if _kind(leaf) == "weights")
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    held = bytes_per_device(layout)
    parts = " + ".join(f"{format_bytes(size)} of {kind}" for kind, size in held.items())
    mesh = ", ".join(f"{name} {size}" for name, size in layout.axis_sizes.items())
    return (
        f"{num_weights:,} weights; the state of training takes {format_bytes(whole)}. Each device "
        f"of the mesh ({mesh}) holds {parts} = {format_bytes(sum(held.values()))}."
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _spec(leaf: LeafLayout) -> str:
    entries = [
        "-" if entry is None else entry if isinstance(entry, str) else "+".join(entry)
        for entry in leaf.spec
    ]
    return "(" + ", ".join(entries) + ")"
