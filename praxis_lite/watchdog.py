"""Says where a job hangs: stack traces when no step has ended for a set time."""

import contextlib


class Watchdog(contextlib.AbstractContextManager):
    """Reports when `step_ended` was not called for `seconds`.

    Args:
      seconds: None: never.
      exits: end the process then, status 1.
    """

    def __init__(self, seconds: float | None, *, exits: bool):
        self._seconds, self._exits = seconds, exits

    def step_ended(self, step: int) -> None:
        """Starts the clock anew."""

    def __exit__(self, *exc_info: object) -> None:
        return None
