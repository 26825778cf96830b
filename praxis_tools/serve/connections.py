"""uvicorn's HTTP connections with deadlines, so that silent or slow clients are closed."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# Connections without a complete request. If there are more, the oldest is closed.
MOST_WAITING = 128
# For a client to send the head of its request, from the connection or the answer before.
HEAD_SECONDS = 10.0
# For a client to read some of an answer that fills the buffers.
STALL_SECONDS = 30.0
_LAST_SECONDS = 60.0  # To read the end of an answer.
_LOOK_SECONDS = 1.0


def limited(request_seconds: float, body_seconds: float) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol with deadlines.

    Args:
      request_seconds: the longest time that an answer may take.
      body_seconds: for a client to send the body of a request.
    """

    class Limited(_Limited):
        most_seconds = request_seconds + _LAST_SECONDS
        most_body_seconds = body_seconds + HEAD_SECONDS

    return Limited


class _Limited(AutoHTTPProtocol):
    most_seconds = most_body_seconds = float("inf")

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._state, self._since, self._writable_at = None, self.loop.time(), self.loop.time()
        waiting = [
            one for one in self.connections if one.waits() and not one.transport.is_closing()
        ]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda one: one._since).transport.abort()
        self._look()

    def waits(self) -> bool:
        """Returns True while the client has not sent a complete request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _look(self) -> None:
        if self not in self.connections:
            return
        # A cycle is a request with its answer; the last one stays until the next.
        state, now = (self.cycle, self.waits()), self.loop.time()
        if state != self._state:
            self._state, self._since = state, now
        if not self.flow.write_paused:
            self._writable_at = now
        if not self.waits():
            seconds = self.most_seconds
        elif self.cycle is None or self.cycle.response_complete:
            seconds = HEAD_SECONDS
        else:
            seconds = self.most_body_seconds
        if now - self._since > seconds or now - self._writable_at > STALL_SECONDS:
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_SECONDS, self._look)
