"""Parses the replica groups of collectives and finds the mesh axes that they span."""

import math
import re
from collections.abc import Mapping

import numpy as np

from praxis_tools.explain.hlo_text import Program


def device_groups(attributes: str, program: Program) -> np.ndarray | None:
    """Returns the replica groups of a collective as int [groups, devices], or None without groups.

    Devices are numbered in the mesh's row-major order. The groups of a collective-permute are its
    (source, target) pairs.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        numbers = [int(number) for number in re.findall(r"\d+", pairs.group(1))]
        return np.array(numbers).reshape(-1, 2)
    match = re.search(r"replica_groups=(.*)", attributes)
    if match is None:
        return None
    text = match.group(1)
    # [4,2]<=[8], or [4,2]<=[2,4]T(1,0)
    if iota := re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        num_groups, size = int(iota.group(1)), int(iota.group(2))
        devices = np.arange(num_groups * size).reshape(_numbers(iota.group(3)))
        if iota.group(4):
            devices = devices.transpose(_numbers(iota.group(4)))
        return devices.reshape(num_groups, size)
    if mesh := re.match(r"mesh\[(.*?)\][^{]*\{(.*?)\}", text):
        return _groups_of_mesh(mesh.group(1), mesh.group(2))
    if listed := re.match(r"\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", text):  # {{0,1},{2,3}}
        groups = [_numbers(item) for item in re.findall(r"\{([\d,]+)\}", listed.group(1))]
        size = max(map(len, groups))
        return np.array([group for group in groups if len(group) == size])
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", program.header)
    return np.arange(math.prod(int(size) for size in counts))[None]  # {}


def _groups_of_mesh(mesh: str, axes: str) -> np.ndarray:
    """Returns the replica groups along some axes or sub-axes of a mesh.

    jax 0.12 writes mesh['data'=4,'mdl'=2] {'mdl'}. 'data':(1)2 is a sub-axis of size 2; the product
    of the sub-axes before it is 1. Each axis is reshaped into its sub-axes, and the sub-axes of the
    groups are moved to the end.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", mesh)}
    parts = [
        (axis, int(before or 1), int(size or sizes[axis]))
        for axis, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    ]
    shape: list[int] = []
    dims: list[int] = []
    dim = 0
    for axis, size in sizes.items():
        cuts = sorted((before, part) for name, before, part in parts if name == axis)
        # `at` is the product of the sub-axes so far.
        at = 1
        for before, part in cuts:
            shape += [before // at, part]
            dims.append(dim + 1)
            at, dim = before * part, dim + 2
        shape.append(size // at)
        dim += 1
    others = [item for item in range(dim) if item not in dims]
    devices = np.arange(math.prod(sizes.values())).reshape(shape)
    return devices.transpose([*others, *dims]).reshape(-1, math.prod(part for *_, part in parts))


def axes_of_groups(groups: np.ndarray, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices in a group differ, in mesh order."""
    if groups.max(initial=0) >= math.prod(axis_sizes.values()):
        return ()  # The devices are not numbered by this mesh.
    indices = np.unravel_index(groups, tuple(axis_sizes.values()))
    return tuple(
        axis
        for axis, index in zip(axis_sizes, indices, strict=True)
        if (index != index[:, :1]).any()
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
