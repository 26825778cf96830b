"""A proxy on loopback in front of a store's server."""

import http.client
import http.server
import socket
import struct
import threading
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple


class Request(NamedTuple):
    """A request to a store."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Server(http.server.ThreadingHTTPServer):
    # With the default of 5, clients that open many connections wait for a second.
    request_queue_size = 128


class StoreProxy:
    """Forwards requests to the server at the URL `target`.

    Attributes:
      url: URL of the proxy.
    """

    def __init__(self, target: str):
        self._target = urllib.parse.urlsplit(target).netloc
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.proxy = True, self
        self._server.handle_error = lambda *_: None  # A client closed its connection.
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, request: Request, handler: "Handler") -> None:
        """Answers a request."""
        handler.send(self.forward(request))

    def forward(self, request: Request) -> Answer:
        """Sends a request to the server."""
        connection = http.client.HTTPConnection(self._target, timeout=60)
        headers = {name: text for name, text in request.headers.items() if name.lower() != "host"}
        try:
            connection.request(request.method, request.path, request.body, headers)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()


class Handler(http.server.BaseHTTPRequestHandler):
    """Reads a request, and writes the answer that the proxy chooses."""

    protocol_version = "HTTP/1.1"
    # Otherwise each body waits 40 ms for the acknowledgement of the headers before it.
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        self.server.proxy.handle(request, self)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _handle

    def send(self, answer: Answer, *, is_truncated: bool = False) -> None:
        """Sends an answer, or only half of its body."""
        skipped = {"connection", "date", "server", "transfer-encoding"}
        has_body = self.command != "HEAD"
        if has_body:
            skipped.add("content-length")
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in skipped:
                self.send_header(name, value)
        if has_body:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if has_body:
            self.wfile.write(answer.body[: len(answer.body) // 2] if is_truncated else answer.body)
        if is_truncated:
            self.close_connection = True

    def reset(self) -> None:
        """Closes the connection with a TCP reset instead of an answer."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass
