"""A server that stores saves of the train state in the memory of a host.

The server runs in the supervisor, so that saves survive the death of a worker. It stores saves as
bytes without interpreting them.
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
from praxis_lite.job.processes.addresses import format_address
from praxis_tools.elastic.store_messages import (
    SaveId,
    StoreFailed,
    greet,
    receive,
    receive_into,
    send,
    send_bytes,
)

_IDLE_SECONDS = 600.0  # Maximum time between two requests on a connection.
_MAX_UNAUTHENTICATED = 32  # Maximum number of connections that have not authenticated yet.
_PART_BYTES = 2**24  # Number of bytes that are received and hashed at a time.
_MAX_MEMORY_SHARE = 0.9  # Maximum fraction of the free memory that a save may use.


@dataclasses.dataclass(frozen=True)
class _StoredSave:
    """A save in memory, which is freed once no request is reading it."""

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
    """Context manager that stores saves in memory for all processes of a job.

    One thread accepts connections, and each connection is served by a separate thread. Clients that
    know the key are trusted, and all other clients are rejected. A save is only stored once all
    bytes have arrived and match the digest.

    Args:
      key: Secret key of the job.
      host: Address to listen on; other hosts in the job connect to it.

    Attributes:
      address: "host:port" for StoreClient.
    """

    def __init__(self, key: bytes, host: str):
        self._key, self._saves, self._lock = key, dict[SaveId, _StoredSave](), threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address = format_address(host, self._listener.getsockname()[1])
        self._connections = set[socket.socket]()
        self._unauthenticated = list[socket.socket]()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="peer store", daemon=True)

    def __enter__(self) -> "PeerStore":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        _shut_down(self._listener)
        self._thread.join()
        self._listener.close()
        with self._lock:
            self._saves.clear()
            for connection in self._connections:
                _shut_down(connection)

    @property
    def num_bytes(self) -> int:
        """Total size of all stored saves, in bytes."""
        with self._lock:
            return sum(stored.num_bytes for stored in self._saves.values())

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # For example, too many files are open. Some may be closed soon.
                self._is_closed.wait(0.1)
                continue
            with self._lock:
                self._connections.add(connection)
                self._unauthenticated.append(connection)
                if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                    _shut_down(self._unauthenticated.pop(0))
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
                if connection in self._unauthenticated:
                    self._unauthenticated.remove(connection)
            while not self._is_closed.is_set():
                connection.settimeout(_IDLE_SECONDS)
                request = receive(connection)
                connection.settimeout(stall)
                try:
                    self._answer(connection, request)
                except StoreFailed as failed:
                    send(connection, {"error": str(failed)})
        except (OSError, ValueError):
            pass  # The client has disconnected or uses a different version of the protocol.
        finally:
            with self._lock:
                self._connections.discard(connection)
                if connection in self._unauthenticated:
                    self._unauthenticated.remove(connection)
            connection.close()

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        match request["do"]:
            case "put":
                self._put(
                    connection,
                    SaveId(*request["save"]),
                    request["header_bytes"],
                    request["num_bytes"],
                )
            case "list":
                with self._lock:
                    saves = sorted(self._saves)
                send(connection, {"saves": saves})
            case "header":
                header = self._find(request).header
                send(connection, {"num_bytes": len(header)})
                send_bytes(connection, header)
            case "verify":
                send(connection, {"is_undamaged": self._find(request).is_undamaged()})
            case "read":
                stored, start = self._find(request), request["start"]
                end = start + request["num_bytes"]
                if not 0 <= start <= end <= stored.num_bytes:
                    raise StoreFailed(
                        f"the requested bytes from {start} to {end} are not in the save"
                    )
                send(connection, {})
                with memoryview(stored.data) as view, view[start:end] as part:
                    send_bytes(connection, part)
            case "drop":
                with self._lock:
                    self._saves.pop(SaveId(*request["save"]), None)
                send(connection, {})
            case other:
                raise ValueError(f"unknown request {other!r}")

    def _put(
        self, connection: socket.socket, save: SaveId, header_bytes: int, num_bytes: int
    ) -> None:
        """Receives a save: the header, `num_bytes` bytes of data and the digest of both.

        Answers twice: after memory has been reserved, and after the save has been stored.
        """
        if num_bytes > _MAX_MEMORY_SHARE * (free := available_bytes()):
            raise StoreFailed(
                f"the save needs {format_bytes(num_bytes)} of memory, but only "
                f"{format_bytes(int(free))} are free"
            )
        header, digest = bytearray(header_bytes), bytearray(16)
        # Unlike heap memory, anonymous memory is returned to the system as soon as it is freed.
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
        stored = _StoredSave(bytes(header), data, num_bytes, bytes(digest))
        if actual.digest() != stored.digest:
            raise StoreFailed("the save was damaged during the transfer")
        with self._lock:
            if not self._is_closed.is_set():
                self._saves[save] = stored
        send(connection, {})

    def _find(self, request: dict[str, Any]) -> _StoredSave:
        with self._lock:
            stored = self._saves.get(SaveId(*request["save"]))
        if stored is None:
            raise StoreFailed("the save does not exist or has been dropped")
        return stored


def _shut_down(connection: socket.socket) -> None:
    """Shuts down a socket, waking the thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
