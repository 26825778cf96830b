"""`--metrics_port=N`: the newest numbers of a run over HTTP, for Prometheus to fetch."""

import dataclasses
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from praxis_lite.run.trackers.prometheus_text import PrometheusText
from praxis_lite.run.trackers.tracker import Ending, TrackedRun, Tracker

LOOPBACK = "127.0.0.1"


@dataclasses.dataclass
class MetricsEndpoint(Tracker):
    """Answers GET /metrics with the newest numbers in Prometheus' text format, while a run runs.

    If the port is in use a note says so, and it is tried again; training goes on.

    Attributes:
      port: 0: a free one, which a line names.
      host: the address that it listens on. The default is reached from this machine alone.
      every: as `Tracker.every`.
    """

    newest_alone = True

    port: int
    host: str = LOOPBACK
    every: int | None = 1

    def start(self, run: TrackedRun) -> None:
        """Listens."""
        self._text = text = PrometheusText(run)
        self._lock = lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # Seconds for a client to say what it wants.

            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] in ("/metrics", "/")
                with lock:
                    content = str(text).encode() if is_known else b"Here is only /metrics.\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: object) -> None:
                """Prints nothing: the output is the job's."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            daemon_threads = True

            def handle_error(self, *request: object) -> None:
                """Prints nothing where a client went away."""

        self._server = Server((self.host, self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        host = f"[{self.host}]" if ":" in self.host else self.host
        run.note(f"metrics for Prometheus: http://{host}:{self._server.server_port}/metrics")

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the numbers."""
        with self._lock:
            self._text.add(step, scalars)

    def end(self, ending: Ending) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
