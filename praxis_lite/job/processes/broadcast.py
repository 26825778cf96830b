"""Decisions of the first process, sent to all processes of a job."""

import json
from collections.abc import Callable
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.job import processes

__all__ = ("from_first",)

_SECONDS = 3600.0  # That the others wait: the first may verify a large step meanwhile.


def from_first(name: str, decide: Callable[[], Any]) -> Any:
    """Returns on every process the result of `decide` on the first process, as JSON.

    Args:
      name: of what is decided; the n-th call with a name meets the n-th of the other processes.

    Raises:
      ConfigError: `decide` raised; with the same message. The first process raises its own error.
    """
    told, own_error = {}, None
    if processes.is_first():
        try:
            told = {"decided": decide()}
        except Exception as error:
            told, own_error = {"error": str(error)}, error
    told = json.loads(processes.exchange(name, json.dumps(told), _SECONDS)[0])
    if own_error is not None:
        raise own_error
    if "error" in told:
        raise ConfigError(told["error"])
    return told["decided"]
