"""Divides a state into pieces: boxes of its unpadded arrays, each saved by a single process.

The boxes are the shards on the mesh, split into rows. A replicated shard is saved by only one of
the processes that store it, so that each process saves only a part of a replicated state.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dim.
_MAX_BYTES = 2**24  # Limit for pieces with several rows, because readers may need only some rows.


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array that one process saves.

    Attributes:
      path: Path of the array.
      device: Device of this process that stores the data.
      box: Position in the unpadded array.
      local: Index in the shard on the device.
    """

    path: str
    device: jax.Device
    box: Box
    local: tuple[slice, ...]


def process_of(device: jax.Device) -> int:
    """Returns the process index of a device."""
    return device.process_index


def own_pieces(
    layout: StateLayout,
    mesh: Mesh,
    process: int,
    process_of: Callable[[jax.Device], int] = process_of,
) -> list[Piece]:
    """Returns the pieces that a process saves.

    The pieces of all processes together cover each array exactly once, because every process
    computes the same assignment of shards to processes.

    Args:
      layout: Layout of a TrainState on the mesh. Its `step` is ignored.
      mesh: The mesh.
      process: Index of the process.
      process_of: Function that returns the process index of a device.
    """
    load: collections.Counter[int] = collections.Counter()  # Bytes assigned to each process.
    pieces: list[Piece] = []
    for leaf in layout.leaves():
        if leaf.path == "step":
            continue
        for box, devices in _shards(leaf, mesh):
            # Choose the device whose process has the fewest bytes so far.
            device = min(devices, key=lambda device: load[process_of(device)])
            load[process_of(device)] += _volume(box) * leaf.dtype.itemsize
            if process_of(device) == process:
                pieces += _split_rows(leaf, box, device)
    return pieces


def _shards(leaf: LeafLayout, mesh: Mesh) -> Iterator[tuple[Box, list[jax.Device]]]:
    """Yields each shard of a padded array, with the devices that store it."""
    devices_of_box: dict[Box, list[jax.Device]] = {}
    indices = NamedSharding(mesh, leaf.spec).devices_indices_map(leaf.padded_shape)
    for device, index in indices.items():
        box = tuple(s.indices(dim)[:2] for s, dim in zip(index, leaf.padded_shape, strict=True))
        devices_of_box.setdefault(box, []).append(device)
    yield from devices_of_box.items()


def _split_rows(leaf: LeafLayout, box: Box, device: jax.Device) -> Iterator[Piece]:
    """Splits the unpadded part of a shard along its first dim, into pieces of limited size."""
    unpadded = tuple((a, min(b, dim)) for (a, b), dim in zip(box, leaf.shape, strict=True))
    if any(start >= stop for start, stop in unpadded):
        return  # The shard consists only of padding.
    if not unpadded:
        yield Piece(leaf.path, device, unpadded, ())
        return
    row_bytes = _volume(unpadded[1:]) * leaf.dtype.itemsize
    num_rows = max(1, _MAX_BYTES // row_bytes)
    first, last = unpadded[0]
    for start in range(first, last, num_rows):
        part = ((start, min(start + num_rows, last)), *unpadded[1:])
        local = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box, strict=True))
        yield Piece(leaf.path, device, part, local)


def _volume(box: Box) -> int:
    return int(np.prod([stop - start for start, stop in box], dtype=np.int64))


def covers(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Returns whether boxes cover an entire array.

    Boxes from the same mesh are either equal or disjoint, so it is sufficient to sum their volumes.
    """
    return sum(map(_volume, set(boxes))) == _volume(tuple((0, dim) for dim in shape))


def copy_to_host(pieces: list[Piece], arrays: dict[str, jax.Array]) -> list[np.ndarray]:
    """Returns the values of pieces in host memory. The arrays can be donated afterwards.

    On CPU, the values are views of device buffers, which XLA does not reuse while the views exist.
    """
    shards: dict[tuple[str, jax.Device], jax.Array] = {}
    for path in dict.fromkeys(piece.path for piece in pieces):
        shards |= {(path, x.device): x.data for x in arrays[path].addressable_shards}
    needed = dict.fromkeys((piece.path, piece.device) for piece in pieces)
    for key in needed:
        shards[key].copy_to_host_async()
    copied = {key: np.asarray(shards[key]) for key in needed}
    return [copied[piece.path, piece.device][piece.local] for piece in pieces]
