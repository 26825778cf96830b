"""Heartbeats between the processes of a job, by which a process learns which others are silent."""

import json
import os
from collections.abc import Mapping
from typing import Any

__all__ = ("Beats", "value_of")

_GONE = (
    "it was killed, or its host or network failed, or it is stopped, or C code keeps Python's lock "
    "(then its stacks are on its standard error)"
)


class Beats:
    """Heartbeats, sent every few seconds through JAX's coordination service.

    A beat is a JSON object: its "number", the "pid" of its process, and the values of `more`. A
    subclass can look for more than silence, such as processes that are alive but stuck.

    Args:
      seconds: between two beats.
    """

    def __init__(self, seconds: float):
        self._seconds, self._number = seconds, 0
        self._last: dict[int, dict[str, Any]] = {}
        self._num_silent: dict[int, int] = {}

    def own(self) -> str:
        """Returns the next beat of this process."""
        self._number += 1
        return json.dumps({"number": self._number, "pid": os.getpid(), **self.more()})

    def more(self) -> dict[str, Any]:
        """Returns further values of the beat, for JSON."""
        return {}

    def see(self, beats: Mapping[int, str]) -> None:
        """Takes the newest beats of other processes, once between two of this process's own.

        Silence is counted in beats of this process, not in seconds: it may have been stopped.
        """
        for process, text in beats.items():
            beat = json.loads(text)
            is_new = process not in self._last or beat["number"] != self._last[process]["number"]
            self._num_silent[process] = 0 if is_new else self._num_silent[process] + 1
            self._last[process] = beat

    def look(self, service: Any) -> int | None:
        """Called after each beat, with the client of JAX's coordination service.

        Returns:
          A process for which the job is to end, which was reported; None: the job continues.
        """
        return None

    def silent(self, process: int) -> float:
        """Returns the seconds since the newest beat of a process."""
        return self._num_silent.get(process, 0) * self._seconds

    def silent_in_words(self, process: int, seconds: float) -> str:
        """Returns as text how long a process has been silent, and possible reasons."""
        return f"has not been heard of for {seconds:.0f} s: {self.why_silent(process, seconds)}"

    def why_silent(self, process: int, seconds: float) -> str:
        """Returns possible reasons for the silence of a process, and its last known progress."""
        return _GONE


def value_of(service: Any, key: str) -> str | None:
    """Returns the value of a key of JAX's coordination service, None if there is none."""
    try:
        return service.key_value_try_get(key)
    except RuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None
