"""Describes the layout of a TrainState as a table, as JSON, and as notes and warnings."""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from praxis_lite.core.errors import ConfigError, first_few, format_bytes
from praxis_lite.core.learner.weight_groups import WeightGroups
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.core.sharding.split_dims import DimSplit
from praxis_lite.core.sharding.weight_spec import spec_items
from praxis_lite.host.file_reading import read_json
from praxis_lite.host.text_table import table_lines

__all__ = (
    "LayoutArray",
    "bytes_per_device",
    "host_note",
    "kind_of",
    "layout_table",
    "layout_warnings",
    "leaf_table",
    "mesh_text",
    "padding_notes",
    "read_layout",
    "shape_text",
    "split_text",
)

# Arrays below this size cause no warning.
LARGE_BYTES = 1 << 20
WASTEFUL_PADDING = 0.10
# Decisions longer than this are shown as numbers in the table and written below the table.
MAX_DECISION_CHARS = 30
_ON_HOST = " on the host"


@dataclasses.dataclass(frozen=True)
class LayoutArray:
    """A leaf of a state, as described in layout.txt and layout.json.

    Attributes:
      path: Path of the leaf in the TrainState.
      shape: Logical shape, such as "[4, 148, 436]".
      padded_shape: Stored shape, which includes padding.
      dtype: Name of the dtype.
      spec: Mesh axes of each dim, such as "(-, data, mdl)" or "(-, data, mdl) on the host".
      num_bytes: Bytes of each device's shard, in device or host memory.
    """

    path: str
    shape: str
    padded_shape: str
    dtype: str
    spec: str
    num_bytes: int

    @classmethod
    def of(cls, leaf: LeafLayout) -> "LayoutArray":
        """Describes a leaf in a layout."""
        return cls(
            leaf.path,
            shape_text(leaf.shape),
            shape_text(leaf.padded_shape),
            str(leaf.dtype),
            split_text(tuple(leaf.spec)) + _ON_HOST * leaf.is_on_host,
            leaf.bytes_per_device,
        )


def layout_json(layout: StateLayout) -> str:
    """Returns the leaves of a state and the summary of bytes per device, as JSON."""
    arrays = [vars(LayoutArray.of(leaf)) for leaf in layout.leaves()]
    return json.dumps({"totals": _totals(layout), "arrays": arrays}, indent=1)


def read_layout(path: Path) -> tuple[list[LayoutArray], str]:
    """Reads a layout.json file.

    Returns:
      A tuple of the arrays and the summary of bytes per device, or ([], "") if the file does not
      exist.

    Raises:
      ConfigError: The file is damaged.
    """
    if not path.exists():
        return [], ""
    record = read_json(path)
    try:
        return [LayoutArray(**fields) for fields in record["arrays"]], record["totals"]
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is damaged or was not written by praxis_lite ({error}). The next launch of "
            "the job rewrites it."
        ) from None


def layout_table(layout: StateLayout) -> str:
    """Returns the table of a state's leaves, followed by the summary of bytes per device."""
    return "\n".join([leaf_table(layout.leaves()), "", _totals(layout)])


def leaf_table(leaves: Iterable[LeafLayout]) -> str:
    """Returns a table with the path, shapes, dtype, spec, bytes and padding of each leaf.

    The last column shows what determined the sharding, such as a rule or a layer setting. Long
    entries are replaced by numbers and written below the table.
    """
    header = ("path", "shape", "padded", "dtype", "spec", "bytes/device", "padding", "decided by")
    rows = [header]
    numbers: dict[str, int] = {}
    for leaf in leaves:
        array, has_padding = LayoutArray.of(leaf), leaf.padded_shape != leaf.shape
        decided_by = " ".join(leaf.declared_by.split())
        if len(decided_by) > MAX_DECISION_CHARS:
            decided_by = f"({numbers.setdefault(decided_by, len(numbers) + 1)})"
        rows.append(
            (
                array.path,
                array.shape,
                array.padded_shape if has_padding else "",
                array.dtype,
                array.spec,
                f"{array.num_bytes:,}",
                f"{leaf.padding_share:.1%}" if has_padding else "",
                decided_by,
            )
        )
    lines = table_lines(rows, right=(5, 6))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, *(f"({number}) {text}" for text, number in numbers.items())])


def layout_warnings(layout: StateLayout) -> list[str]:
    """Returns warnings about large replicated arrays and about large amounts of padding."""
    num_devices = math.prod(layout.axis_sizes.values())
    replicated = [
        leaf
        for leaf in layout.leaves()
        if num_devices > 1 and leaf.num_shards == 1 and leaf.bytes_per_device >= LARGE_BYTES
    ]
    warnings = [
        f"{leaf.path} {shape_text(leaf.shape)} is replicated: "
        f"{format_bytes(leaf.bytes_per_device)} on each of {num_devices} devices. "
        + (
            "Set its weight_split_dims_mapping, or add a rule to the task's weight_sharding."
            if kind_of(leaf) == "weights"
            else "Split its weight, or set Learner.slot_mesh_axes."
        )
        for leaf in replicated
    ]
    return warnings + [
        f"{text} Change the size, the mesh, or the mapping."
        for text, num_bytes in _wasteful(layout)
        if num_bytes >= LARGE_BYTES
    ]


def padding_notes(layout: StateLayout) -> list[str]:
    """Returns notes about dims that are mostly padding, but are too small for a warning."""
    return [text for text, num_bytes in _wasteful(layout) if num_bytes < LARGE_BYTES]


