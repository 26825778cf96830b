"""Messages to and from a peer store: who may send them, and their form on the wire.

A message is a JSON object after its length; as many bytes as it specifies may follow it. Both sides
first prove that they have the job's key (HMAC-SHA256 over numbers that each draws); the traffic
after that is neither signed nor encrypted, like JAX's own.
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

from praxis_lite.job.processes.addresses import split

_VERIFY_SECONDS = 120.0  # That a store may take to read a save.
STALL_SECONDS = 30.0  # A side that sends or takes nothing for so long is given up.
_GREETING_SECONDS = 5.0
_PART_BYTES = 2**22  # Sent at a time: the time limit is one of each part.


class SaveId(NamedTuple):
    """A process's part of a save; the parts with equal generation and number are a complete state.

    Attributes:
      generation: of the elastic job that saved it.
      number: of the save, counted within the generation.
      origin: the member whose process saved it.
    """

    generation: int
    number: int
    origin: int


class StoreFailed(Exception):
    """A peer store does not answer, or refuses a request; the message names its host and why."""


def greet(connection: socket.socket, key: bytes, *, is_server: bool) -> None:
    """Proves to the other side that this side has the key, and asks for the same proof.

    Raises:
      OSError: it has another key, is silent, or slow.
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
        raise ConnectionRefusedError("the other side has another key")
    connection.settimeout(STALL_SECONDS)


def _proof(key: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(key, role + own + other, "sha256")


def _received(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(num_bytes - len(data))
        if not part or time.monotonic() > deadline:
            raise ConnectionError("the other side gave no proof of its key")
        data += part
    return data


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message."""
    data = json.dumps(message).encode()
    connection.sendall(struct.pack(">Q", len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Returns the next message; raises OSError if the other side is gone or silent."""
    length = bytearray(8)
    receive_into(connection, memoryview(length))
    (num_bytes,) = struct.unpack(">Q", length)
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return json.loads(data)


def send_bytes(connection: socket.socket, data: bytes | memoryview) -> None:
    """Sends bytes as they are."""
    view = memoryview(data)
    for start in range(0, len(view), _PART_BYTES):
        connection.sendall(view[start : start + _PART_BYTES])


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills a view with the bytes that come next."""
    while view:
        num_bytes = connection.recv_into(view[:_PART_BYTES])
        if not num_bytes:
            raise ConnectionError("the other side ended the connection")
        view = view[num_bytes:]


class StoreClient:
    """A peer store as the processes of the job see it, from any thread.

    Every method raises StoreFailed.

    Attributes:
      name: see below.

    Args:
      address: of the store, "host:port".
      key: of the job.
      name: of the store, for messages.
    """

    def __init__(self, address: str, key: bytes, name: str):
        self._address, self._key, self.name = address, key, name
        self._idle: list[socket.socket] = []

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def put(
        self, save: SaveId, header: bytes, parts: Iterable[memoryview], num_bytes: int
    ) -> None:
        """Stores a save: all of it, or nothing.

        Args:
          header: bytes that `header` returns.
          parts: its data as bytes, `num_bytes` in all.
        """
        digest = xxhash.xxh3_128(header)
        with self._asked({
            "do": "put", "save": save, "header_bytes": len(header), "num_bytes": num_bytes
        }) as (connection, _):
            send_bytes(connection, header)
            for part in parts:
                digest.update(part)
                send_bytes(connection, part)
            send_bytes(connection, digest.digest())
            self._answer(connection)

    def saves(self) -> list[SaveId]:
        """Returns the committed saves, in order."""
        with self._asked({"do": "list"}) as (_, answer):
            return [SaveId(*save) for save in answer["saves"]]

    def header(self, save: SaveId) -> bytes:
        """Returns the header of a save."""
        with self._asked({"do": "header", "save": save}) as (connection, answer):
            return self._bytes(connection, answer["num_bytes"])

    def is_undamaged(self, save: SaveId) -> bool:
        """Returns True if a save still has its digest; the store reads all of it."""
        with self._asked({"do": "verify", "save": save}, _VERIFY_SECONDS) as (_, answer):
            return answer["is_undamaged"]

    def read(self, save: SaveId, start: int, num_bytes: int) -> bytearray:
        """Returns a range of the data of a save."""
        request = {"do": "read", "save": save, "start": start, "num_bytes": num_bytes}
        with self._asked(request) as (connection, _):
            return self._bytes(connection, num_bytes)

    def drop(self, save: SaveId) -> None:
        """Drops a save; nothing happens if it is not there."""
        with self._asked({"do": "drop", "save": save}):
            pass

    @contextlib.contextmanager
    def _asked(
        self, request: dict[str, Any], seconds: float = STALL_SECONDS
    ) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
        connection = None
        try:
            connection = self._idle.pop() if self._idle else self._connected()
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
        self._idle.append(connection)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(split(self._address), _GREETING_SECONDS)
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

    def _bytes(self, connection: socket.socket, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        receive_into(connection, memoryview(data))
        return data
