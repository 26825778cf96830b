"""When a job is asked to end: by a signal, or by its time limit."""

import contextlib


class StopRequest(contextlib.AbstractContextManager):
    """Listens for SIGTERM, SIGINT and a time limit while it is entered.

    Attributes:
      reason: what asked for the end, such as "SIGTERM"; None: nothing has.
    """

    def __init__(self, time_limit_seconds: float | None = None):
        self._time_limit_seconds = time_limit_seconds
        self.reason: str | None = None

    def __exit__(self, *exc_info: object) -> None:
        return None

    def training_begins(self) -> None:
        """From now on there is something to save: before, the first signal ends the process."""
