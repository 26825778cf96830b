"""The pieces of a state: boxes of its unpadded arrays, each stored by a single process.

The boxes are the shards of the mesh. The processes that hold a replicated shard divide such shards
among them, so each of them stores only a part of a replicated state.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout

Box = tuple[tuple[int, int], ...]  # From and to, along each dim.
_MOST_BYTES = 2**24  # Of a piece with several rows, because a reader may need a part of it.


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array that a process keeps.

    Attributes:
      path: of the array.
      device: a device of the process that holds it.
      box: its place in the unpadded array.
      local: its place in what the device holds.
    """

    path: str
    device: jax.Device
    box: Box
    local: tuple[slice, ...]


def process_of(device: jax.Device) -> int:
    """Returns the index of the process that has a device."""
    return device.process_index


def own_pieces(
    layout: StateLayout, mesh: Mesh, process: int,
    process_of: Callable[[jax.Device], int] = process_of,
) -> list[Piece]:
    """Returns the pieces that a process keeps; those of all processes cover each array once.

    Every process finds the same shares.

    Args:
      layout: of a TrainState on the mesh; its `step` is not among the pieces.
    """
    load: collections.Counter[int] = collections.Counter()
    pieces = []
    for leaf in layout.leaves():
        if leaf.path == "step":
            continue
        for box, devices in _shards(leaf, mesh):
            # The device whose process has the least to keep so far; the first of several such.
            device = min(devices, key=lambda device: load[process_of(device)])
            load[process_of(device)] += _volume(box) * leaf.dtype.itemsize
            if process_of(device) == process:
                pieces += _in_parts(leaf, box, device)
    return pieces


def _shards(leaf: LeafLayout, mesh: Mesh) -> Iterator[tuple[Box, list[jax.Device]]]:
    """Yields each part of a padded array, with the devices that hold it."""
    holders: dict[Box, list[jax.Device]] = {}
    indices = NamedSharding(mesh, leaf.spec).devices_indices_map(leaf.padded_shape)
    for device, index in indices.items():
        box = tuple(
            item.indices(dim)[:2] for item, dim in zip(index, leaf.padded_shape, strict=True)
        )
        holders.setdefault(box, []).append(device)
    yield from holders.items()


def _in_parts(leaf: LeafLayout, box: Box, device: jax.Device) -> Iterator[Piece]:
    """Yields the unpadded values of a shard, some rows at a time."""
    true = tuple((a, min(b, dim)) for (a, b), dim in zip(box, leaf.shape, strict=True))
    if any(start >= stop for start, stop in true):
        return  # It is all padding.
    if not true:
        yield Piece(leaf.path, device, true, ())
        return
    row_bytes = _volume(true[1:]) * leaf.dtype.itemsize
    num_rows = max(1, _MOST_BYTES // row_bytes)
    first, last = true[0]
    for start in range(first, last, num_rows):
        part = ((start, min(start + num_rows, last)), *true[1:])
        local = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box, strict=True))
        yield Piece(leaf.path, device, part, local)


def _volume(box: Box) -> int:
    return int(np.prod([stop - start for start, stop in box], dtype=np.int64))


def covers(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Returns True if boxes of a single mesh are all of an array.

    Boxes of a mesh are equal or apart, so their volumes tell.
    """
    return sum(map(_volume, set(boxes))) == _volume(tuple((0, dim) for dim in shape))


def on_host(pieces: list[Piece], arrays: dict[str, jax.Array]) -> list[np.ndarray]:
    """Returns the values of pieces; the arrays may be donated after that.

    On CPU these are views of the devices' memory, which XLA leaves alone as long as there are such.
    """
    shards = {}
    for path in dict.fromkeys(piece.path for piece in pieces):
        shards |= {(path, x.device): x.data for x in arrays[path].addressable_shards}
    own = dict.fromkeys((piece.path, piece.device) for piece in pieces)
    for key in own:
        shards[key].copy_to_host_async()
    copied = {key: np.asarray(shards[key]) for key in own}
    return [copied[piece.path, piece.device][piece.local] for piece in pieces]
