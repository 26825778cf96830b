"""Chooses the meshes on which an experiment is checked."""

import itertools
import math
import re
from collections.abc import Sequence

from praxis_lite.core.errors import require
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.mesh_config import MeshConfig

NUM_DEVICES = 8  # Number of simulated devices.
Shape = tuple[int, ...]


def parse_meshes(text: str, axis_names: Sequence[str]) -> list[Shape]:
    """Parses the value of `--meshes`, such as "1x4x2,2x2x2".

    Raises:
      ConfigError: A shape is invalid or does not have a size for each axis.
    """
    shapes = []
    for word in filter(None, re.split(r"[;,\s]+", text.strip())):
        sizes = word.split("x")
        is_valid = len(sizes) == len(axis_names) and all(
            size.isdecimal() and int(size) > 0 for size in sizes
        )
        example = "x".join("2" for _ in axis_names)
        require(
            is_valid,
            "A mesh in --meshes",
            word,
            f"one size for each of the axes {tuple(axis_names)}, separated by x, such as {example}",
            "Separate meshes with commas.",
        )
        shapes.append(tuple(map(int, sizes)))
    require(bool(shapes), "--meshes", text, "at least one mesh")
    return shapes


def reduced_shape(config: MeshConfig, num_devices: int) -> Shape:
    """Returns the shape of a mesh, halving the largest axis until there are enough devices."""
    shape = list(config.shape)
    while math.prod(shape) > num_devices:
        longest = shape.index(max(shape))
        shape[longest] = max(1, shape[longest] // 2)
    return tuple(shape)


def choose_meshes(own: Shape, layout: StateLayout, num_devices: int) -> list[Shape]:
    """Returns the shapes of the meshes to check, without duplicates.

    They are meshes that split one axis, a mesh that splits all axes, the mesh with the most uneven
    splits, and `own`. Meshes that split one axis come first, so that a difference is found on the
    simplest mesh.

    Args:
      own: Shape of the experiment's own mesh.
      layout: Layout of the task's state on any mesh with these axes. Only the specs and shapes in
        the layout are used.
      num_devices: Maximum number of devices in a mesh.
    """
    num_axes = len(own)
    single_axis = [
        tuple(max(own[axis], 2) if axis == other else 1 for other in range(num_axes))
        for axis in range(num_axes)
    ]
    all_axes = [(2,) * num_axes]
    fitting = [
        shape
        for shape in itertools.product((1, 2, 3, 5, 7), repeat=num_axes)
        if 1 < math.prod(shape) <= num_devices
    ]
    uneven = max(fitting, key=lambda shape: (_num_uneven(shape, layout), math.prod(shape)))
    shapes = dict.fromkeys([*single_axis, *all_axes, uneven, own])
    return [shape for shape in shapes if 1 < math.prod(shape) <= num_devices]


def _num_uneven(shape: Shape, layout: StateLayout) -> int:
    """Returns the number of dims of weights and slots that cannot be split evenly on a mesh."""
    sizes = dict(zip(layout.axis_sizes, shape, strict=True))
    num = 0
    for leaf in layout.leaves():
        for dim, entry in zip(leaf.shape, leaf.spec, strict=True):
            parts = math.prod(sizes[axis] for axis in axes_of(entry))
            num += dim % parts != 0
    return num
