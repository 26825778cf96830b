"""What must be the same on all processes of a job, compared before it costs anything."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.job import processes

__all__ = ("check_same", "versions")

_PACKAGES = ("praxis_lite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def check_same(what: str, fields: Mapping[str, Any]) -> None:
    """Checks that all processes have the same values, which JSON can hold.

    Otherwise all raise a ConfigError with two processes, their hosts, a field and its values.
    """
    if processes.count() == 1:
        return
    texts = {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}
    result = [json.loads(item) for item in processes.exchange(what, json.dumps(texts))]
    # In this process's order, then the names that only others have.
    names = dict.fromkeys(name for element in result for name in element)
    differing = [name for name in names if len({one.get(name) for one in result}) > 1]
    if not differing:
        return
    first, name = result[0].get(differing[0]), differing[0]
    other = next(k for k, one in enumerate(result) if one.get(name) != first)
    more = f" Other differences: {', '.join(differing[1:6])}." if len(differing) > 1 else ""
    raise ConfigError(
        f"{what}: {name} is {shown(first or 'absent', 200)} on {processes.name(0)} and "
        f"{shown(result[other].get(name) or 'absent', 200)} on {processes.name(other)}.{more} All "
        "processes of a job need the same: start the same command, with the same packages and "
        "files, on every host."
    )


def versions() -> dict[str, str]:
    """Returns the versions that a run's numbers may depend on, by "python" or a package's name."""
    result = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # A checkout that is not installed.
            result[package] = "not installed"
    return result
