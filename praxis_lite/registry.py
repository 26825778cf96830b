"""Which class an experiment's name means.

Names are looked up in the source, so that a mistyped one is answered before jax is imported, and
only the module that holds the found class runs.
"""

import dataclasses
import importlib
import sys
from typing import TYPE_CHECKING, TypeVar

from praxis_lite import source_scan
from praxis_lite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from praxis_lite.experiment import Experiment

ExperimentT = TypeVar("ExperimentT", bound="type[Experiment]")

# The package whose experiments need no prefix: `lm.PyDocs` is `experiments.lm.PyDocs`.
HOME = "experiments"

_registered: dict[str, type] = {}


@dataclasses.dataclass(frozen=True)
class Listed:
    """An experiment as `--list` shows it.

    Attributes:
        name: what `--exp` takes.
        summary: the first line of the class's docstring, or ''.
    """

    name: str
    summary: str


def register(experiment: ExperimentT) -> ExperimentT:
    """Returns the class as it came, known from now on as `module.Class`.

    Raises:
        ConfigError: it is no subclass of Experiment, or another class has its name.
    """
    # Here, because Experiment needs fiddle and a lookup does not.
    from praxis_lite.experiment import Experiment

    if not (isinstance(experiment, type) and issubclass(experiment, Experiment)):
        raise ConfigError(
            f"@register on {experiment!r}, which is no subclass of Experiment: write "
            "`class MyLm(Experiment):`."
        )
    key = full_name(experiment)
    known = _registered.get(key)
    if known not in (None, experiment) and not _is_interactive(experiment.__module__):
        raise ConfigError(
            f"Two classes are registered as {key}. Rename one of them, or, if the module was "
            "reloaded, start Python anew."
        )
    _registered[key] = experiment
    return experiment


def full_name(experiment: type) -> str:
    """Returns `module.Class`: the name under which a class is registered and recorded."""
    return f"{experiment.__module__}.{experiment.__qualname__}"


def get_experiment(name: str) -> "type[Experiment]":
    """Returns the registered class that `name` means; imports its module and no other.

    Args:
        name: `lm.PyDocs` (a module of `experiments`), `experiments.lm.PyDocs`,
            `mypackage.experiments.MyLm` (a package on sys.path), or `PyDocs` where one class only
            has that name.

    Raises:
        ConfigError: no experiment, or more than one, has the name; or it is not registered.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"--exp={name!r} is no name of an experiment: wanted module.Class, such as lm.PyDocs."
        )
    names = {name, f"{HOME}.{name}"} if "." in name else _with_class_name(name)
    found = {full: place for full in names if (place := _find(full))}
    if len(found) > 1:
        raise ConfigError(
            f"--exp={name} may mean {' or '.join(sorted(found))}: give one of these names."
        )
    if not found:
        raise ConfigError(_unknown(name))
    full, place = found.popitem()
    if isinstance(place, type):
        return place
    return _imported(full, place)


def list_experiments() -> list[Listed]:
    """Returns the experiments of the `experiments` package and those registered so far, by name."""
    listed = {
        one.name.removeprefix(f"{HOME}."): one.summary for one in source_scan.registered_in(HOME)
    }
    for key, experiment in _registered.items():
        listed[key.removeprefix(f"{HOME}.")] = source_scan.first_line(experiment.__doc__)
    return [Listed(name, summary) for name, summary in sorted(listed.items())]


def _find(full: str) -> "type | source_scan.Place | None":
    if full in _registered:
        return _registered[full]
    return source_scan.find(full)


def _with_class_name(name: str) -> set[str]:
    scanned = {one.name for one in source_scan.registered_in(HOME)}
    names = {full for full in scanned | set(_registered) if full.rpartition(".")[2] == name}
    # None: a module by that name is no experiment; a class that lacks @register may be meant.
    return names or {
        one.name for one in source_scan.classes_of(HOME) if one.name.rpartition(".")[2] == name
    }


def _imported(full: str, place: source_scan.Place) -> "type[Experiment]":
    if place.is_registered is False:
        raise ConfigError(
            f"{full} ({place.file}, line {place.line}) is not registered: write `@register` (from "
            "praxis_lite import register) on the line above the class."
        )
    module, _, class_name = full.rpartition(".")
    # Whatever the user's module raises keeps its traceback: it is no question of names.
    experiment = getattr(importlib.import_module(module), class_name, None)
    if experiment not in _registered.values():
        raise ConfigError(
            f"{full} ({place.file}) is {experiment!r} after the import, no registered experiment: "
            "wanted a subclass of Experiment under `@register` (from praxis_lite import register)."
        )
    return experiment


def _unknown(name: str) -> str:
    known = [one.name for one in list_experiments()]
    top = name.partition(".")[0]
    is_package = "." in name and top != HOME and source_scan.exists(top)
    if is_package:
        # A module that was imported has registered its classes: they are listed already.
        scanned = (one.name for one in source_scan.registered_in(top))
        known += [full for full in scanned if full not in known]
    # A class in the wrong module is nearer than its full name looks.
    by_class = [full for full in known if full.rpartition(".")[2] == name.rpartition(".")[2]]
    short = name.removeprefix(f"{HOME}.")
    near = by_class or [full for full in known if short == full.rpartition(".")[2]]
    hint = f" Did you mean {', '.join(near[:3])}?" if near else did_you_mean(short, known)
    if not hint and known:
        hint = f" There are {', '.join(known[:7])}{', ...' if len(known) > 7 else ''}."
    where = f"the packages {HOME} and {top} were" if is_package else f"the package {HOME} was"
    is_place = is_package or "." not in name or any(one.startswith(f"{top}.") for one in known)
    missing = "" if is_place or top == HOME else f"; there is no package {top}"
    return (
        f"No experiment is called {name}: {where} searched{missing}.{hint} A package of your own "
        "must be on sys.path (the current directory is, under `python -m praxis_lite.main`)."
    )


def _is_interactive(module: str) -> bool:
    # In a notebook a cell that runs again defines its class again.
    return module == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
