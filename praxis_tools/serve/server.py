"""A server's life: its port, the threads of the devices and of HTTP, and its end by a signal."""

import socket
import threading
import time
from typing import Any

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.job.processes import signals
from praxis_tools.serve.engine import Engine
from praxis_tools.serve.requests import Limits
from praxis_tools.serve.served_model import ServedModel

# For the last bytes of answers to reach their clients.
LAST_SECONDS = 5
# Connections in addition to those whose requests wait or are in rows.
MORE_CONNECTIONS = 256


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to the port, and accepts no connection yet.

    Raises:
      ConfigError: The port is taken, or the address is not one of this machine.
    """
    require(0 <= port < 2**16, "--port", port, "a number from 0 (a free one) to 65535")
    result = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        result = socket.socket(family, kind, protocol)
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        result.bind(address)
        return result
    except OSError as error:
        if result is not None:
            result.close()
        raise ConfigError(
            f"--host={host} --port={port} cannot be opened: {error.strerror or error}. Name "
            "another port, or 0 for a free one."
        ) from None


def serve(
    model: ServedModel, engine: Engine, listening: socket.socket, limits: Limits,
    drain_seconds: float,
) -> None:
    """Serves until a signal comes, then ends the requests under way. In the main thread.

    Args:
      listening: From `bound_socket`; opened once everything is compiled.
      drain_seconds: Time for the requests under way after a signal.
    """
    with (
        Running(model, engine, listening, limits) as running,
        _DrainsBySignal(engine, drain_seconds),
    ):
        print(
            f"ready: {running.url}/v1 serves {model.name}: {engine.num_rows} answers at a time, of "
            f"{model.max_length} tokens with their prompts", flush=True,
        )
        engine.run()


class Running:
    """Serves the endpoints of an engine in a separate thread while it is entered.

    Entering compiles the engine's programs and opens the port; the caller calls `Engine.run`.

    Attributes:
      url: Without a path.
    """

    def __init__(
        self, model: ServedModel, engine: Engine, listening: socket.socket, limits: Limits
    ):
        uvicorn = optional_module("uvicorn", "--mode=serve")
        from praxis_tools.serve.connections import limited
        from praxis_tools.serve.endpoints import BODY_SECONDS, application

        self._engine, self._socket = engine, listening
        host, port = listening.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._server = uvicorn.Server(uvicorn.Config(
            application(model, engine, limits),
            log_level="warning", access_log=False, server_header=False, lifespan="off",
            http=limited(limits.seconds, BODY_SECONDS), ws="none",
            timeout_graceful_shutdown=LAST_SECONDS,
            limit_concurrency=engine.num_rows + engine.most_waiting + MORE_CONNECTIONS,
        ))
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
            self._engine.drain(0)  # Nobody can ask any longer.


class _DrainsBySignal(signals.SignalListener):
    """Drains an engine at the first signal; the second ends the process at once."""

    def __init__(self, engine: Engine, seconds: float):
        super().__init__()
        self._engine, self._seconds = engine, seconds

    def _on_signal(self, signum: int) -> None:
        if not self._engine.is_draining:
            signals.write_line(
                f"{signals.name(signum)}: no new requests are taken; {self._engine.num_in_rows} "
                f"answers in rows and {self._engine.num_waiting} in the queue have "
                f"{self._seconds:g} s"
            )
            self._engine.drain(self._seconds)
