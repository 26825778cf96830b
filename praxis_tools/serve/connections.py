"""HTTP connections with deadlines, so that silent or slow clients are disconnected."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# Maximum number of connections without a complete request. If there are more, the oldest is closed.
MAX_WAITING_CONNECTIONS = 128
# Time limit for the head of a request, starting from the connection or the previous answer.
HEAD_SECONDS = 10.0
# Time limit for a client to read some data once the buffers are full.
STALL_SECONDS = 30.0
_LAST_SECONDS = 60.0  # Additional time limit for reading the end of an answer.
_CHECK_SECONDS = 1.0


def limited(request_seconds: float, body_seconds: float) -> type[asyncio.Protocol]:
    """Returns a subclass of uvicorn's protocol class that enforces deadlines.

    Args:
      request_seconds: Maximum time to answer a request.
      body_seconds: Maximum time for a client to send a request body.
    """

    class Protocol(_DeadlineProtocol):
        max_answer_seconds = request_seconds + _LAST_SECONDS
        max_body_seconds = body_seconds + HEAD_SECONDS

    return Protocol


# The protocol class is chosen when uvicorn is imported, so for mypy it is a variable.
class _DeadlineProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    max_answer_seconds = max_body_seconds = float("inf")

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # (current request and answer, `is_waiting()`) and the time at which this pair last changed.
        self._state: tuple[Any, bool] | None = None
        self._since = self._writable_at = self.loop.time()
        waiting = [
            connection
            for connection in self.connections
            if connection.is_waiting() and not connection.transport.is_closing()
        ]
        if len(waiting) > MAX_WAITING_CONNECTIONS:
            min(waiting, key=lambda connection: connection._since).transport.abort()
        self._check_deadlines()

    def is_waiting(self) -> bool:
        """Returns whether the client has not sent a complete request yet."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _check_deadlines(self) -> None:
        """Closes the connection if a deadline has passed, otherwise checks again in a second."""
        if self not in self.connections:
            return
        # `self.cycle` is the current or last request and its answer.
        state, now = (self.cycle, self.is_waiting()), self.loop.time()
        if state != self._state:
            self._state, self._since = state, now
        if not self.flow.write_paused:
            self._writable_at = now
        if not self.is_waiting():
            seconds = self.max_answer_seconds
        elif self.cycle is None or self.cycle.response_complete:
            seconds = HEAD_SECONDS
        else:
            seconds = self.max_body_seconds
        if now - self._since > seconds or now - self._writable_at > STALL_SECONDS:
            self.transport.abort()
        else:
            self.loop.call_later(_CHECK_SECONDS, self._check_deadlines)
