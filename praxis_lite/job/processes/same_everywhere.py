"""Checks that all processes of a job have the same settings, data and package versions."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.job import processes

__all__ = ("check_same", "versions")

_PACKAGES = ("praxis_lite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def check_same(summary: str, fields: Mapping[str, Any]) -> None:
    """Checks that all processes have the same values.

    Args:
      summary: Start of the error message, such as "The processes have different data".
      fields: JSON-serializable values, keyed by name.

    Raises:
      ConfigError: A value differs. All processes raise the error, whose message contains the name
        of a field and its values in two processes.
    """
    if processes.count() == 1:
        return
    texts = {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}
    by_process = [json.loads(text) for text in processes.exchange(summary, json.dumps(texts))]
    # Names in the first process's order, followed by names that occur only in other processes.
    names = dict.fromkeys(name for values in by_process for name in values)
    differing = [name for name in names if len({values.get(name) for values in by_process}) > 1]
    if not differing:
        return
    first, name = by_process[0].get(differing[0]), differing[0]
    other = next(k for k, values in enumerate(by_process) if values.get(name) != first)
    more = f" Other differences: {', '.join(differing[1:6])}." if len(differing) > 1 else ""
    raise ConfigError(
        f"{summary}: {name} is {shortened(first or 'absent', 200)} on {processes.name(0)} and "
        f"{shortened(by_process[other].get(name) or 'absent', 200)} on "
        f"{processes.name(other)}.{more} Start the same command, with the same packages and files, "
        "on every host."
    )


def versions() -> dict[str, str]:
    """Returns the versions of Python and of packages that affect results, keyed by name."""
    by_name = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            by_name[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # A checkout that is not installed.
            by_name[package] = "not installed"
    return by_name
