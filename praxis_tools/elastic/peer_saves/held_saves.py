"""The saves in the memory of hosts: the newest complete save, and its arrays."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import xxhash

from praxis_lite.checkpoints.steps.manifest import parse_manifest
from praxis_lite.core.errors import few
from praxis_lite.job.processes.coordination import PeerLost
from praxis_tools.elastic.peer_saves.pieces import Box, covers
from praxis_tools.elastic.store_messages import SaveId, StoreClient, StoreFailed

_NUM_THREADS = 16


class Choice(NamedTuple):
    """A complete save that was found. It is a list in JSON, from which `Choice(*list)` restores it.

    Attributes:
      generation, number: of the save.
      step: of the state.
      holders: the origin of each part, and the indices of the stores that hold it.
    """

    generation: int
    number: int
    step: int
    holders: Sequence[tuple[int, Sequence[int]]]


def newest_whole(stores: Sequence[StoreClient]) -> tuple[Choice | None, list[str]]:
    """Returns the newest save of which each part is stored undamaged somewhere, or None.

    All stores compare their parts of that save with their digests at the same time. Also returns
    the reasons why newer saves cannot be used.
    """
    reasons: list[str] = []
    held: dict[tuple[int, int], dict[int, list[int]]] = collections.defaultdict(dict)
    with ThreadPoolExecutor(len(stores)) as pool:
        for index, listed in enumerate(pool.map(lambda store: _tried(store.saves), stores)):
            if isinstance(listed, str):
                reasons.append(listed)
                continue
            for save in listed:
                held[save[:2]].setdefault(save.origin, []).append(index)
    for generation, number in sorted(held, reverse=True):
        holders, damaged = _undamaged(stores, generation, number, held[generation, number])
        reasons += damaged
        headers = [
            header for origin, indices in holders.items()
            if (header := _header(stores, SaveId(generation, number, origin), indices))
        ]
        if not headers:
            continue
        step, members = headers[0]["step"], headers[0]["members"]
        if all(covers(*leaf) for leaf in _boxes(headers)):
            return Choice(generation, number, step, list(holders.items())), reasons
        missing = [f"process {member}" for member in members if member not in holders]
        reasons.append(f"nobody holds the part of {' and '.join(missing)} of step {step} any more")
    return None, reasons


def _tried(ask: Callable[[], Any]) -> Any:
    """Returns an answer, or the reason why there is none."""
    try:
        return ask()
    except StoreFailed as failed:
        return str(failed)


def _undamaged(
    stores: Sequence[StoreClient], generation: int, number: int,
    holders: Mapping[int, Sequence[int]],
) -> tuple[dict[int, list[int]], list[str]]:
    """Returns the holders of undamaged parts, and the damage as text."""
    asked = [(origin, index) for origin, indices in holders.items() for index in indices]

    def ask(item: tuple[int, int]) -> Any:
        origin, index = item
        return _tried(lambda: stores[index].is_undamaged(SaveId(generation, number, origin)))

    result: dict[int, list[int]] = {}
    damaged = []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for (origin, index), answer in zip(asked, pool.map(ask, asked), strict=True):
            if answer is True:
                result.setdefault(origin, []).append(index)
            else:
                wrong = f"the part of process {origin} is damaged in {stores[index].name}"
                damaged.append(answer or wrong)
    return result, damaged


def _header(
    stores: Sequence[StoreClient], save: SaveId, indices: Sequence[int]
) -> dict[str, Any] | None:
    """Returns the manifest of a part from the first store that gives it."""
    for index in indices:
        answer = _tried(lambda index=index: stores[index].header(save))
        if not isinstance(answer, str):
            return parse_manifest(bytes(answer))
    return None


def _boxes(headers: Sequence[Mapping[str, Any]]) -> list[tuple[list[Box], tuple[int, ...]]]:
    """Returns for each array the boxes that are held, and its shape."""
    boxes: dict[str, list[Box]] = collections.defaultdict(list)
    for header in headers:
        for piece in header["pieces"]:
            boxes[piece["path"]].append(tuple(map(tuple, piece["box"])))
    return [(boxes[path], tuple(leaf["shape"])) for path, leaf in headers[0]["leaves"].items()]


class HeldSave:
    """A save that was chosen, to be read.

    Attributes:
      step: of the state.
      manifest: as of a checkpoint's step.
      arrays: by path, for `read_arrays`.

    Args:
      own: the index of this host's store, which is asked first.

    Raises:
      PeerLost: a part is not held any more: another choice is to be made.
    """

    def __init__(self, stores: Sequence[StoreClient], own: int, choice: Choice):
        self.step, pieces = choice.step, collections.defaultdict(list)
        items = [
            (SaveId(choice.generation, choice.number, origin),
             sorted(indices, key=lambda index: index != own))
            for origin, indices in choice.holders
        ]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            headers = list(pool.map(lambda item: _header(stores, *item), items))
        for (save, indices), header in zip(items, headers, strict=True):
            if header is None:
                raise PeerLost(
                    f"The part of process {save.origin} of step {self.step} is not in the memory "
                    "of hosts any more."
                )
            holders = [stores[index] for index in indices]
            for piece in header["pieces"]:
                pieces[piece["path"]].append(_HeldPiece(
                    tuple(map(tuple, piece["box"])), save, holders, piece["start"],
                    piece["num_bytes"], piece["xxh3_128"],
                ))
        self.manifest = headers[0]
        self.arrays = {
            path: HeldArray(path, np.dtype(leaf["dtype"]), pieces[path])
            for path, leaf in self.manifest["leaves"].items()
        }


@dataclasses.dataclass(frozen=True)
class _HeldPiece:
    """A part of an array in the stores."""

    box: Box
    save: SaveId
    holders: Sequence[StoreClient]
    start: int
    num_bytes: int
    digest: str

    def read(self) -> bytearray | None:
        """Returns its bytes from the first store that has them undamaged; None if none has."""
        for store in self.holders:
            data = _tried(lambda store=store: store.read(self.save, self.start, self.num_bytes))
            if not isinstance(data, str) and xxhash.xxh3_128_hexdigest(data) == self.digest:
                return data
        return None


@dataclasses.dataclass(frozen=True)
class HeldArray:
    """An array in the memory of hosts, read when it is asked for."""

    path: str
    dtype: np.dtype
    pieces: Sequence[_HeldPiece]

    def read_block(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the unpadded array.

        Raises:
          PeerLost: no store gives it undamaged.
        """
        block = np.empty([item.stop - item.start for item in index], self.dtype)
        for piece in self.pieces:
            common = [
                (max(a, item.start), min(b, item.stop))
                for (a, b), item in zip(piece.box, index, strict=True)
            ]
            if any(a >= b for a, b in common):
                continue
            if (data := piece.read()) is None:
                names = few([store.name for store in piece.holders])
                raise PeerLost(
                    f"{self.path} of process {piece.save.origin} cannot be read undamaged from "
                    f"the memory of {names}."
                )
            values = np.frombuffer(data, self.dtype).reshape([b - a for a, b in piece.box])
            in_block = _within(common, [item.start for item in index])
            block[in_block] = values[_within(common, [start for start, _ in piece.box])]
        return block


def _within(part: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of a part in an array that begins at `origin`."""
    return tuple(slice(a - c, b - c) for (a, b), c in zip(part, origin, strict=True))
