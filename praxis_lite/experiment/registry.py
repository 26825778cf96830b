"""Experiments by name: `--exp=lm.PyDocs` imports the module `praxis_lite.experiments.lm`."""

import importlib
import importlib.util
import inspect
import logging
import pkgutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from praxis_lite.core.callables import callable_name, imported_module
from praxis_lite.core.errors import ConfigError, did_you_mean, few, shown
from praxis_lite.host.user_errors import described

if TYPE_CHECKING:
    from praxis_lite.experiment.experiment import Experiment

__all__ = ("allowed_packages", "get_experiment", "register")

ExperimentT = TypeVar("ExperimentT", bound="type[Experiment]")

_log = logging.getLogger(__name__)

# Where the library's own experiments are.
HOME = "praxis_lite.experiments"
# The module of a notebook's cells and of scripts.
_MAIN = "__main__"

# Classes by full name.
registered: dict[str, type] = {}


def register(experiment: ExperimentT) -> ExperimentT:
    """Registers a class as `module.Class`, and returns it.

    Raises:
        ConfigError: it is not a subclass of Experiment, or another class has its name.
    """
    # Imported here, because Experiment needs fiddle and a lookup does not.
    from praxis_lite.experiment.experiment import Experiment

    if not (isinstance(experiment, type) and issubclass(experiment, Experiment)):
        raise ConfigError(
            f"@register on {experiment!r}, which is not a subclass of Experiment: write "
            "`class MyLm(Experiment):`."
        )
    key = callable_name(experiment)
    known = registered.get(key)
    if known not in (None, experiment) and not _is_interactive(experiment.__module__):
        raise ConfigError(
            f"Two classes are registered as {key}. Rename one of them, or, if the module was "
            "reloaded, start Python anew."
        )
    registered[key] = experiment
    return experiment


def allowed_packages(listed: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the packages whose experiments can be launched, and whose names a config may have.

    They are `praxis_lite.experiments`, the `listed` ones of `--packages`, those with an experiment
    that this process has registered, and in a notebook the module of its cells ("__main__").

    Raises:
        ConfigError: A listed one is not a name, is a package of Python itself, or is not on
            sys.path.
    """
    for package in listed:
        if package == _MAIN:
            continue
        if not package.isidentifier() or package in sys.stdlib_module_names:
            raise ConfigError(
                f"--packages={shown(package)} is not one of your packages; expected top-level "
                "names separated by commas, such as --packages=mypackage,other."
            )
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--packages={shown(package)}: there is no such package on sys.path (the current "
                "directory is, under `python -m praxis_lite.main`)."
            )
    others = sorted(key.partition(".")[0] for key in registered if not key.startswith(f"{HOME}."))
    others += [_MAIN] if _is_interactive(_MAIN) else []
    return tuple(dict.fromkeys([HOME, *listed, *others]))


def get_experiment(name: str, packages: Sequence[str] = ()) -> "type[Experiment]":
    """Returns the registered class that a name means; imports its module.

    If there is no such module, all modules of `praxis_lite.experiments` and `packages` are imported
    to find the class by its last name.

    Args:
        name: The full name, `mypackage.experiments.MyLm`; or without its package: `lm.PyDocs` is
            `praxis_lite.experiments.lm.PyDocs`; or only the class, `PyDocs`.
        packages: The user's packages, on sys.path.

    Raises:
        ConfigError: No experiment, or more than one, has the name; or it is not registered.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"--exp={shown(name)!r} is not the name of an experiment; expected module.Class, such "
            "as lm.PyDocs."
        )
    allowed = allowed_packages(packages)
    found = _found([name], allowed) or _found(
        [f"{package}.{name}" for package in (*allowed, "praxis_lite")], allowed
    )
    if not found:
        _import_all(allowed)
        if "." not in name:
            found = {full: item for full, item in registered.items() if full.endswith(f".{name}")}
    if not found:
        raise ConfigError(_unknown(name, allowed))
    if len(found) > 1:
        raise ConfigError(f"--exp={name} may mean {' or '.join(sorted(found))}: name one in full.")
    return found.popitem()[1]


def list_experiments(packages: Sequence[str] = ()) -> dict[str, str]:
    """Returns the first line of each experiment's docstring, or '', by the name that `--exp` takes.

    All modules of `praxis_lite.experiments` and `packages` are imported; a warning names those that
    cannot be imported.
    """
    _import_all(allowed_packages(packages))
    return {
        full.removeprefix(f"{HOME}."): inspect.cleandoc(item.__doc__ or "").partition("\n")[0]
        for full, item in sorted(registered.items())
    }


def _found(names: Sequence[str], allowed: Sequence[str]) -> "dict[str, type[Experiment]]":
    """Returns the registered classes that full names of the allowed packages mean."""
    prefixes = tuple(f"{package}." for package in allowed)
    classes = {full: _imported(full) for full in names if full.startswith(prefixes)}
    return {full: item for full, item in classes.items() if item is not None}


def _imported(full: str) -> "type[Experiment] | None":
    """Returns the registered class `module.Class`, or None if there is no such module or name."""
    module, _, class_name = full.rpartition(".")
    if full in registered:
        return registered[full]
    found = getattr(imported_module(module), class_name, None)
    if found is None or inspect.ismodule(found):
        return None
    if not any(found is item for item in registered.values()):
        raise ConfigError(
            f"{full} is {shown(repr(found))}, not a registered experiment: write `@register` (from "
            "praxis_lite import register) above a subclass of Experiment."
        )
    return found


def _import_all(packages: Sequence[str]) -> None:
    """Imports all modules of some packages; warns of those that cannot be imported."""
    left = list(packages)
    while left:
        name = left.pop()
        try:
            folders = getattr(importlib.import_module(name), "__path__", ())
        except Exception as error:
            reason = described(error) or f"{type(error).__name__}: {error}"
            _log.warning("WARNING: %s cannot be imported: %s", name, reason)
            continue
        left += [f"{name}.{item.name}" for item in pkgutil.iter_modules(list(folders))
                 if item.name != _MAIN]


def _unknown(name: str, allowed: Sequence[str]) -> str:
    known = sorted(full.removeprefix(f"{HOME}.") for full in registered)
    # A class in the wrong module is nearer than its full name looks.
    last = name.rpartition(".")[2]
    near = [full for full in known if full.rpartition(".")[2] == last]
    classes = {full.rpartition(".")[2]: full for full in known}
    hint = f" Did you mean {few(near)}?" if near else (
        did_you_mean(name.removeprefix(f"{HOME}."), known) or
        did_you_mean(last, classes) or f" There are {few(known, 7)}."
    )
    text = f"There is no experiment {shown(name)} in {', '.join(allowed)}.{hint}"
    if name.startswith(("tasks.", "paxml.", "praxis.")):
        return f"{text} That is a name in Pax: docs/coming_from_pax.md has its counterpart."
    return f"{text} --packages=mypackage adds your package."


def _is_interactive(module: str) -> bool:
    # In a notebook a cell that runs again defines its class again.
    return module == _MAIN and not hasattr(sys.modules[_MAIN], "__file__")
