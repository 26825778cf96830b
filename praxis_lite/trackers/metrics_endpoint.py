"""Serves the latest metrics of a run over HTTP for Prometheus (`--metrics_port=N`)."""

import contextlib
import dataclasses
import socket
import socketserver
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import make_wsgi_app

from praxis_lite.host.host_names import LOOPBACK_HOSTS, has_allowed_host, is_loopback
from praxis_lite.trackers.prometheus import LatestMetrics
from praxis_lite.trackers.tracker import Ending, Histogram, TrackedRun, Tracker

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 16


@dataclasses.dataclass
class MetricsEndpoint(Tracker):
    """Serves GET /metrics with the latest metrics, in Prometheus's text format.

    If the port is in use, a note is printed, and training continues without the endpoint.

    Attributes:
      port: The port. If 0, a free port is used and printed.
      host: The address to listen on. The default is reachable only from this machine. The Host
        header in requests must be a name of this machine.
      every: See `Tracker.every`.
    """

    latest_only = True

    port: int
    host: str = LOOPBACK
    every: int | None = 1

    def start(self, run: TrackedRun) -> None:
        """Starts the server."""
        self._numbers = LatestMetrics(run)
        self._server = _Server((self.host, self.port))
        self._server.set_app(_check_host(self.host, make_wsgi_app(self._numbers.registry)))
        threading.Thread(
            target=self._server.serve_forever, name="metrics endpoint", daemon=True
        ).start()
        host = f"[{self.host}]" if ":" in self.host else self.host
        run.note(f"metrics for Prometheus: http://{host}:{self._server.server_port}/metrics")

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Updates the metrics after a step or an evaluation."""
        self._numbers.add(step, scalars)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Does nothing, because each statistic of each weight would be a gauge."""

    def end(self, ending: Ending) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # For each read and write, in seconds.

    def get_environ(self) -> WSGIEnvironment:
        return {**super().get_environ(), "SERVER_ADDR": self.connection.getsockname()[0]}

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because standard output is reserved for the job's messages."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Serves each connection in a thread, and closes the oldest connection if there are too many.

    Slow clients therefore do not block other clients, and use only a few file descriptors.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: list[socket.socket] = []
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        if len(self._open) > MAX_CONNECTIONS:
            with contextlib.suppress(OSError):
                self._open.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors from clients that have closed their connections."""


def _check_host(host: str, app: WSGIApplication) -> WSGIApplication:
    """Wraps an app to respond with status 403 unless the Host header is a name of this machine."""
    names = LOOPBACK_HOSTS
    if not is_loopback(host):
        names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        known = names | {environ["SERVER_ADDR"]}
        if has_allowed_host([environ.get("HTTP_HOST", "")], known):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"The Host header is not one of {', '.join(sorted(known))}.\n".encode()]

    return checked