def _wasteful(layout: StateLayout) -> list[tuple[str, float]]:
    """Returns (message, padding bytes per device) for each dim that is mostly padding.

    Leaves with the same dim size and sharding share a message.
    """
    wasteful = collections.defaultdict(list)
    for leaf in layout.leaves():
        for dim, (size, padded) in enumerate(zip(leaf.shape, leaf.padded_shape, strict=True)):
            if padded and 1 - size / padded > WASTEFUL_PADDING:
                wasteful[(dim, size, padded, leaf.spec[dim])].append(leaf)
    sentences = []
    for (dim, size, padded, axes), leaves in wasteful.items():
        fraction, num_others = 1 - size / padded, len(leaves) - 1
        plural = "s" * (num_others > 1)
        others = f" (and that of {num_others} other array{plural})" if num_others else ""
        sentences.append(
            (
                f"{leaves[0].path}: dim {dim}{others} is padded from {size} to {padded} to split "
                f"over {axes}: {fraction:.0%} of it is padding.",
                fraction * sum(leaf.bytes_per_device for leaf in leaves),
            )
        )
    return sentences


def bytes_per_device(layout: StateLayout) -> dict[str, int]:
    """Returns the bytes per device for "weights", "optimizer slots" and "averaged weights (EMA)".

    Weights include non-trainable variables, and slots include step counters. Padding is included;
    arrays in host memory are not.
    """
    totals: dict[str, int] = collections.defaultdict(int)
    for leaf in layout.leaves():
        totals[kind_of(leaf)] += leaf.bytes_per_device * (not leaf.is_on_host)
    return {kind: totals[kind] for kind in ("weights", "optimizer slots", _EMA) if kind in totals}


def host_note(layout: StateLayout) -> str:
    """Returns a message about the arrays in host memory, or ""."""
    on_host = sum(leaf.bytes_per_device for leaf in layout.leaves() if leaf.is_on_host)
    if not on_host:
        return ""
    return f"In addition, {format_bytes(on_host)} of the state per device are in host memory."


_EMA = "averaged weights (EMA)"


def kind_of(leaf: LeafLayout) -> str:
    """Returns the category of a state's leaf: a key of the dict from `bytes_per_device`."""
    if leaf.path.startswith("mdl_vars/"):
        return "weights"
    return _EMA if leaf.path.startswith("opt_states/ema/") else "optimizer slots"


def _totals(layout: StateLayout) -> str:
    leaves = list(layout.leaves())
    weights = [leaf for leaf in leaves if kind_of(leaf) == "weights"]
    num_parameters = sum(math.prod(leaf.shape) for leaf in weights)
    total_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    by_kind = bytes_per_device(layout)
    parts = " + ".join(f"{format_bytes(size)} of {kind}" for kind, size in by_kind.items())
    text = (
        f"{len(weights):,} weights with {num_parameters:,} parameters; the training state takes "
        f"{format_bytes(total_bytes)}. Each device of the {mesh_text(layout.axis_sizes)} holds "
        f"{parts} = {format_bytes(sum(by_kind.values()))}."
    )
    return f"{text} {host_note(layout)}".rstrip()


def mesh_text(axis_sizes: Mapping[str, int]) -> str:
    """Formats the axis sizes of a mesh as "mesh (replica 1, data 4, mdl 2)"."""
    return f"mesh ({', '.join(f'{name} {size}' for name, size in axis_sizes.items())})"


def shape_text(shape: tuple[int, ...]) -> str:
    """Formats a shape as "[7, 13]"."""
    return "[" + ", ".join(map(str, shape)) + "]"


def split_text(split: Sequence[DimSplit]) -> str:
    """Formats the mesh axes of each dim in a spec or a mapping as "(replica+data, -)"."""
    entries = [
        "+".join(map(str, entry))
        if isinstance(entry, Sequence) and not isinstance(entry, str)
        else "-"
        if entry is None
        else str(entry)
        for entry in split
    ]
    return "(" + ", ".join(entries) + ")"


def optimizer_report(groups: WeightGroups) -> list[str]:
    """Returns notes on the optimizers.

    There is a note for each optimizer whose updates depend on several weights or on random numbers.
    If there are several optimizers, further notes list the weights of each one.
    """
    names = {
        path: group.optimizer_name for group in groups.by_name.values() for path in group.paths
    }
    members: dict[str, list[tuple[str, int]]] = {}
    for path, spec in spec_items(groups.weight_specs):
        name = names.get(path)
        # The name of the main optimizer is "". Frozen weights are in no group.
        label = "main optimizer" if name == "" else f"optimizer '{name}'" if name else "frozen"
        members.setdefault(label, []).append(("/".join(path), math.prod(spec.shape)))
    notes = [
        f"optimizer{f' {group.optimizer_name!r}' if group.optimizer_name else ''}: the update "
        "of a weight depends on other weights or on random numbers, so the optimizer is called "
        "with all its weights together, and with a separate array for each layer. This takes "
        "longer to compile. To clip gradients by their global norm, it is cheaper to set "
        "Learner.clip_gradient_norm_to_value"
        for group in groups.by_name.values()
        if group.stack_ranks is not None
    ]
    if members.keys() <= {"main optimizer"}:
        return notes
    return notes + [
        f"{label}: {len(weights)} {'weight' if len(weights) == 1 else 'weights'}, "
        f"{sum(size for _, size in weights):,} parameters: "
        f"{first_few([path for path, _ in weights], 2)}"
        for label, weights in members.items()
    ]
