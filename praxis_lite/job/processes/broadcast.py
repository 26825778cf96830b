"""Broadcasts values from the first process of a job to all other processes."""

import json
from collections.abc import Callable
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.job import processes

__all__ = ("from_first",)

# Timeout for the other processes. It is long, because the first process may verify a large
# checkpoint.
_TIMEOUT_SECONDS = 3600.0


def from_first(name: str, decide: Callable[[], Any]) -> Any:
    """Calls `decide` in the first process and returns its result in all processes.

    Args:
      name: Name of the decision. The n-th calls with the same name in all processes are matched.
      decide: Function that returns a JSON-serializable value.

    Returns:
      The result, after a round trip through JSON.

    Raises:
      ConfigError: `decide` raised an exception with this message in the first process. The first
        process itself raises the original exception instead.
    """
    message, own_error = {}, None
    if processes.is_first():
        try:
            message = {"decided": decide()}
        # The other processes wait for a message, so errors are sent as well.
        except Exception as error:
            message, own_error = {"error": str(error)}, error
    message = json.loads(processes.exchange(name, json.dumps(message), _TIMEOUT_SECONDS)[0])
    if own_error is not None:
        raise own_error
    if "error" in message:
        raise ConfigError(message["error"])
    return message["decided"]
