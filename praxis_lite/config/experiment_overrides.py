"""Applies `--set` to an experiment: first to its class attributes, then to its config."""

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
    """Creates the config of an experiment and applies the settings of `--set`.

    A setting whose path starts with an attribute of the class sets that attribute on the instance
    before the config is created. All other settings set fields of the config.

    Args:
        experiment: The experiment's class.
        settings: Settings `path=value`, see `apply_overrides`.
        packages: Top-level packages whose functions and classes may be used.

    Raises:
        ConfigError: A path does not exist, a value has the wrong type, or the constructor of the
            class requires arguments.
    """
    return experiment_and_config(experiment, settings, packages)[1]


def experiment_and_config(
    experiment: type[_ExperimentT], settings: Sequence[str], packages: Collection[str] = ()
) -> tuple[_ExperimentT, fdl.Config]:
    """Returns the experiment with its attributes set, and its config; see `configured`."""
    try:
        instance = experiment()
    except TypeError as error:
        if user_line(error) is not None:
            raise
        raise ConfigError(
            f"{callable_name(experiment)} must be constructible without arguments: {error}. Add "
            "defaults to the arguments of __init__, or remove the arguments."
        ) from error
    known = _attributes(experiment)
    of_class = [setting for setting in settings if _first_key(setting) in known]
    # Copy the values, because all instances share the class's values.
    values = copy.deepcopy(
        {_first_key(setting): known[_first_key(setting)] for setting in of_class}
    )
    values = fdl.Config(_attributes_of, **values)
    apply_overrides(values, of_class, packages)
    for name, value in values.__arguments__.items():
        setattr(instance, name, value)
    config = instance.config()
    of_config = [setting for setting in settings if setting not in of_class]
    apply_overrides(config, of_config, packages, known)
    return instance, config


def value_after(
    experiment: type[_Experiment],
    settings: Sequence[str],
    path: str,
    packages: Collection[str] = (),
) -> Any:
    """Returns the value at a path after the settings of `--set` are applied.

    Args:
        experiment: The experiment's class.
        settings: Settings `path=value`, see `apply_overrides`.
        path: Path of a field of the config, or of an attribute of the class.
        packages: Top-level packages whose functions and classes may be used.

    Raises:
        ConfigError: The path does not exist, or `configured` raised the error.
    """
    instance, config = experiment_and_config(experiment, settings, packages)
    known, name = _attributes(experiment), _first_key(path)
    if name in known:
        config = fdl.Config(_attributes_of, **{name: getattr(instance, name)})
    return value_at(config, path, known)


def _attributes(experiment: type) -> dict[str, Any]:
    """Returns the public attributes of a class, including inherited ones but not methods."""
    members: dict[str, Any] = {}
    for base in reversed(experiment.__mro__):
        members |= vars(base)
    method_types = (types.FunctionType, property, classmethod, staticmethod)
    return {
        name: value
        for name, value in members.items()
        if not name.startswith("_") and not isinstance(value, method_types)
    }


def _attributes_of(**values):
    """Stands in for the callable of a config whose fields are class attributes.

    It has no annotations, so `--set` takes the type of each attribute from the attribute's current
    value.
    """


def _first_key(setting: str) -> str:
    return re.split(r"[.\[=]", setting, maxsplit=1)[0].strip()
