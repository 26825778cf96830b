"""The protocol of peer stores: authentication, message format and client.

A message consists of its length, a JSON object and, optionally, raw bytes. First, both sides prove
that they know the job's key (HMAC-SHA256 over nonces from both sides). After that, messages are
neither signed nor encrypted, as in JAX's own communication.
"""

import contextlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import xxhash

from praxis_lite.job.processes.addresses import parse_address

_VERIFY_SECONDS = 120.0  # Time limit for a store to verify a save.
STALL_SECONDS = 30.0  # A connection is closed if no bytes are transferred for this long.
_GREETING_SECONDS = 5.0
_PART_BYTES = 2**22  # Number of bytes sent at a time, so that the time limit applies to each part.


class SaveId(NamedTuple):
    """Identifies one process's part of a save.

    All parts with the same generation and number form a complete state.

    Attributes:
      generation: Generation of the elastic job.
      number: Number of the save within the generation.
      origin: Number of the member that saved the part.
    """

    generation: int
    number: int
    origin: int


class StoreFailed(Exception):
    """Raised if a peer store does not answer or rejects a request."""


def greet(connection: socket.socket, key: bytes, *, is_server: bool) -> None:
    """Authenticates both sides of a connection to each other.

    Raises:
      OSError: The other side has a different key or does not answer in time.
    """
    deadline = time.monotonic() + _GREETING_SECONDS
    own = os.urandom(32)
    connection.settimeout(_GREETING_SECONDS)
    connection.sendall(own)
    other = _received(connection, 32, deadline)
    roles = (b"server", b"client") if is_server else (b"client", b"server")
    connection.sendall(_proof(key, roles[0], own, other))
    if not hmac.compare_digest(
        _received(connection, 32, deadline), _proof(key, roles[1], other, own)
    ):
        raise ConnectionRefusedError("the other side has a different key")
    connection.settimeout(STALL_SECONDS)


def _proof(key: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(key, role + own + other, "sha256")


def _received(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(num_bytes - len(data))
        if not part or time.monotonic() > deadline:
            raise ConnectionError("the other side did not authenticate")
        data += part
    return data


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message."""
    data = json.dumps(message).encode()
    connection.sendall(struct.pack(">Q", len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receives a message; raises OSError if the other side has disconnected or is silent."""
    length = bytearray(8)
    receive_into(connection, memoryview(length))
    (num_bytes,) = struct.unpack(">Q", length)
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return json.loads(data)


def send_bytes(connection: socket.socket, data: bytes | memoryview) -> None:
    """Sends raw bytes."""
    view = memoryview(data)
    for start in range(0, len(view), _PART_BYTES):
        connection.sendall(view[start : start + _PART_BYTES])


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Receives raw bytes until a memoryview is full."""
    while view:
        num_bytes = connection.recv_into(view[:_PART_BYTES])
        if not num_bytes:
            raise ConnectionError("the other side closed the connection")
        view = view[num_bytes:]


class StoreClient:
    """A client of a peer store, which may be used from any thread.

    All methods raise StoreFailed if the store does not answer or rejects the request.

    Args:
      address: "host:port" of the store.
      key: Secret key of the job.
      name: Name of the store, for messages.

    Attributes:
      name: Name of the store.
    """

    def __init__(self, address: str, key: bytes, name: str):
        self._address, self._key, self.name = address, key, name
        self._idle: list[socket.socket] = []

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def put(self, save: SaveId, header: bytes, parts: Iterable[memoryview], num_bytes: int) -> None:
        """Stores a save atomically.

        Args:
          save: Id of the save.
          header: Description of the save; returned by `StoreClient.header`.
          parts: Data of the save.
          num_bytes: Total size of `parts`.
        """
        digest = xxhash.xxh3_128(header)
        with self._request(
            {"do": "put", "save": save, "header_bytes": len(header), "num_bytes": num_bytes}
        ) as (connection, _):
            send_bytes(connection, header)
            for part in parts:
                digest.update(part)
                send_bytes(connection, part)
            send_bytes(connection, digest.digest())
            self._answer(connection)

    def saves(self) -> list[SaveId]:
        """Returns the ids of all stored saves, sorted."""
        with self._request({"do": "list"}) as (_, answer):
            return [SaveId(*save) for save in answer["saves"]]

    def header(self, save: SaveId) -> bytearray:
        """Returns the header of a save."""
        with self._request({"do": "header", "save": save}) as (connection, answer):
            return self._receive_bytes(connection, answer["num_bytes"])

    def is_undamaged(self, save: SaveId) -> bool:
        """Returns whether a save still matches its digest. The store reads the entire save."""
        with self._request({"do": "verify", "save": save}, _VERIFY_SECONDS) as (_, answer):
            return answer["is_undamaged"]

    def read(self, save: SaveId, start: int, num_bytes: int) -> bytearray:
        """Returns `num_bytes` bytes of a save's data, beginning at byte `start`."""
        request = {"do": "read", "save": save, "start": start, "num_bytes": num_bytes}
        with self._request(request) as (connection, _):
            return self._receive_bytes(connection, num_bytes)

    def drop(self, save: SaveId) -> None:
        """Drops a save if it exists."""
        with self._request({"do": "drop", "save": save}):
            pass

    @contextlib.contextmanager
    def _request(
        self, request: dict[str, Any], seconds: float = STALL_SECONDS
    ) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
        """Sends a request and yields the connection, for further transfers, and the answer."""
        connection = None
        try:
            connection = self._idle.pop() if self._idle else self._connect()
            send(connection, request)
            connection.settimeout(seconds)
            answer = self._answer(connection)
            connection.settimeout(STALL_SECONDS)
            yield connection, answer
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError | ValueError | KeyError):
                why = getattr(error, "strerror", None) or error
                raise StoreFailed(f"the store of {self.name} does not answer ({why})") from None
            raise
        # Connections are reused only if the transfer was complete.
        self._idle.append(connection)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(parse_address(self._address), _GREETING_SECONDS)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(connection, self._key, is_server=False)
        except BaseException:
            connection.close()
            raise
        return connection

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        answer = receive(connection)
        if "error" in answer:
            raise StoreFailed(f"the store of {self.name}: {answer['error']}")
        return answer

    def _receive_bytes(self, connection: socket.socket, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        receive_into(connection, memoryview(data))
        return data
