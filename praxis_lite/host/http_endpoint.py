"""A small HTTP server for numbers of this process, and the check of a request's Host.

A page of a foreign site can point its own name at this machine (DNS rebinding) and let a browser
here ask: the browser then sends that name as Host, so a server answers to its own names alone.
"""

import asyncio
import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Sequence, Set
from http import HTTPStatus

# Names of this machine for itself.
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([a-zA-Z0-9._-]+))(?::([0-9]{1,5}))?", re.ASCII)

_MOST_CONNECTIONS = 32  # Of one more the oldest is closed, so that silent ones keep nobody out.
_SECONDS = 10.0  # For a client to send its request and take the answer.
_MOST_HEAD_BYTES = 2**14


def is_loopback(host: str) -> bool:
    """Returns True for a host that other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def asks_for(host_headers: Sequence[str], names: Set[str]) -> bool:
    """Returns True if a request has exactly one Host header, and that is one of these names.

    Args:
      host_headers: the values of all Host headers of the request. A missing one, or one that is not
        NAME, ADDRESS or [IPV6] with or without a port, is no host.
      names: in lower case; IPv6 addresses without brackets, in their shortest form.
    """
    if len(host_headers) != 1:
        return False
    found = _HOST.fullmatch(host_headers[0].strip(" \t"))
    if found is None or int(found[3] or 0) >= 2**16:
        return False
    if found[1] is None:
        return found[2].lower() in names
    try:
        return str(ipaddress.IPv6Address(found[1])) in names
    except ValueError:
        return False


class HttpEndpoint:
    """Answers GET requests from one thread, with limits that no client can get around.

    At most 32 connections are open, and each is closed 10 s after it was opened.

    Args:
      host, port: to listen on. Port 0: a free one.
      respond: returns the status, the content type and the content for a path; called in the
        server's thread.

    Attributes:
      port: see above.

    Raises:
      OSError: the port is taken, or the host is none of this machine.
    """

    def __init__(self, host: str, port: int, respond: Callable[[str], tuple[int, str, bytes]]):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family)
        self.port, self._respond = self._listening.getsockname()[1], respond
        self._names = LOOPBACK_HOSTS
        if not is_loopback(host):
            self._names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        self._open: dict[asyncio.StreamWriter, None] = {}
        is_ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(is_ready)), name="http endpoint", daemon=True
        )
        self._thread.start()
        is_ready.wait()

    def close(self) -> None:
        """Closes the port and all connections."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _run(self, is_ready: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda loop, context: None)  # The output is the job's.
        server = await asyncio.start_server(
            self._serve, sock=self._listening, limit=_MOST_HEAD_BYTES
        )
        is_ready.set()
        await self._end.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_SECONDS):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    answer = _answer(431, content=b"The head of the request is too long.\n")
                else:
                    answer = self._answer(head.decode("latin-1"), writer)
                writer.write(answer)
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            pass  # The client is gone, or too slow.
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _answer(self, head: str, writer: asyncio.StreamWriter) -> bytes:
        first, *lines = head.split("\r\n")
        method, _, rest = first.partition(" ")
        target, _, version = rest.partition(" ")
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            return _answer(400, content=b"This is not an HTTP request.\n")
        fields = [line.partition(":") for line in lines]
        hosts = [value for name, _, value in fields if name.lower() == "host"]
        own = writer.get_extra_info("sockname")[0]
        if not asks_for(hosts, self._names | {own}):
            names = ", ".join(sorted(self._names | {own}))
            return _answer(403, content=f"The Host is not one of {names}.\n".encode())
        if method != "GET":
            return _answer(405, content=b"Only GET is answered.\n")
        return _answer(*self._respond(target.partition("?")[0]))


def _answer(status: int, kind: str = "text/plain; charset=utf-8", content: bytes = b"") -> bytes:
    head = (
        f"HTTP/1.0 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
