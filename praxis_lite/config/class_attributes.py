"""`--set BATCH_SIZE=32`: attributes of an experiment's class, set before it makes its config."""

import copy
import re
import types
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import fiddle as fdl

from praxis_lite.config.overrides import apply_overrides


class _Experiment(Protocol):
    def config(self) -> fdl.Config: ...


def configured(
    experiment: _Experiment, settings: Sequence[str], packages: Collection[str] = ()
) -> fdl.Config:
    """Returns the config of an experiment with the settings of `--set` applied.

    A setting whose path begins with an attribute of the class, its own or inherited, sets that one
    first, whatever the order: of this instance, so that `self.BATCH_SIZE` is what was set. All
    others are fields of the config that the experiment then makes.

    Args:
        experiment: an instance, which has the attributes from then on.
        settings: `path=value` each, see `apply_overrides`.
        packages: top-level packages whose functions and classes may be named.

    Raises:
        ConfigError: no such path, or no value of that field's type.
    """
    known = _attributes(type(experiment))
    own = [one for one in settings if _first_key(one) in known]
    named = {_first_key(one) for one in own}
    # Copies: what the class holds is every instance's.
    values = fdl.Config(_attributes_of, **copy.deepcopy({name: known[name] for name in named}))
    apply_overrides(values, own, packages)
    for name in named:
        setattr(experiment, name, getattr(values, name))
    config = experiment.config()
    apply_overrides(config, [one for one in settings if one not in own], packages, known)
    return config


def _attributes(experiment: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(experiment.__mro__):
        found |= vars(base)
    no_values = (types.FunctionType, property, classmethod, staticmethod)
    return {
        name: value for name, value in found.items()
        if not name.startswith("_") and not isinstance(value, no_values)
    }


def _attributes_of(**values):  # Without annotations: each keeps the type that it has.
    """Stands for the class."""


def _first_key(setting: str) -> str:
    return re.split(r"[.\[=]", setting, maxsplit=1)[0].strip()
