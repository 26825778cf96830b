"""Saves of the training state in the memory of a host.

The supervisor has this memory, so it survives the death of a worker. It stores saves by their
numbers, as bytes.
"""

import contextlib
import dataclasses
import mmap
import socket
import threading
from typing import Any

import xxhash

from praxis_lite.core.errors import format_bytes
from praxis_lite.host.host_memory import available_bytes
from praxis_lite.job.processes.addresses import joined
from praxis_tools.elastic.store_messages import (
    SaveId,
    StoreFailed,
    greet,
    receive,
    receive_into,
    send,
    send_bytes,
)

_IDLE_SECONDS = 600.0  # That a connection may wait between two requests.
_MOST_STRANGERS = 32  # Connections that have not proved yet that they have the key.
_PART_BYTES = 2**24  # Taken at a time, and added to the digest.
_MOST_SHARE = 0.9  # Of the memory that is free, for a save.


@dataclasses.dataclass(frozen=True)
class _Held:
    """A save in memory, which is freed once nothing reads it."""

    header: bytes
    data: mmap.mmap
    num_bytes: int
    digest: bytes

    def is_undamaged(self) -> bool:
        digest = xxhash.xxh3_128(self.header)
        with memoryview(self.data) as view:
            digest.update(view[: self.num_bytes])
        return digest.digest() == self.digest


class PeerStore:
    """Saves in the memory of this process, for the processes of its job: a context.

    A thread takes connections; each has a separate thread, so none waits for another. A client
    that does not have the key is refused; one that has it is trusted. A save is stored once all its
    bytes have come and match their digest; an incomplete one is discarded.

    Args:
      key: of the job.
      host: the address by which the job's other hosts reach this one, on which it listens.

    Attributes:
      address: "host:port", for StoreClient.
    """

    def __init__(self, key: bytes, host: str):
        self._key, self._saves, self._lock = key, dict[SaveId, _Held](), threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address = joined(host, self._listener.getsockname()[1])
        self._connections, self._strangers = set[socket.socket](), list[socket.socket]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="peer store", daemon=True)

    def __enter__(self) -> "PeerStore":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        _end(self._listener)
        self._thread.join()
        self._listener.close()
        with self._lock:
            self._saves.clear()
            for connection in self._connections:
                _end(connection)

    @property
    def num_bytes(self) -> int:
        """Bytes of all saves that are held."""
        with self._lock:
            return sum(held.num_bytes for held in self._saves.values())

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # Such as too many open files: others may close theirs.
                self._is_over.wait(0.1)
                continue
            with self._lock:
                self._connections.add(connection)
                self._strangers.append(connection)
                if len(self._strangers) > _MOST_STRANGERS:
                    _end(self._strangers.pop(0))  # So that silent ones keep nobody out.
            threading.Thread(
                target=self._serve, args=(connection,), name="peer store's client", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            greet(connection, self._key, is_server=True)
            stall = connection.gettimeout()
            with self._lock:
                if connection in self._strangers:
                    self._strangers.remove(connection)
            while not self._is_over.is_set():
                connection.settimeout(_IDLE_SECONDS)
                request = receive(connection)
                connection.settimeout(stall)
                try:
                    self._answer(connection, request)
                except StoreFailed as failed:
                    send(connection, {"error": str(failed)})
        except (OSError, ValueError):
            pass  # The client is gone, or has another version.
        finally:
            with self._lock:
                self._connections.discard(connection)
                if connection in self._strangers:
                    self._strangers.remove(connection)
            connection.close()

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        match request["do"]:
            case "put":
                self._put(
                    connection, SaveId(*request["save"]), request["header_bytes"],
                    request["num_bytes"],
                )
            case "list":
                with self._lock:
                    saves = sorted(self._saves)
                send(connection, {"saves": saves})
            case "header":
                header = self._held(request).header
                send(connection, {"num_bytes": len(header)})
                send_bytes(connection, header)
            case "verify":
                send(connection, {"is_undamaged": self._held(request).is_undamaged()})
            case "read":
                held, start = self._held(request), request["start"]
                end = start + request["num_bytes"]
                if not 0 <= start <= end <= held.num_bytes:
                    raise StoreFailed(f"the save has no bytes from {start} to {end}")
                send(connection, {})
                with memoryview(held.data) as view, view[start:end] as part:
                    send_bytes(connection, part)
            case "drop":
                with self._lock:
                    self._saves.pop(SaveId(*request["save"]), None)
                send(connection, {})
            case other:
                raise ValueError(f"there is no {other!r}")

    def _put(
        self, connection: socket.socket, save: SaveId, header_bytes: int, num_bytes: int
    ) -> None:
        if num_bytes > _MOST_SHARE * (free := available_bytes()):
            raise StoreFailed(
                f"{format_bytes(num_bytes)} are to be held in memory, {format_bytes(int(free))} "
                "are free"
            )
        header, digest = bytearray(header_bytes), bytearray(16)
        # Anonymous memory, not the heap's: the system has it back as soon as it is dropped.
        data = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        send(connection, {})
        receive_into(connection, memoryview(header))
        actual = xxhash.xxh3_128(header)
        with memoryview(data) as view:
            for start in range(0, num_bytes, _PART_BYTES):
                part = view[start : min(start + _PART_BYTES, num_bytes)]
                receive_into(connection, part)
                actual.update(part)
        receive_into(connection, memoryview(digest))
        held = _Held(bytes(header), data, num_bytes, bytes(digest))
        if actual.digest() != held.digest:
            raise StoreFailed("the save was damaged on its way")
        with self._lock:
            if not self._is_over.is_set():
                self._saves[save] = held
        send(connection, {})

    def _held(self, request: dict[str, Any]) -> _Held:
        with self._lock:
            held = self._saves.get(SaveId(*request["save"]))
        if held is None:
            raise StoreFailed("it has no such save any more")
        return held


def _end(connection: socket.socket) -> None:
    """Wakes the thread that waits for a socket, and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
