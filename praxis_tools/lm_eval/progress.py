"""Logs the progress of long evaluations."""

import logging
import time

SECONDS_BETWEEN_LINES = 20.0
_log = logging.getLogger(__name__)


class Progress:
    """Logs the number of finished requests every 20 seconds and at the end of long runs.

    Args:
      verb: Past participle at the start of the log line, such as "scored".
      num_requests: Total number of requests.
    """

    def __init__(self, verb: str, num_requests: int):
        self._verb, self._num_requests, self._num_done = verb, num_requests, 0
        self._started_at = self._logged_at = time.monotonic()

    def add(self, count: int) -> None:
        """Adds `count` finished requests and logs a line if one is due."""
        self._num_done += count
        now = time.monotonic()
        # Runs shorter than 20 seconds log nothing, and longer runs log a final line.
        has_logged = self._logged_at > self._started_at
        is_last_line = self._num_done == self._num_requests and has_logged
        if now - self._logged_at >= SECONDS_BETWEEN_LINES or is_last_line:
            self._logged_at = now
            _log.info(
                "%s %d of %d requests in %.0f s",
                self._verb,
                self._num_done,
                self._num_requests,
                now - self._started_at,
            )
