"""Runs the server: opens the port, runs the engine and the HTTP thread, and handles signals."""

import logging
import socket
import threading
import time
from typing import Any

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.job.processes import signals
from praxis_lite.job.processes.logs import write_now
from praxis_tools.serve.engine import Engine
from praxis_tools.serve.requests import Limits
from praxis_tools.serve.served_model import ServedModel

LAST_SECONDS = 5  # Time limit for sending the ends of answers before the server exits.
# Maximum number of connections whose requests are neither being decoded nor in the queue.
MORE_CONNECTIONS = 256


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to a port but not listening yet.

    Raises:
      ConfigError: The port is in use, or the address does not belong to this machine.
    """
    require(0 <= port < 2**16, "--port", port, "a number from 0 (any free port) to 65535")
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except OSError as error:
        if bound is not None:
            bound.close()
        raise ConfigError(
            f"--host={host} --port={port} cannot be opened: {error.strerror or error}. Choose "
            "a different port, or 0 for any free port."
        ) from None


def serve(
    model: ServedModel,
    engine: Engine,
    listening: socket.socket,
    limits: Limits,
    drain_seconds: float,
) -> None:
    """Serves until a signal arrives, and then finishes running requests.

    This function must be called in the main thread.

    Args:
      model: The served model.
      engine: Engine that decodes the model.
      listening: Socket from `bound_socket`, which starts listening once everything is compiled.
      limits: Limits that apply to each request.
      drain_seconds: Seconds for which running requests may continue after a signal.
    """
    with (
        Running(model, engine, listening, limits) as running,
        _DrainOnSignal(engine, drain_seconds),
    ):
        _log.info(
            "ready: %s/v1 serves %s: up to %d answers at a time, each with at most %d tokens "
            "including the prompt",
            running.url,
            model.name,
            engine.num_rows,
            model.max_length,
        )
        engine.run()


class Running:
    """Context manager that serves an engine's endpoints in a separate thread.

    Entering the context compiles the engine's functions and opens the port. The caller must call
    `Engine.run`.

    Attributes:
      url: URL of the server, without a path.
    """

    def __init__(
        self, model: ServedModel, engine: Engine, listening: socket.socket, limits: Limits
    ):
        uvicorn = optional_module("uvicorn", "praxis serve")
        from praxis_tools.serve.connections import limited
        from praxis_tools.serve.endpoints import BODY_SECONDS, application

        self._engine, self._socket = engine, listening
        host, port = listening.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                application(model, engine, limits),
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                http=limited(limits.seconds, BODY_SECONDS),
                ws="none",
                timeout_graceful_shutdown=LAST_SECONDS,
                limit_concurrency=engine.num_rows + engine.max_waiting + MORE_CONNECTIONS,
            )
        )
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> "Running":
        self._engine.warm_up()
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join(LAST_SECONDS + 2)

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._engine.drain(0)  # No more requests can arrive.


class _DrainOnSignal(signals.SignalListener):
    """Drains an engine on the first signal; on a second signal, the process exits immediately."""

    def __init__(self, engine: Engine, seconds: float):
        super().__init__()
        self._engine, self._seconds = engine, seconds

    def _on_signal(self, signum: int) -> None:
        if not self._engine.is_draining:
            write_now(
                f"{signals.name(signum)}: no new requests are accepted. The server ends within "
                f"{self._seconds:g} s, after the answers in progress ({self._engine.num_in_rows}) "
                f"and in the queue ({self._engine.num_waiting})"
            )
            self._engine.drain(self._seconds)


_log = logging.getLogger(__name__)
