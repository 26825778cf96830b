"""What the first process decides for all of a job's processes."""

import itertools
import json
from collections.abc import Callable
from typing import Any

from praxis_lite.errors import ConfigError
from praxis_lite.job import processes

# The first process may verify a large step meanwhile.
_TIMEOUT_SECONDS = 3600.0


class Decisions:
    """Tells every process what the first one decides; all ask the same, in the same order.

    Args:
      name: of these decisions, the same on all processes.
    """

    def __init__(self, name: str):
        self._name, self._numbers = name, itertools.count()

    def by_first(self, decide: Callable[[], Any]) -> Any:
        """Returns what `decide` returns on the first process, as JSON.

        Raises:
          ConfigError: with the words of what it raised there. A single process, or the first of
            several, raises that itself.
        """
        told, own_error = {}, None
        if processes.is_first():
            try:
                told = {"decided": decide()}
            except Exception as error:
                told, own_error = {"error": str(error)}, error
        name = f"{self._name}, decision {next(self._numbers)}"
        told = json.loads(processes.exchange(name, json.dumps(told), _TIMEOUT_SECONDS)[0])
        if own_error is not None:
            raise own_error
        if "error" in told:
            raise ConfigError(told["error"])
        return told["decided"]
