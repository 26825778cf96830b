"""Which devices a collective runs among, read from its attributes: groups, and mesh axes."""

import math
import re
from collections.abc import Mapping

import numpy as np

from praxis_lite.tools.explain.hlo_text import Program


def device_groups(attributes: str, program: Program) -> np.ndarray | None:
    """Returns the groups of a collective, int [groups, devices], or None if it has none.

    Devices are numbered as they lie in the mesh, row by row. Of collective-permute a group is a
    pair, source and target.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        numbers = [int(number) for number in re.findall(r"\d+", pairs.group(1))]
        return np.array(numbers).reshape(-1, 2)
    result = re.search(r"replica_groups=(.*)", attributes)
    if result is None:
        return None
    text = result.group(1)
    # [4,2]<=[8], or [4,2]<=[2,4]T(1,0)
    if iota := re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, size = int(iota.group(1)), int(iota.group(2))
        places = np.arange(groups * size).reshape(_numbers(iota.group(3)))
        if iota.group(4):
            places = places.transpose(_numbers(iota.group(4)))
        return places.reshape(groups, size)
    if mesh := re.match(r"mesh\[(.*?)\][^{]*\{(.*?)\}", text):
        return _groups_of_mesh(mesh.group(1), mesh.group(2))
    if listed := re.match(r"\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", text):  # {{0,1},{2,3}}
        groups = [_numbers(item) for item in re.findall(r"\{([\d,]+)\}", listed.group(1))]
        size = max(map(len, groups))
        return np.array([group for group in groups if len(group) == size])
    everyone = re.findall(r"(?:num_partitions|replica_count)=(\d+)", program.header)
    return np.arange(math.prod(int(size) for size in everyone))[None]  # {}


def _groups_of_mesh(mesh: str, among: str) -> np.ndarray:
    # jax 0.12: mesh['data'=4,'mdl'=2] {'mdl'}; 'data':(1)2 is a part of an axis, of size 2, with 1
    # before it.
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", mesh)}
    parts = [
        (axis, int(before or 1), int(size or sizes[axis]))
        for axis, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", among)
    ]
    shape, dims, dim = [], [], 0
    for axis, size in sizes.items():
        cuts = sorted((before, part) for name, before, part in parts if name == axis)
        at = 1
        for before, part in cuts:
            shape += [before // at, part]
            dims.append(dim + 1)
            at, dim = before * part, dim + 2
        shape.append(size // at)
        dim += 1
    others = [item for item in range(dim) if item not in dims]
    places = np.arange(math.prod(sizes.values())).reshape(shape)
    return places.transpose([*others, *dims]).reshape(-1, math.prod(part for *_, part in parts))


def devices_in_group(attributes: str, program: Program) -> int | None:
    """Returns the number of devices in a group of a collective, or None if it has no groups."""
    if "source_target_pairs=" in attributes:
        return None
    groups = device_groups(attributes, program)
    return None if groups is None else groups.shape[1]


def axes_of_groups(groups: np.ndarray, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ, in the mesh's order."""
    if groups.max(initial=0) >= math.prod(axis_sizes.values()):
        return ()  # Numbered otherwise.
    places = np.unravel_index(groups, tuple(axis_sizes.values()))
    return tuple(
        axis for axis, place in zip(axis_sizes, places, strict=True)
        if (place != place[:, :1]).any()
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
