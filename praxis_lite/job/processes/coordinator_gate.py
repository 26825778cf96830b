"""An authenticating gate in front of JAX's coordination service, which has no authentication.

The service listens on a Unix socket that its user alone can open. On the first process's host a
gate takes connections to the coordinator's address, and forwards those that prove that they have
the job's key (HMAC-SHA256 over numbers that both sides draw). Each other process has its own gate,
which gives that proof. The proof is valid only between processes that were started with the same
number of processes. The traffic after it is neither signed nor encrypted.

A gate is a separate process, so that it also works while its parent holds Python's lock; it ends
with its parent. This file is its program, and imports only the standard library.
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
_MOST_STRANGERS = 32  # Connections without a proof. One more closes the oldest.
# For the first process's gate and the key's file to appear.
_START_SECONDS = 15.0
_AGAIN_SECONDS = 0.2
_PART_BYTES = 2**16
# For its process to end before JAX, which aborts it, hears that the connection is lost.
_LOST_SECONDS = 3.0

_gates: list["Gate"] = []  # Until this process ends.


class Gate:
    """A gate, which runs in a separate process.

    Args:
      address: host and port of the coordinator, to listen on in the first process, else to reach.
      key: of the job, or the file for it: the first process writes a new key there once it listens.
      num_processes: of the job.
      is_first: this is the first process of the job.

    Attributes:
      service: "unix:PATH", for JAX's service and its clients.

    Raises:
      OSError: the port is in use, or the host is not an address of this machine.
    """

    def __init__(
        self, address: tuple[str, int], key: bytes | Path, num_processes: int, *, is_first: bool
    ):
        folder = tempfile.mkdtemp(prefix="praxis_lite_gate_")
        if len(folder) > 80:  # The path of a Unix socket has 107 bytes.
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="praxis_lite_gate_", dir="/tmp")
        path = f"{folder}/socket"
        self.service = f"unix:{path}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, text=True,
        )
        file = key if isinstance(key, Path) else None
        if file is not None:
            key = secrets.token_bytes(32) if is_first else b""
        settings = {
            "address": address, "path": path, "is_first": is_first, "key": key.hex(),
            "file": None if file is None else os.fspath(file), "num_processes": num_processes,
        }
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "ready":
            raise OSError(answer or "the gate before the coordination service has failed")
        if is_first and file is not None:
            _write_key(file, key)
        _gates.append(self)

    def wait_until_lost(self) -> None:
        """Returns when the connection to the first process is lost, or this gate has ended."""
        # Not through Python's buffer, whose lock must be free when Python ends.
        os.read(self._process.stdout.fileno(), 64)


def wait_until_lost() -> None:
    """Returns when this process's connection to the first process is lost; from any thread."""
    if _gates:
        _gates[-1].wait_until_lost()
    else:
        threading.Event().wait()


def _write_key(file: Path, key: bytes) -> None:
    """Writes a key that this user alone can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(key.hex())
    os.replace(temporary, file)


def user_folder() -> Path:
    """Returns a folder of this host that this user alone can read."""
    folder = Path(f"/tmp/praxis_lite-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise OSError(f"{folder} is another user's, or open to others. Remove it")
    return folder


class _Program:
    def __init__(self, settings: dict[str, Any]):
        self._address, self._path = tuple(settings["address"]), settings["path"]
        self._file, self._key = settings["file"], bytes.fromhex(settings["key"])
        self._is_first, self._num_processes = settings["is_first"], settings["num_processes"]
        self._strangers: dict[asyncio.StreamWriter, None] = {}

    async def run(self) -> None:
        try:
            await self._serve()
        finally:
            # While the signal of the parent's death is handled; afterwards it ends this process.
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self._path))

    async def _serve(self) -> None:
        try:
            if self._is_first:
                host, port = self._address
                await asyncio.start_server(self._take, host, port, backlog=1024)
            else:
                await asyncio.start_unix_server(self._reach, self._path)
        except OSError as error:
            print(error.strerror or error, flush=True)
            return
        print("ready", flush=True)
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        # The parent has ended; forked children of it may still have the other end of the pipe.
        loop.add_reader(0, ended.set)
        loop.add_signal_handler(signal.SIGALRM, ended.set)
        await ended.wait()

    def _read_key(self) -> bytes:
        with open(self._file) as opened:
            return bytes.fromhex(opened.read())

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes a connection on to the service, once it has proved that it has the key."""
        self._strangers[writer] = None
        if len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            await self._prove(reader, writer, self._key, (b"server", b"client"))
            self._strangers.pop(writer, None)
            await _pass_on(reader, writer, *await asyncio.open_unix_connection(self._path))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._strangers.pop(writer, None)
            writer.transport.abort()

    async def _reach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes a connection of this process on to the first process's gate."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                while (there := await self._proved()) is None:
                    await asyncio.sleep(_AGAIN_SECONDS)
            if await _pass_on(reader, writer, *there):
                print("lost", flush=True)
                await asyncio.sleep(_LOST_SECONDS)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.transport.abort()

    async def _proved(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        writer = None
        try:
            # The file may be that of a launch before: it is read until its key is the right one.
            key = self._key or self._read_key()
            reader, writer = await asyncio.open_connection(*self._address)
            await self._prove(reader, writer, key, (b"client", b"server"))
            self._key = key
            return reader, writer
        except (OSError, EOFError, TimeoutError, ValueError):
            if writer is not None:
                writer.transport.abort()
            return None


    async def _prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes,
        roles: tuple[bytes, bytes],
    ) -> None:
        own, num_processes = os.urandom(32), str(self._num_processes).encode()
        async with asyncio.timeout(_PROOF_SECONDS):
            writer.write(own)
            other = await reader.readexactly(32)
            writer.write(hmac.digest(key, roles[0] + own + other + num_processes, "sha256"))
            expected = hmac.digest(key, roles[1] + other + own + num_processes, "sha256")
            if not hmac.compare_digest(await reader.readexactly(32), expected):
                raise ConnectionRefusedError("the other side has another key")


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader, other_writer: asyncio.StreamWriter,
) -> bool:
    """Passes bytes on in both directions until one side ends.

    Returns True if it was the other side, after it had sent something.
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
    """Returns how many bytes were copied until a side ended."""
    num_bytes = 0
    with contextlib.suppress(OSError):
        while part := await reader.read(_PART_BYTES):
            writer.write(part)
            num_bytes += len(part)
            await writer.drain()
    return num_bytes


def _main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGALRM)  # PR_SET_PDEATHSIG.
    # A launcher's signals are for the parent.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    asyncio.run(_Program(settings).run())
    os._exit(0)


if __name__ == "__main__":
    _main()
