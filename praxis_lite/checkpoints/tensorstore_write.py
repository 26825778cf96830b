"""Writes the arrays of a state to an object store with TensorStore.

Orbax cannot write to s3:// URLs. The format is that of Orbax: one OCDBT database per item, with one
Zarr array per leaf, whose chunks are shards or parts of shards. If there are several processes,
each process writes its shards to a separate database, and the first process merges the indexes of
these databases without copying data.
"""

import math
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts

from praxis_lite.checkpoints.orbax_write import CancelledWrite
from praxis_lite.checkpoints.steps.manifest import COMMIT_JSON
from praxis_lite.checkpoints.stored_arrays import ITEMS
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.host.object_stores import StorePath, kvstore_context, kvstore_of
from praxis_lite.job import processes

# Reads are of complete chunks, so large chunks would be slow to read on a different mesh.
_MAX_CHUNK_BYTES = 1 << 26
_DATA_FILE_BYTES = 1 << 28
# Matches the names of files in a process's database, relative to the step's folder.
_DATABASE = re.compile(r"[^/]+/ocdbt\.process_(\d+)/")


class _Leaf(NamedTuple):
    """An array to write.

    Attributes:
      folder: Folder of the array in the database: the leaf's path with "." instead of "/".
      spec: The array's TensorStore spec, without the database.
      shards: (index in the array, host copy) of each shard that this process writes.
    """

    folder: str
    spec: dict[str, Any]
    shards: list[tuple[tuple[slice, ...], np.ndarray]]


class TensorStoreWrite:
    """Writes a state to a new folder from all processes. Has the methods of `OrbaxWrite`.

    Args:
      folder: The new folder.
      barrier: Called twice in every process if there are several: after the process has written its
        shards, and after the first process has merged the databases.
    """

    opened = None  # Object stores need no open folder.

    def __init__(self, folder: StorePath, barrier: Callable[[], None]):
        self._folder, self._barrier = folder, barrier
        self._cancelled = threading.Event()
        # TensorStore merges only databases that were opened with the same context.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, **kvstore_context()})

    def begin(self, state: TrainState) -> None:
        """Deletes the files of an earlier save of this step, and copies the state to the host."""
        self._delete_old_files()
        for leaf in jax.tree.leaves(state):
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
        self._leaves = {
            item: [_leaf(path, leaf) for path, leaf in leaves_with_path(getattr(state, item))]
            for item in ITEMS
        }

    def _delete_old_files(self) -> None:
        """Deletes what an earlier save of this step left behind.

        Each process deletes only its own database, because the other processes may already be
        writing theirs. The first process also deletes all files outside of these databases.
        """
        count, index = processes.count(), processes.index()

        def is_removed(name: str) -> bool:
            database = _DATABASE.match(name)
            owner = int(database[1]) if database else 0
            return index == (owner if owner < count else 0)

        if processes.is_first():
            (self._folder / COMMIT_JSON).unlink()  # From now on, the folder is not a step.
        self._folder.remove_folder(is_removed)

    def wait(self) -> None:
        """Writes the arrays and returns when the folder is complete. Blocks: call it in a thread.

        Raises:
          CancelledWrite: `cancel` was called.
        """
        several = processes.count() > 1
        # If there are several processes, each writes to its own database, and `_merge` follows.
        for item, leaves in self._leaves.items():
            self._write(self._database(item, processes.index() if several else None), leaves)
        if several:
            self._barrier()
            if processes.is_first():
                for item in ITEMS:
                    self._merge(item)
            self._barrier()
        if self._cancelled.is_set():
            raise CancelledWrite

    def cancel(self) -> None:
        """Makes `wait` raise CancelledWrite. May be called from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """Releases the host copies."""
        self._leaves = {}

    def _database(self, item: str, process: int | None) -> dict[str, Any]:
        """Returns the spec of an item's database, or of the database with one process's shards."""
        folder = self._folder / item
        return {
            "driver": "ocdbt",
            "base": kvstore_of(folder if process is None else folder / f"ocdbt.process_{process}"),
            "config": {"max_inline_value_bytes": 1024},
            "target_data_file_size": _DATA_FILE_BYTES,
        }

    def _write(self, database: dict[str, Any], leaves: list[_Leaf]) -> None:
        # One transaction writes the index once, instead of once per array.
        transaction = ts.Transaction()
        leaves = [leaf for leaf in leaves if leaf.shards]
        opening = [
            ts.open(
                {**leaf.spec, "kvstore": {**database, "path": leaf.folder}},
                create=True,
                context=self._context,
                transaction=transaction,
            )
            for leaf in leaves
        ]
        writes = [
            array.result()[index].write(shard, can_reference_source_data_indefinitely=True)
            for leaf, array in zip(leaves, opening, strict=True)
            for index, shard in leaf.shards
        ]
        for write in writes:
            if self._cancelled.is_set():
                raise CancelledWrite
            write.copy.result()
        self._commit(transaction)

    def _merge(self, item: str) -> None:
        """Merges the databases of all processes into the item's database."""
        transaction = ts.Transaction(atomic=True)
        database = ts.KvStore.open(self._database(item, None), context=self._context).result()
        merged = database.with_transaction(transaction)
        for process in range(processes.count()):
            part = ts.KvStore.open(self._database(item, process), context=self._context).result()
            part.experimental_copy_range_to(merged).result()
        self._commit(transaction)

    def _commit(self, transaction: ts.Transaction) -> None:
        if self._folder.guard is not None:
            self._folder.guard()  # TensorStore's requests do not call it.
        transaction.commit_async().result()


def _leaf(path: str, leaf: jax.Array) -> _Leaf:
    shards = [
        (shard.index, np.asarray(shard.data))
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]
    spec = {
        "driver": "zarr",
        "dtype": ts.dtype(np.dtype(leaf.dtype)).name,
        "metadata": {
            "shape": leaf.shape,
            "chunks": _chunk_shape(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize),
            "compressor": {"id": "zstd", "level": 1},
        },
        # `stored_arrays` counts chunks to find missing ones.
        "store_data_equal_to_fill_value": True,
    }
    return _Leaf(f"{path.replace('/', '.')}/", spec, shards)


def _chunk_shape(shard_shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Halves the largest even dim until a chunk has at most _MAX_CHUNK_BYTES, if possible."""
    chunk = [max(1, dim) for dim in shard_shape]
    while math.prod(chunk) * itemsize > _MAX_CHUNK_BYTES and any(d % 2 == 0 for d in chunk):
        largest = max(dim for dim in chunk if dim % 2 == 0)
        chunk[chunk.index(largest)] = largest // 2
    return tuple(chunk)
