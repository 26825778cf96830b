"""`--set BATCH_SIZE=32`: attributes of an experiment's class, set before it makes its config."""

import copy
import re
import types
from collections.abc import Collection, Sequence
from typing import Any, Protocol, TypeVar

import fiddle as fdl

from praxis_lite.config.overrides import apply_overrides, value_at
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.user_lines import user_line

__all__ = ("value_after",)


class _Experiment(Protocol):
    def config(self) -> fdl.Config: ...


_ExperimentT = TypeVar("_ExperimentT", bound=_Experiment)


def configured(
    experiment: type[_Experiment], settings: Sequence[str], packages: Collection[str] = ()
) -> fdl.Config:
    """Returns the config of an experiment with the settings of `--set` applied.

    A setting whose path begins with an attribute of the class, its own or inherited, sets that
    attribute of an instance before the experiment makes its config; all others set fields of the
    config.

    Args:
        experiment: The class.
        settings: `path=value` each, see `apply_overrides`.
        packages: Top-level packages whose functions and classes may be named.

    Raises:
        ConfigError: There is no such path, the value has another type than the field, or the
            class's constructor requires arguments.
    """
    return experiment_and_config(experiment, settings, packages)[1]


def experiment_and_config(
    experiment: type[_ExperimentT], settings: Sequence[str], packages: Collection[str] = ()
) -> tuple[_ExperimentT, fdl.Config]:
    """Returns the instance whose attributes the settings set, and the config, as `configured`."""
    try:
        result = experiment()
    except TypeError as error:
        if user_line(error) is not None:
            raise
        raise ConfigError(
            f"{callable_name(experiment)} is built without arguments: {error}. Give __init__ "
            "defaults, or leave it out: an experiment's settings are its configs."
        ) from error
    known = _attributes(experiment)
    local = [setting for setting in settings if _first_key(setting) in known]
    # Copies, because all instances share the values of the class.
    values = copy.deepcopy({_first_key(item): known[_first_key(item)] for item in local})
    values = fdl.Config(_attributes_of, **values)
    apply_overrides(values, local, packages)
    for name, value in values.__arguments__.items():
        setattr(result, name, value)
    config = result.config()
    apply_overrides(config, [one for one in settings if one not in local], packages, known)
    return result, config


def value_after(
    experiment: type[_Experiment], settings: Sequence[str], path: str,
    packages: Collection[str] = (),
) -> Any:
    """Returns the value that a path has once the settings of `--set` are applied.

    Args:
        experiment, settings, packages: As for `configured`.
        path: Of a field of the config, or of an attribute of the class.

    Raises:
        ConfigError: As `configured`, or there is no such path.
    """
    made, config = experiment_and_config(experiment, settings, packages)
    known, name = _attributes(experiment), _first_key(path)
    if name in known:
        config = fdl.Config(_attributes_of, **{name: getattr(made, name)})
    return value_at(config, path, known)


def _attributes(experiment: type) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for base in reversed(experiment.__mro__):
        result |= vars(base)
    no_values = (types.FunctionType, property, classmethod, staticmethod)
    return {
        name: value for name, value in result.items()
        if not name.startswith("_") and not isinstance(value, no_values)
    }


def _attributes_of(**values):
    """Stands for the class; without annotations, so that each value keeps its type."""


def _first_key(setting: str) -> str:
    return re.split(r"[.\[=]", setting, maxsplit=1)[0].strip()
