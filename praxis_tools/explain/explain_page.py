"""Builds the HTML page of `praxis explain`, which shows each device's memory and communication.

The data is inserted into the template explain_page.html as a JSON document.
"""

import collections
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.trainer.layout_table import bytes_per_device, host_note, kind_of
from praxis_tools.explain import hlo

# In larger meshes, groups of devices are drawn, since thousands of squares would be unreadable.
MAX_DRAWN_DEVICES = 256


@dataclass(frozen=True)
class ExplainedStep:
    """The properties of a compiled step.

    Attributes:
      step: "train", "eval" or "decode".
      dataset: Name of the dataset that provides the step's batches.
      batch: Layout of a batch.
      collectives: Collectives that the step executes.
      memory: Memory per device.
      donated: Donated bytes per device and number of donated buffers.
      flops: Matmul flops per device.
      figures: Additional (name, value) pairs, such as a plan's predictions.
    """

    step: str
    dataset: str
    batch: StateLayout
    collectives: list[hlo.Collective]
    memory: hlo.MemoryPerDevice
    donated: tuple[int, int]
    flops: int
    figures: Sequence[tuple[str, str]] = ()


def page(
    title: str,
    mesh: Mesh,
    layout: StateLayout,
    warnings: Sequence[str],
    steps: Sequence[ExplainedStep],
) -> str:
    """Returns a self-contained HTML page.

    Args:
      title: Title of the page.
      mesh: The job's mesh.
      layout: Layout of the train state.
      warnings: Warnings about the layout.
      steps: Compiled steps to show.
    """
    template = (resources.files(__package__) / "explain_page.html").read_text("utf-8")
    document = {
        "title": title,
        "versions": f"jax {jax.__version__}, {mesh.devices.flat[0].device_kind}",
        "num_devices": math.prod(layout.axis_sizes.values()),
        "mesh": list(layout.axis_sizes.items()),
        **_drawn_mesh(layout.axis_sizes, [device.id for device in mesh.devices.flat]),
        "totals": bytes_per_device(layout),
        "notes": [*layout.notes, *filter(None, [host_note(layout)])],
        "warnings": list(warnings),
        "leaves": [_leaf(leaf, kind_of(leaf)) for leaf in layout.leaves()],
        "steps": [_step(step) for step in steps],
    }
    # Escape "<", because names can contain any text and could close the script element.
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    before, after = template.split("{{document}}")
    return before.replace("{{title}}", html.escape(title)) + text + after


def in_notebook(page: str, *, height: int = 640) -> str:
    """Returns an iframe that displays a page in a notebook, isolated from the notebook's styles.

    Args:
      page: A complete HTML page.
      height: Height of the frame in pixels.
    """
    return (
        f'<iframe srcdoc="{html.escape(page)}" width="100%" height="{height}" '
        'style="border:1px solid #ccc" sandbox="allow-scripts"></iframe>'
    )


def _drawn_mesh(axis_sizes: Mapping[str, int], device_ids: list[int]) -> dict[str, Any]:
    """Returns the mesh to draw, in which each square is a device or a group of devices.

    Groups consist of neighboring devices along the longest axes, and are numbered from 0.
    """
    sizes = dict(axis_sizes)
    # Merge neighbors along the longest axis until the mesh is small enough.
    while math.prod(sizes.values()) > MAX_DRAWN_DEVICES:
        longest = max(sizes, key=lambda axis: sizes[axis])
        size = sizes[longest]
        divisor = next(number for number in range(2, size + 1) if size % number == 0)
        sizes[longest] = size // divisor
    if sizes == dict(axis_sizes):
        return {"axes": list(sizes.items()), "device_ids": device_ids, "groups": ""}
    group_size = len(device_ids) // math.prod(sizes.values())
    along = " and ".join(
        f"{axis_sizes[axis] // size} along {axis}"
        for axis, size in sizes.items()
        if size < axis_sizes[axis]
    )
    return {
        "axes": list(sizes.items()),
        "device_ids": list(range(math.prod(sizes.values()))),
        "groups": f"Each square and each number represents {group_size} devices: {along}.",
    }


def _leaf(leaf: LeafLayout, kind: str) -> dict[str, Any]:
    split = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in leaf.spec]
    return {
        "path": leaf.path,
        "kind": kind,
        "shape": leaf.shape,
        "padded": leaf.padded_shape,
        "dtype": str(leaf.dtype),
        "itemsize": leaf.dtype.itemsize,
        "split": split,
        "bytes": leaf.bytes_per_device,
        "by": leaf.declared_by,
    }


def _step(explained: ExplainedStep) -> dict[str, Any]:
    step = f"{explained.step}_step"
    kind = f"batch of {explained.dataset} ({step})"
    groups = hlo.by_layer(explained.collectives)
    return {
        "step": step,
        "dataset": explained.dataset,
        "batch": [_leaf(leaf, kind) for leaf in explained.batch.leaves()],
        "collectives": [
            {
                "kind": group[0].kind,
                "layer": group[0].layer,
                "layers": _bytes_by_layer(group),
                "count": sum(c.count for c in group),
                "bytes": sum(c.count * c.bytes for c in group),
                "bound": hlo.bound_sign(group),
            }
            for group in groups
        ],
        "bounds": {
            kind: hlo.bound_sign([c for c in explained.collectives if c.kind == kind])
            for kind in hlo.summarize(explained.collectives)
        },
        "memory": vars(explained.memory),
        "donated": explained.donated,
        "flops": explained.flops,
        "figures": explained.figures,
    }


def _bytes_by_layer(group: Sequence[hlo.Collective]) -> list[tuple[str, int]]:
    """Returns (layer, bytes of all executions) pairs, largest first."""
    totals: collections.Counter[str] = collections.Counter()
    for collective in group:
        for layer, size in collective.layers:
            totals[layer] += collective.count * size
    return totals.most_common()
