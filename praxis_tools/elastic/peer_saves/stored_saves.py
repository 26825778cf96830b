"""Finds the newest complete peer save and reads its arrays."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import xxhash

from praxis_lite.checkpoints.steps.manifest import parse_manifest
from praxis_lite.core.errors import PeerLost, first_few
from praxis_tools.elastic.peer_saves.pieces import Box, covers
from praxis_tools.elastic.store_messages import SaveId, StoreClient, StoreFailed

_NUM_THREADS = 16


class SaveChoice(NamedTuple):
    """A complete save, and where its parts are stored.

    Attributes:
      generation: Generation that saved the state.
      number: Number of the save within the generation.
      step: Step of the state.
      holders: For each part, its origin and the indices of the stores that contain the part.
    """

    generation: int
    number: int
    step: int
    holders: Sequence[tuple[int, Sequence[int]]]


def newest_complete_save(stores: Sequence[StoreClient]) -> tuple[SaveChoice | None, list[str]]:
    """Returns the newest save that is complete and undamaged.

    The stores verify their parts in parallel.

    Returns:
      (save, reasons): The save, or None if no save is complete, and the reasons why newer saves
      cannot be used.
    """
    reasons: list[str] = []
    # Maps (generation, number of the save) to the indices of the stores that have each part.
    found: dict[tuple[int, int], dict[int, list[int]]] = collections.defaultdict(dict)
    with ThreadPoolExecutor(len(stores)) as pool:
        for index, saves in enumerate(pool.map(lambda store: _try(store.saves), stores)):
            if isinstance(saves, str):
                reasons.append(saves)
                continue
            for save in saves:
                found[save[:2]].setdefault(save.origin, []).append(index)
    for generation, number in sorted(found, reverse=True):
        holders, damage = _verify(stores, generation, number, found[generation, number])
        reasons += damage
        headers = [
            header
            for origin, indices in holders.items()
            if (header := _header(stores, SaveId(generation, number, origin), indices))
        ]
        if not headers:
            continue
        step, members = headers[0]["step"], headers[0]["members"]
        # The pieces on the hosts that are alive must cover every array.
        if all(covers(*leaf) for leaf in _boxes(headers)):
            return SaveChoice(generation, number, step, list(holders.items())), reasons
        missing = [f"process {member}" for member in members if member not in holders]
        reasons.append(
            f"step {step} is incomplete: no host has the part of {' and '.join(missing)}"
        )
    return None, reasons


def _try(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or the error message if it raises StoreFailed."""
    try:
        return call()
    except StoreFailed as failed:
        return str(failed)


def _verify(
    stores: Sequence[StoreClient],
    generation: int,
    number: int,
    holders: Mapping[int, Sequence[int]],
) -> tuple[dict[int, list[int]], list[str]]:
    """Returns the stores with undamaged copies of each part, and messages about damaged copies."""
    copies = [(origin, index) for origin, indices in holders.items() for index in indices]

    def verify(copy: tuple[int, int]) -> Any:
        origin, index = copy
        return _try(lambda: stores[index].is_undamaged(SaveId(generation, number, origin)))

    undamaged: dict[int, list[int]] = {}
    messages = []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for (origin, index), answer in zip(copies, pool.map(verify, copies), strict=True):
            if answer is True:
                undamaged.setdefault(origin, []).append(index)
            else:
                damage = f"the part of process {origin} is damaged in {stores[index].name}"
                messages.append(answer or damage)
    return undamaged, messages


def _header(
    stores: Sequence[StoreClient], save: SaveId, indices: Sequence[int]
) -> dict[str, Any] | None:
    """Returns a part's manifest from the first store that answers, or None if no store answers."""
    for index in indices:
        answer = _try(functools.partial(stores[index].header, save))
        if not isinstance(answer, str):
            return parse_manifest(bytes(answer))
    return None


