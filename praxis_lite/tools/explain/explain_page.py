"""The page of --mode=explain --html=FILE: what every device holds and sends, to look at.

The page is explain_page.html; the data that it draws is put into it as one JSON document.
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
from praxis_lite.run.trainer.layout_table import bytes_per_device, host_note, kind_of
from praxis_lite.tools.explain import hlo

# Of more devices groups are drawn: a page of 4,096 squares is slow, and shows none.
MOST_DRAWN = 256


@dataclass(frozen=True)
class ExplainedStep:
    """A compiled step: "train", "eval" or "decode" with batches of a dataset.

    Attributes:
      batch: the layout of one.
      memory: None if the backend does not tell.
      donated: bytes per device, and buffers.
      flops: of matmuls, per device.
      figures: what a plan says besides, as (name, value).
    """

    step: str
    dataset: str
    batch: StateLayout
    collectives: list[hlo.Collective]
    memory: hlo.MemoryPerDevice | None
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
    """Returns a whole HTML page that asks nothing of the network."""
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
    # In a script element only "<" can end it; names may hold anything.
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    before, after = template.split("{{document}}")
    return before.replace("{{title}}", html.escape(title)) + text + after


def in_notebook(page: str, *, height: int = 640) -> str:
    """Returns a page as an element of a notebook's output: a frame with styles of its own.

    Args:
      page: a whole HTML page.
      height: of the frame, in pixels.
    """
    return (
        f'<iframe srcdoc="{html.escape(page)}" width="100%" height="{height}" '
        'style="border:1px solid #ccc" sandbox="allow-scripts"></iframe>'
    )


def _drawn_mesh(axis_sizes: Mapping[str, int], device_ids: list[int]) -> dict[str, Any]:
    """Returns the axes that are drawn: of very many devices, groups, numbered from 0.

    A group has the devices that lie beside each other along the longest axes.
    """
    sizes = dict(axis_sizes)
    while math.prod(sizes.values()) > MOST_DRAWN:
        longest = max(sizes, key=lambda axis: sizes[axis])
        size = sizes[longest]
        divisor = next(number for number in range(2, size + 1) if size % number == 0)
        sizes[longest] = size // divisor
    if sizes == dict(axis_sizes):
        return {"axes": list(sizes.items()), "device_ids": device_ids, "groups": ""}
    each = len(device_ids) // math.prod(sizes.values())
    along = " and ".join(
        f"{axis_sizes[axis] // size} along {axis}"
        for axis, size in sizes.items() if size < axis_sizes[axis]
    )
    return {
        "axes": list(sizes.items()), "device_ids": list(range(math.prod(sizes.values()))),
        "groups": f"Each square, and each number, stands for {each} devices: {along}.",
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


def _step(item: ExplainedStep) -> dict[str, Any]:
    step = f"{item.step}_step"
    kind = f"batch of {item.dataset} ({step})"
    groups = hlo.by_layer(item.collectives)
    return {
        "step": step,
        "dataset": item.dataset,
        "batch": [_leaf(leaf, kind) for leaf in item.batch.leaves()],
        "collectives": [
            {
                "kind": group[0].kind,
                "layer": group[0].layer,
                "layers": _bytes_by_layer(group),
                "count": sum(element.count for element in group),
                "bytes": sum(one.count * one.bytes for one in group),
                "bound": hlo.bound(group),
            }
            for group in groups
        ],
        "bounds": {
            kind: hlo.bound(c for c in item.collectives if c.kind == kind)
            for kind in hlo.summarise(item.collectives)
        },
        "memory": item.memory and vars(item.memory),
        "donated": item.donated,
        "flops": item.flops,
        "figures": item.figures,
    }


def _bytes_by_layer(group: Sequence[hlo.Collective]) -> list[tuple[str, int]]:
    """Returns (layer, bytes of all executions), most bytes first."""
    totals = collections.Counter()
    for item in group:
        for layer, size in item.layers:
            totals[layer] += item.count * size
    return totals.most_common()
