"""The seconds of a launch by kind; at any time the main thread is in a single kind."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from praxis_lite.run.goodput.kinds import IMPORT, OF_LAUNCH


class PhaseClock:
    """The seconds of each kind so far. They always add up to the time since the launch began.

    Args:
      began: when the launch began, in Unix seconds, which may be before now; None: now.
      kind: of the seconds from then on.
      now: seconds that never go back, and pass while the machine is awake.
      unix: Unix seconds.
      told: called with each kind that begins.

    Attributes:
      began: see above.
    """

    def __init__(
        self, began: float | None = None, kind: str = IMPORT, *,
        now: Callable[[], float] = time.monotonic, unix: Callable[[], float] = time.time,
        told: Callable[[str], None] = lambda kind: None,
    ):
        at = unix()
        self.began = at if began is None else min(began, at)
        self._now, self._told, self._lock = now, told, threading.Lock()
        self._seconds = dict.fromkeys(OF_LAUNCH, 0.0)
        self._kind, self._since = kind, now() - (at - self.began)

    def begins(self, kind: str) -> str:
        """Counts the seconds from now on for `kind`; returns the kind before."""
        with self._lock:
            at = self._now()
            self._seconds[self._kind] += at - self._since
            before, self._kind, self._since = self._kind, kind, at
        self._told(kind)
        return before

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Counts the seconds within for `kind`, but for those of another `during` within."""
        before = self.begins(kind)
        try:
            yield
        finally:
            self.begins(before)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by kind up to now; from any thread."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._kind] += self._now() - self._since
        return seconds
