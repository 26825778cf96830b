"""An authenticating proxy ("gate") for JAX's coordination service, which has no authentication.

The service listens on a Unix socket that only the job's user can open. The gate of the first
process accepts connections at the coordinator's address, and forwards a connection if the other
side proves that it has the job's key. The proof is an HMAC-SHA256 over random numbers from both
sides and the number of processes, and is computed by the gates of the other processes. Later
traffic is neither signed nor encrypted.

A gate is a separate process, so that it works even while C code in its parent holds the GIL. It
exits when its parent exits. This file is also the script that the gate runs, so it imports only the
standard library.
"""

import asyncio
import contextlib
import ctypes
import hmac
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

_PROOF_SECONDS = 5.0
# Maximum number of unauthenticated connections. Further connections close the oldest ones.
_MAX_UNAUTHENTICATED = 32
# Maximum time to wait for the first process's gate and for the file with the key.
_START_SECONDS = 15.0
_RETRY_SECONDS = 0.2
_CHUNK_BYTES = 2**16
# Time for which a lost connection is kept open, so that this process can exit before JAX detects
# the loss and aborts the process.
_LOST_SECONDS = 3.0

_gates: list["Gate"] = []  # Keeps the gates alive until this process exits.


class Gate:
    """A gate in a child process.

    Args:
      address: (host, port) of the coordinator. The first process listens on this address, and all
        other processes connect to it.
      key: The job's key, or a file for the key. The first process writes a new key to the file
        after it has started listening.
      num_processes: Number of processes in the job.
      is_first: Whether this is the first process of the job.

    Attributes:
      service: The address "unix:PATH" for JAX's coordination service and its clients.

    Raises:
      OSError: The port is in use, or the host is not an address of this machine.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes | Path, num_processes: int, *, is_first: bool
    ):
        folder = tempfile.mkdtemp(prefix="praxis_lite_gate_")
        if len(folder) > 80:  # The path of a Unix socket is limited to 107 bytes.
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="praxis_lite_gate_", dir="/tmp")
        path = f"{folder}/socket"
        self.service = f"unix:{path}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        file: Path | None = None
        # With a file, the first process chooses the key, and the others read it.
        if isinstance(key, Path):
            file, key = key, secrets.token_bytes(32) if is_first else b""
        settings = {
            "address": address,
            "path": path,
            "is_first": is_first,
            "key": key.hex(),
            "file": None if file is None else os.fspath(file),
            "num_processes": num_processes,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        self._stdout = self._process.stdout
        answer = self._stdout.readline().strip()
        if answer != "ready":
            raise OSError(answer or "the gate of the coordination service has failed")
        # The other processes may connect as soon as they can read the key.
        if is_first and file is not None:
            _write_key(file, key)
        _gates.append(self)

    def wait_until_lost(self) -> None:
        """Blocks until the connection to the first process is lost or the gate exits."""
        # Read without Python's buffer, whose lock must be free when Python exits.
        os.read(self._stdout.fileno(), 64)


def wait_until_lost() -> None:
    """Blocks until the connection to the first process is lost. Callable from any thread."""
    if _gates:
        _gates[-1].wait_until_lost()
    else:
        threading.Event().wait()


def _write_key(file: Path, key: bytes) -> None:
    """Writes a key to a file that only this user can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(key.hex())
    os.replace(temporary, file)


def user_folder() -> Path:
    """Returns a folder on this host that only this user can read, and creates it if needed."""
    folder = Path(f"/tmp/praxis_lite-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise OSError(
            f"{folder} belongs to another user, or is accessible to others. Remove the folder"
        )
    return folder


class _Proxy:
    """The asyncio servers and connections in a gate's process."""

    def __init__(self, settings: dict[str, Any]):
        self._address, self._path = tuple(settings["address"]), settings["path"]
        self._file, self._key = settings["file"], bytes.fromhex(settings["key"])
        self._is_first, self._num_processes = settings["is_first"], settings["num_processes"]
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}

    async def run(self) -> None:
        try:
            await self._serve()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self._path))

    async def _serve(self) -> None:
        try:
            if self._is_first:
                host, port = self._address
                await asyncio.start_server(self._accept, host, port, backlog=1024)
            else:
                await asyncio.start_unix_server(self._forward, self._path)
        except OSError as error:
            print(error.strerror or error, flush=True)
            return
        print("ready", flush=True)
        parent_ended, loop = asyncio.Event(), asyncio.get_running_loop()
        # The pipe may stay open in forked children of the parent, so a signal is used as well.
        loop.add_reader(0, parent_ended.set)
        loop.add_signal_handler(signal.SIGALRM, parent_ended.set)
        await parent_ended.wait()

    def _read_key(self) -> bytes:
        with open(self._file) as opened:
            return bytes.fromhex(opened.read())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards a connection to the service, once it is authenticated."""
        self._unauthenticated[writer] = None
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()
        try:
            await self._authenticate(reader, writer, self._key, (b"server", b"client"))
            self._unauthenticated.pop(writer, None)
            await _relay(reader, writer, *await asyncio.open_unix_connection(self._path))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._unauthenticated.pop(writer, None)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards a connection from this process to the gate of the first process."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                while (remote := await self._connect()) is None:
                    await asyncio.sleep(_RETRY_SECONDS)
            if await _relay(reader, writer, *remote):
                print("lost", flush=True)
                await asyncio.sleep(_LOST_SECONDS)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Opens an authenticated connection to the first process, or returns None on failure."""
        writer = None
        try:
            # Read the file on each attempt, because it may contain an earlier launch's key.
            key = self._key or self._read_key()
            reader, writer = await asyncio.open_connection(*self._address)
            await self._authenticate(reader, writer, key, (b"client", b"server"))
            self._key = key
            return reader, writer
        except (OSError, EOFError, TimeoutError, ValueError):
            if writer is not None:
                writer.transport.abort()
            return None

    async def _authenticate(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        key: bytes,
        roles: tuple[bytes, bytes],
    ) -> None:
        """Proves to the other side that this side has the key, and checks the other side's proof.

        Args:
          reader: Stream from the other side.
          writer: Stream to the other side.
          key: The job's key.
          roles: Names of this side and of the other side, to prevent reflection attacks.

        Raises:
          ConnectionRefusedError: The other side has a different key or number of processes.
        """
        own, num_processes = os.urandom(32), str(self._num_processes).encode()
        async with asyncio.timeout(_PROOF_SECONDS):
            writer.write(own)
            other = await reader.readexactly(32)
            writer.write(hmac.digest(key, roles[0] + own + other + num_processes, "sha256"))
            expected = hmac.digest(key, roles[1] + other + own + num_processes, "sha256")
            if not hmac.compare_digest(await reader.readexactly(32), expected):
                raise ConnectionRefusedError("the other side has a different key")


async def _relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> bool:
    """Copies bytes in both directions until one side closes its connection.

    Returns:
      Whether the other side closed the connection after it had sent data.
    """
    tasks = [
        asyncio.ensure_future(_copy(reader, other_writer)),
        asyncio.ensure_future(_copy(other_reader, writer)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[1].done() and not tasks[0].done() and tasks[1].result() > 0
    finally:
        for task in tasks:
            task.cancel()
        other_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Copies bytes until either side closes its connection, and returns the number of bytes."""
    num_bytes = 0
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            num_bytes += len(chunk)
            await writer.drain()
    return num_bytes


def _main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGALRM)  # PR_SET_PDEATHSIG.
    # Launchers send signals to all processes, but the parent decides when to exit.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    asyncio.run(_Proxy(settings).run())
    os._exit(0)


if __name__ == "__main__":
    _main()
