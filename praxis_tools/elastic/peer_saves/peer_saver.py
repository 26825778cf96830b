"""Saves a process's part of the state in host memory, on the same host and on another host."""

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
from praxis_tools.elastic.peer_saves.pieces import (
    Piece,
    copy_to_host,
    own_pieces,
    process_of,
)
from praxis_tools.elastic.store_messages import SaveId, StoreClient, StoreFailed
from praxis_tools.elastic.worker_assignment import Assignment

_NOTE_SECONDS = 1.0  # Shorter waits for the previous save are not reported.


class PeerSaver:
    """Context manager that saves the state in host memory, in the background.

    Each process copies its pieces to the store on its own host and to the store of another member,
    if possible on a different host. The previous save is dropped after all processes have done so.
    Therefore, there is always a complete save, even if a host dies while saving. A save waits for
    the previous save and is never skipped, which limits the number of steps lost if a host dies.

    Args:
      assignment: Assignment of this worker.
      stores: Stores of all members, in the order of their processes.
      layout: Layout of the TrainState on the mesh.
      mesh: Mesh on which the state is placed.
      note: Function that prints a line.
      exchange: Function that sends a string to all processes and returns the strings from all
        processes.
      process_of: Function that returns the process index of a device.
      before_put: Called in every process, from a different thread, before the pieces are stored. A
        save is complete once the stores have the pieces of all processes.

    Attributes:
      step: Step of the last save that was started, or 0 before the first save.
    """

    def __init__(
        self,
        assignment: Assignment,
        stores: Sequence[StoreClient],
        layout: StateLayout,
        mesh: Mesh,
        note: Callable[[str], None],
        exchange: Callable[[str, str], list[str]] = processes.exchange,
        process_of: Callable[[jax.Device], int] = process_of,
        before_put: Callable[[], None] = lambda: None,
    ):
        self._assignment, self._layout = assignment, layout
        self._note, self._before_put, self._exchange = note, before_put, exchange
        self._own_store = stores[assignment.index]
        neighbor = neighbor_index(assignment)
        self._targets = [self._own_store] + ([] if neighbor is None else [stores[neighbor]])
        self._pieces = own_pieces(layout, mesh, assignment.index, process_of)
        self._number, self.step, self._has_noted_wait = 0, 0, False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "PeerSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # After an error, do not wait for other processes, which may be dead.
            self.wait()

    def begin(self, step: int, state: TrainState, data: Mapping[str, Any]) -> None:
        """Starts a save. The state can be donated once this returns.

        Args:
          step: Number of the step.
          state: State after the step.
          data: JSON values to save with the state, as in `Checkpoints.save`.
        """
        began = time.monotonic()
        self.wait()
        seconds = time.monotonic() - began
        if seconds >= _NOTE_SECONDS and not self._has_noted_wait and self._assignment.index == 0:
            self._has_noted_wait = True
            self._note(
                f"training waited {seconds:.1f} s for the peer save of step {self.step}, because "
                "saves take longer than the steps between them. Increase "
                "run.peer_save_every_steps."
            )
        manifest = {
            **new_manifest(step, self._layout, data, {}, None, ""),
            "members": list(self._assignment.members),
        }
        values = copy_to_host(self._pieces, dict(leaves_with_path(state)))
        save = SaveId(self._assignment.generation, self._number, self._assignment.member)
        self._number, self.step = self._number + 1, step
        # A daemon thread does not delay the exit of a failed process.
        self._thread = threading.Thread(
            target=self._save,
            args=(save, manifest, values),
            daemon=True,
            name=f"peer save of step {step}",
        )
        self._thread.start()

    def abandon_after(self, step: int) -> None:
        """Drops the saves of later steps, after training was rolled back to `step`.

        Otherwise, the next generation would resume from these saves. All processes must call this.
        """
        self.wait()
        with contextlib.suppress(StoreFailed):
            for save in self._own_store.saves():
                if json.loads(bytes(self._own_store.header(save)))["step"] > step:
                    self._own_store.drop(save)
        # Wait for all processes before the next save.
        self._exchange("peer saves are abandoned", "")

    def wait(self) -> None:
        """Waits for the save in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, save: SaveId, manifest: dict[str, Any], values: list[np.ndarray]) -> None:
        error = ""
        try:
            self._before_put()
            self._put(save, manifest, values)
        except StoreFailed as failed:
            error = str(failed)
        except Exception as failed:  # Report any error to the other processes.
            error = f"{type(failed).__name__}: {failed}"
        try:
            errors = self._exchange(f"peer save {save.generation}/{save.number}", error)
        except Exception:  # Another process has died.
            # Keep both saves, because at least one of them is complete.
            return
        if errors := list(dict.fromkeys(filter(None, errors))):
            if self._assignment.index == 0:
                self._note(
                    f"the peer save of step {manifest['step']} failed: {'; '.join(errors)}. "
                    "The previous peer save is kept."
                )
            for store in self._targets:
                with contextlib.suppress(StoreFailed):
                    store.drop(save)
            return
        with contextlib.suppress(StoreFailed):
            for previous in self._own_store.saves():
                if previous[:2] < save[:2]:
                    self._own_store.drop(previous)

    def _put(self, save: SaveId, manifest: dict[str, Any], values: list[np.ndarray]) -> None:
        blocks = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in values]
        manifest["pieces"] = _piece_records(self._pieces, blocks)
        header, num_bytes = json.dumps(manifest).encode(), sum(map(len, blocks))
        with ThreadPoolExecutor(len(self._targets)) as pool:
            for put in [
                pool.submit(store.put, save, header, blocks, num_bytes) for store in self._targets
            ]:
                put.result()


def _piece_records(pieces: Sequence[Piece], blocks: Sequence[memoryview]) -> list[dict[str, Any]]:
    """Returns header records with the position of each piece in its array and in the saved data."""
    records, offset = [], 0
    for piece, block in zip(pieces, blocks, strict=True):
        records.append(
            {
                "path": piece.path,
                "box": piece.box,
                "start": offset,
                "num_bytes": len(block),
                "xxh3_128": xxhash.xxh3_128_hexdigest(block),
            }
        )
        offset += len(block)
    return records


def stores_of(assignment: Assignment) -> list[StoreClient]:
    """Returns clients for the stores of all members, in the order of their processes."""
    return [
        StoreClient(address, assignment.key, f"process {member}")
        for member, address in zip(assignment.members, assignment.stores, strict=True)
    ]


def neighbor_index(assignment: Assignment) -> int | None:
    """Returns the index of the member whose host stores the second copy of this member's pieces.

    This is a member on a different host if possible, and None if there is no other member.
    """
    num = len(assignment.members)
    others = [(assignment.index + distance) % num for distance in range(1, num)]
    hosts = [address.rpartition(":")[0] for address in assignment.stores]
    on_other_hosts = [other for other in others if hosts[other] != hosts[assignment.index]]
    return next(iter(on_other_hosts or others), None)
