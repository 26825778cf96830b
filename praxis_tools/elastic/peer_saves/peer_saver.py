"""A process's part of the peer saves: to its own host's memory and to a neighbour's."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from praxis_lite.checkpoints.steps.manifest import new_manifest
from praxis_lite.core.partitioner.train_state import StateLayout, TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.job import processes
from praxis_tools.elastic.peer_saves.pieces import Piece, on_host, own_pieces, process_of
from praxis_tools.elastic.store_messages import SaveId, StoreClient, StoreFailed
from praxis_tools.elastic.worker_order import Order

_SAID_SECONDS = 1.0  # A wait for the save before that is not worth a line.


class PeerSaver:
    """Saves a state into the memory of hosts, in the background: a context.

    Each process gives its pieces to the store of its own host and to that of the next member, on
    another host where there is one. Once all have done so they drop the saves before. So there is
    a complete save at any time, even if one host dies meanwhile. A save waits for the one before
    it and is never skipped, because that bounds the cost of a death.

    Attributes:
      step: of the newest save that was begun; 0: none was.

    Args:
      order: of this process.
      stores: of all members, in the order of their processes.
      layout: of the TrainState on the mesh.
      note: prints a line.
      exchange: gives each process's text to all, and returns all (`processes.exchange`).
      process_of: returns the index of the process that has a device.
    """

    def __init__(
        self, order: Order, stores: Sequence[StoreClient], layout: StateLayout, mesh: Mesh,
        note: Callable[[str], None],
        exchange: Callable[[str, str], list[str]] = processes.exchange,
        process_of: Callable[[jax.Device], int] = process_of,
    ):
        self._order, self._layout, self._note, self._exchange = order, layout, note, exchange
        self._own = stores[order.index]
        neighbour = neighbour_of(order)
        self._targets = [self._own] + ([] if neighbour is None else [stores[neighbour]])
        self._pieces = own_pieces(layout, mesh, order.index, process_of)
        self._number, self.step, self._has_said = 0, 0, False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "PeerSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # Else others may be gone, and this process is to end.
            self.wait()

    def begin(self, step: int, state: TrainState, data: Mapping[str, Any]) -> None:
        """Begins to save; the state may be donated once this returns.

        Args:
          data: saved with the state, as by `Checkpoints.save`.
        """
        began = time.monotonic()
        self.wait()
        seconds = time.monotonic() - began
        if seconds >= _SAID_SECONDS and not self._has_said and self._order.index == 0:
            self._has_said = True
            self._note(
                f"training waits {seconds:.1f} s for the peer save of step {self.step} to end: "
                "raise run.peer_save_every_steps, for saves take longer than the steps between"
            )
        manifest = {
            **new_manifest(step, self._layout, data, {}, None, ""),
            "members": list(self._order.members),
        }
        values = on_host(self._pieces, dict(leaves_with_path(state)))
        save = SaveId(self._order.generation, self._number, self._order.member)
        self._number, self.step = self._number + 1, step
        # A daemon: a process that ends with an error waits for no other.
        self._thread = threading.Thread(
            target=self._save, args=(save, manifest, values), daemon=True,
            name=f"peer save of step {step}",
        )
        self._thread.start()

    def abandon_after(self, step: int) -> None:
        """Drops the saves of steps after `step`, for a run that is rolled back to it.

        Else the next generation would take the newest of them. All processes call it.
        """
        self.wait()
        with contextlib.suppress(StoreFailed):
            for save in self._own.saves():
                if json.loads(bytes(self._own.header(save)))["step"] > step:
                    self._own.drop(save)
        self._exchange("peer saves are abandoned", "")  # None is begun before.

    def wait(self) -> None:
        """Waits for the save in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, save: SaveId, manifest: dict[str, Any], values: list[np.ndarray]) -> None:
        error = ""
        try:
            self._put(save, manifest, values)
        except StoreFailed as failed:
            error = str(failed)
        except Exception as failed:  # The others have to hear of it.
            error = f"{type(failed).__name__}: {failed}"
        try:
            texts = self._exchange(f"peer save {save.generation}/{save.number}", error)
        except Exception:
            return  # If the others have met, this save is complete, otherwise the one before is.
        if errors := list(dict.fromkeys(filter(None, texts))):
            if self._order.index == 0:
                self._note(
                    f"step {manifest['step']} is not in the memory of hosts: {'; '.join(errors)}. "
                    "The save before it stays there"
                )
            for store in self._targets:
                with contextlib.suppress(StoreFailed):
                    store.drop(save)
            return
        with contextlib.suppress(StoreFailed):
            for before in self._own.saves():
                if before[:2] < save[:2]:
                    self._own.drop(before)

    def _put(self, save: SaveId, manifest: dict[str, Any], values: list[np.ndarray]) -> None:
        blocks = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in values]
        manifest["pieces"] = _described(self._pieces, blocks)
        header, num_bytes = json.dumps(manifest).encode(), sum(map(len, blocks))
        with ThreadPoolExecutor(len(self._targets)) as pool:
            for put in [
                pool.submit(store.put, save, header, blocks, num_bytes) for store in self._targets
            ]:
                put.result()


def _described(pieces: Sequence[Piece], blocks: Sequence[memoryview]) -> list[dict[str, Any]]:
    """Returns a header's entry of each piece: its place in the array and in the data."""
    described, offset = [], 0
    for piece, block in zip(pieces, blocks, strict=True):
        described.append({
            "path": piece.path, "box": piece.box, "start": offset, "num_bytes": len(block),
            "xxh3_128": xxhash.xxh3_128_hexdigest(block),
        })
        offset += len(block)
    return described


def stores_of(order: Order) -> list[StoreClient]:
    """Returns the stores of the members of a generation, in the order of their processes."""
    return [
        StoreClient(address, order.key, f"process {member}")
        for member, address in zip(order.members, order.stores, strict=True)
    ]


def neighbour_of(order: Order) -> int | None:
    """Returns the index of the member whose host also keeps this member's pieces.

    None if it has no other member; one on the same host if there is no other host.
    """
    num = len(order.members)
    others = [(order.index + distance) % num for distance in range(1, num)]
    hosts = [address.rpartition(":")[0] for address in order.stores]
    elsewhere = [other for other in others if hosts[other] != hosts[order.index]]
    return next(iter(elsewhere or others), None)
