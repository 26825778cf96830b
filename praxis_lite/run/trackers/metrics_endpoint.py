"""`--metrics_port=N`: the newest numbers of a run over HTTP, for Prometheus to fetch."""

import dataclasses
import threading
from collections.abc import Mapping

from praxis_lite.host.http_endpoint import HttpEndpoint
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
        Requests must name this machine in their Host header.
      every: as `Tracker.every`.
    """

    newest_alone = True

    port: int
    host: str = LOOPBACK
    every: int | None = 1

    def start(self, run: TrackedRun) -> None:
        """Listens."""
        self._text, self._lock = PrometheusText(run), threading.Lock()
        self._endpoint = HttpEndpoint(self.host, self.port, self._respond)
        host = f"[{self.host}]" if ":" in self.host else self.host
        run.note(f"metrics for Prometheus: http://{host}:{self._endpoint.port}/metrics")

    def _respond(self, path: str) -> tuple[int, str, bytes]:
        if path not in ("/metrics", "/"):
            return 404, "text/plain; charset=utf-8", b"Here is only /metrics.\n"
        with self._lock:
            return 200, "text/plain; version=0.0.4; charset=utf-8", str(self._text).encode()

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the numbers."""
        with self._lock:
            self._text.add(step, scalars)

    def end(self, ending: Ending) -> None:
        """Closes the port."""
        self._endpoint.close()
