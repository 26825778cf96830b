"""Heartbeats between a job's processes, used to detect processes that no longer respond."""

import json
import os
from collections.abc import Mapping
from typing import Any

__all__ = ("Beats", "value_of")

_REASONS = (
    "it was killed, or its host or network failed, or it is stopped, or C code holds the GIL (in "
    "which case its stacks are on its standard error)"
)


class Beats:
    """Sends and receives the heartbeats of a process through JAX's coordination service.

    A heartbeat is a JSON object with its "number", the "pid" of its process, and `extra_fields`.
    Subclasses may also detect other failures, such as processes that are alive but stuck.

    Args:
      seconds: Seconds between heartbeats.
    """

    def __init__(self, seconds: float):
        self._seconds, self._number = seconds, 0
        self._last: dict[int, dict[str, Any]] = {}
        self._num_silent: dict[int, int] = {}

    def next_beat(self) -> str:
        """Returns the next heartbeat of this process."""
        self._number += 1
        return json.dumps({"number": self._number, "pid": os.getpid(), **self.extra_fields()})

    def extra_fields(self) -> dict[str, Any]:
        """Returns additional JSON fields for the heartbeat."""
        return {}

    def receive(self, beats: Mapping[int, str]) -> None:
        """Stores the latest heartbeats from other processes; called once per heartbeat sent.

        Silence is measured in heartbeats sent by this process instead of seconds, because this
        process may have been suspended.
        """
        for process, text in beats.items():
            beat = json.loads(text)
            is_new = process not in self._last or beat["number"] != self._last[process]["number"]
            self._num_silent[process] = 0 if is_new else self._num_silent[process] + 1
            self._last[process] = beat

    def check(self, service: Any) -> int | None:
        """Looks for stuck processes; called after each heartbeat.

        Args:
          service: Client of JAX's coordination service.

        Returns:
          The index of a stuck process if that process requires the job to end, or None to continue.
          A returned process has already been reported.
        """
        return None

    def silent_seconds(self, process: int) -> float:
        """Returns the seconds since the latest heartbeat from a process.

        For a process that has sent none, they count from the first heartbeat of this process.
        """
        return self._num_silent.get(process, self._number) * self._seconds

    def describe_silence(self, process: int, seconds: float) -> str:
        """Describes how long a process has been silent, and the possible reasons."""
        return f"has sent no heartbeat for {seconds:.0f} s: {self.why_silent(process, seconds)}"

    def why_silent(self, process: int, seconds: float) -> str:
        """Returns the possible reasons for the silence of a process."""
        return _REASONS


def value_of(service: Any, key: str) -> str | None:
    """Returns the value of a key in JAX's coordination service, or None if it is not set."""
    try:
        return service.key_value_try_get(key)
    except RuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None
