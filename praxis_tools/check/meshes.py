"""On which meshes an experiment is checked."""

import itertools
import math
import re
from collections.abc import Sequence

from praxis_lite.core.errors import require
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.mesh_config import MeshConfig

NUM_DEVICES = 8  # Simulated, or as many as the experiment's own mesh has, if that is fewer.
Shape = tuple[int, ...]


def parse_meshes(text: str, axis_names: Sequence[str]) -> list[Shape]:
    """Returns the shapes that `--meshes` names, such as "1x4x2,2x2x2".

    Raises:
      ConfigError: a word is no shape, or has not a size for each axis.
    """
    shapes = []
    for word in filter(None, re.split(r"[;,\s]+", text.strip())):
        sizes = word.split("x")
        is_right = len(sizes) == len(axis_names) and all(
            size.isdecimal() and int(size) > 0 for size in sizes
        )
        example = "x".join("2" for _ in axis_names)
        require(
            is_right, "A mesh of --meshes", word,
            f"devices along each of the axes {tuple(axis_names)} with an x between them, such as "
            f"{example}",
            "Several meshes have commas between them.",
        )
        shapes.append(tuple(map(int, sizes)))
    require(shapes, "--meshes", text, "at least one mesh")
    return shapes


def reduced(config: MeshConfig, num_devices: int) -> Shape:
    """Returns the experiment's own mesh, its longest axes halved until there are devices for it."""
    shape = list(config.shape)
    while math.prod(shape) > num_devices:
        longest = shape.index(max(shape))
        shape[longest] = max(1, shape[longest] // 2)
    return tuple(shape)


def chosen_meshes(own: Shape, layout: StateLayout, num_devices: int) -> list[Shape]:
    """Returns each axis alone, all axes, a mesh that divides as little as possible, and `own`.

    In that order, so that what an axis alone shows is found there. A mesh of one device is no
    mesh, and none comes twice.

    Args:
      layout: of the task's state on any mesh with these axes; its specs and shapes are read.
      num_devices: the most that a mesh may have.
    """
    num_axes = len(own)
    alone = [
        tuple(max(own[axis], 2) if axis == item else 1 for item in range(num_axes))
        for axis in range(num_axes)
    ]
    pairs = [(2,) * num_axes]
    fitting = [
        shape for shape in itertools.product((1, 2, 3, 5, 7), repeat=num_axes)
        if 1 < math.prod(shape) <= num_devices
    ]
    uneven = max(fitting, key=lambda shape: (_num_uneven(shape, layout), math.prod(shape)))
    result = dict.fromkeys([*alone, *pairs, uneven, own])
    return [shape for shape in result if 1 < math.prod(shape) <= num_devices]


def _num_uneven(shape: Shape, layout: StateLayout) -> int:
    sizes = dict(zip(layout.axis_sizes, shape, strict=True))
    num = 0
    for leaf in layout.leaves():
        for dim, entry in zip(leaf.shape, leaf.spec, strict=True):
            parts = math.prod(sizes[axis] for axis in axes_of(entry))
            num += dim % parts != 0
    return num
