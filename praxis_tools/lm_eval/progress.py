"""Lines in the log while many requests are answered."""

import logging
import time

SECONDS_BETWEEN_LINES = 20.0
_log = logging.getLogger(__name__)


class Progress:
    """Logs every 20 seconds how many of the requests are done.

    Args:
      done_to: the requests as the log calls them, such as "scored".
      total: how many there are.
    """

    def __init__(self, done_to: str, total: int):
        self._done_to, self._total, self._done = done_to, total, 0
        self._began = self._last = time.monotonic()

    def add(self, count: int) -> None:
        """Counts requests that are done."""
        self._done += count
        now = time.monotonic()
        is_end = self._done == self._total and self._last > self._began  # Of several lines.
        if now - self._last >= SECONDS_BETWEEN_LINES or is_end:
            self._last = now
            _log.info(
                "%s %d of %d requests in %.0f s", self._done_to, self._done, self._total,
                now - self._began,
            )