def _boxes(headers: Sequence[Mapping[str, Any]]) -> list[tuple[list[Box], tuple[int, ...]]]:
    """Returns, for each array, the boxes that are available and the array's shape."""
    boxes: dict[str, list[Box]] = collections.defaultdict(list)
    for header in headers:
        for piece in header["pieces"]:
            boxes[piece["path"]].append(tuple(map(tuple, piece["box"])))
    return [(boxes[path], tuple(leaf["shape"])) for path, leaf in headers[0]["leaves"].items()]


class StoredSave:
    """Reads a peer save.

    Args:
      stores: Stores of all members, in the order of their processes.
      own: Index of this host's store, which is preferred.
      choice: The save to read.

    Attributes:
      step: Step of the state.
      manifest: Manifest in the format of a checkpoint's manifest.
      arrays: Maps paths to arrays, which are read on demand.

    Raises:
      PeerLost: A part is no longer available, so a different save must be chosen.
    """

    def __init__(self, stores: Sequence[StoreClient], own: int, choice: SaveChoice):
        self.step, pieces = choice.step, collections.defaultdict(list)
        # Of several copies, the one on this host is read first.
        parts = [
            (
                SaveId(choice.generation, choice.number, origin),
                sorted(indices, key=lambda index: index != own),
            )
            for origin, indices in choice.holders
        ]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            headers = list(pool.map(lambda part: _header(stores, *part), parts))
        manifests: list[dict[str, Any]] = []
        for (save, indices), header in zip(parts, headers, strict=True):
            if header is None:
                raise PeerLost(
                    f"The peer save of step {self.step} is no longer complete: no host has the "
                    f"part of process {save.origin}."
                )
            manifests.append(header)
            holders = [stores[index] for index in indices]
            for piece in header["pieces"]:
                pieces[piece["path"]].append(
                    _StoredPiece(
                        tuple(map(tuple, piece["box"])),
                        save,
                        holders,
                        piece["start"],
                        piece["num_bytes"],
                        piece["xxh3_128"],
                    )
                )
        self.manifest = manifests[0]
        self.arrays = {
            path: StoredArray(path, np.dtype(leaf["dtype"]), pieces[path])
            for path, leaf in self.manifest["leaves"].items()
        }


@dataclasses.dataclass(frozen=True)
class _StoredPiece:
    """A part of an array, with the stores that have a copy of it."""

    box: Box
    save: SaveId
    holders: Sequence[StoreClient]
    start: int
    num_bytes: int
    digest: str

    def read(self) -> bytearray | None:
        """Reads the piece from the first store with an undamaged copy; None if no store has one."""
        for store in self.holders:
            data = _try(functools.partial(store.read, self.save, self.start, self.num_bytes))
            if not isinstance(data, str) and xxhash.xxh3_128_hexdigest(data) == self.digest:
                return data
        return None


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of a peer save, which is read on demand."""

    path: str
    dtype: np.dtype
    pieces: Sequence[_StoredPiece]
    is_in_store = False

    def read_block(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a block of the unpadded array.

        Raises:
          PeerLost: No store has an undamaged copy.
        """
        block = np.empty([s.stop - s.start for s in index], self.dtype)
        for piece in self.pieces:
            overlap = [
                (max(a, s.start), min(b, s.stop))
                for (a, b), s in zip(piece.box, index, strict=True)
            ]
            if any(a >= b for a, b in overlap):
                continue
            if (data := piece.read()) is None:
                names = first_few([store.name for store in piece.holders])
                raise PeerLost(
                    f"The peer save of {self.path} by process {piece.save.origin} is damaged or "
                    f"missing in the memory of {names}."
                )
            # Copy the overlap of piece and block, whose index is relative to the start of each.
            values = np.frombuffer(data, self.dtype).reshape([b - a for a, b in piece.box])
            in_block = _relative_index(overlap, [s.start for s in index])
            block[in_block] = values[_relative_index(overlap, [start for start, _ in piece.box])]
        return block


def _relative_index(box: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of a box in an array that starts at `origin`."""
    return tuple(slice(a - c, b - c) for (a, b), c in zip(box, origin, strict=True))
