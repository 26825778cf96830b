"""A process's number, claimed on its host before JAX hears of it.

JAX's coordination service takes a second process of one number for the first one started anew, and
then aborts all processes of the job, those that run well too.
"""

import contextlib
import errno
import hashlib
import socket
import struct
import sys

from praxis_lite.core.errors import ConfigError


class ClaimedId:
    """A process's number in its job, which no other process of this host gets meanwhile.

    It is held by a socket that has a name and no file (Linux; elsewhere nothing is claimed), so
    any death gives it back. Containers with networks of their own do not see each other's.

    Raises:
      ConfigError: another process of this host has that number.
    """

    def __init__(self, coordinator: str, process_id: int):
        self._socket = None
        if sys.platform != "linux":
            return
        host, _, port = coordinator.rpartition(":")
        with contextlib.suppress(OSError, UnicodeError):  # Then the coordinator is not reached.
            host = socket.gethostbyname(host.strip("[]"))
        job = hashlib.sha256(f"{host}:{port}".encode()).hexdigest()[:32]  # A name has 107 bytes.
        name = f"\0praxis_lite/{job}/{process_id}"
        claiming = socket.socket(socket.AF_UNIX)
        try:
            claiming.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return
            raise ConfigError(
                f"--process_id={process_id} is given twice: {_holder(claiming, name)} of this host "
                f"has it already, in the job of --coordinator={coordinator}. Give each process of "
                "the job a number of its own, and start this one again."
            ) from None
        claiming.listen()
        claiming.setblocking(False)
        self._socket = claiming
        _held.append(self)

    def refused(self) -> str:
        """Returns the last process that wanted this number, such as "process 4711", or ""."""
        last = ""
        with contextlib.suppress(OSError):
            while self._socket is not None:
                last = _peer(self._socket.accept()[0])
        return last

    def release(self) -> None:
        """Gives the number back."""
        if self._socket is not None:
            self._socket.close()
            _held.remove(self)


_held: list[ClaimedId] = []  # To the end of the process.


def _holder(claiming: socket.socket, name: str) -> str:
    try:
        claiming.connect(name)
        return _peer(claiming)
    except OSError:  # It is about to listen, or has just ended.
        return "another process"


def _peer(connected: socket.socket) -> str:
    with connected:
        size = struct.calcsize("3i")
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return f"process {struct.unpack('3i', credentials)[0]}"
