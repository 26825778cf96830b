"""Which class an experiment's name means.

Names are looked up in the source of `praxis_lite.experiments` and of the packages that the user
lists, and of no others. So a mistyped one is answered before jax is imported, and only the module
that holds the class runs.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, did_you_mean, shown
from praxis_lite.run.experiment import source_scan

if TYPE_CHECKING:
    from praxis_lite.run.experiment.experiment import Experiment

ExperimentT = TypeVar("ExperimentT", bound="type[Experiment]")

# Where the library's own experiments are.
HOME = "praxis_lite.experiments"
_LIBRARY = "praxis_lite"
# The module of a notebook's cells, and of a script.
_MAIN = "__main__"

# Classes by full name.
registered: dict[str, type] = {}


def register(experiment: ExperimentT) -> ExperimentT:
    """Registers a class as `module.Class`, and returns it.

    Raises:
        ConfigError: it is not a subclass of Experiment, or another class has its name.
    """
    # Imported here, because Experiment needs fiddle and a lookup does not.
    from praxis_lite.run.experiment.experiment import Experiment

    if not (isinstance(experiment, type) and issubclass(experiment, Experiment)):
        raise ConfigError(
            f"@register on {experiment!r}, which is not a subclass of Experiment: write "
            "`class MyLm(Experiment):`."
        )
    key = full_name(experiment)
    known = registered.get(key)
    if known not in (None, experiment) and not _is_interactive(experiment.__module__):
        raise ConfigError(
            f"Two classes are registered as {key}. Rename one of them, or, if the module was "
            "reloaded, start Python anew."
        )
    registered[key] = experiment
    return experiment


def register_anew(experiment: ExperimentT) -> ExperimentT:
    """Registers a class as `register` does, in place of another by its name: of a reloaded module.

    Raises:
        ConfigError: it is not a subclass of Experiment.
    """
    if isinstance(experiment, type):
        registered.pop(full_name(experiment), None)
    return register(experiment)


def full_name(experiment: type) -> str:
    """Returns `module.Class`: the name under which a class is registered and recorded."""
    return callable_name(experiment)


def allowed_packages(listed: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the packages in which experiments, and what configs name, may lie.

    They are `praxis_lite.experiments`, the `listed` ones of `--packages`, those with an experiment
    that this process has registered, and in a notebook what its cells define ("__main__").

    Raises:
        ConfigError: a listed one is not a name, one of Python's own packages, or not on sys.path.
    """
    for package in listed:
        if package == _MAIN:
            continue
        if not package.isidentifier() or package in sys.stdlib_module_names:
            raise ConfigError(
                f"--packages={shown(package)} is not a package of your own: wanted top-level names "
                "with commas between them, such as --packages=mypackage,other."
            )
        if not source_scan.exists(package):
            raise ConfigError(
                f"--packages={shown(package)}: there is no such package on sys.path (the current "
                "directory is, under `python -m praxis_lite.main`)."
            )
    others = sorted(key.partition(".")[0] for key in registered if not _is_in(HOME, key))
    others += [_MAIN] if _is_interactive(_MAIN) else []
    return tuple(dict.fromkeys([HOME, *listed, *others]))


def get_experiment(name: str, packages: Sequence[str] = ()) -> "type[Experiment]":
    """Returns the registered class that `name` means; imports its module and no other.

    Args:
        name: the full name, `mypackage.experiments.MyLm`; or without its package: `lm.PyDocs` is
            `praxis_lite.experiments.lm.PyDocs`, and `experiments.MyLm` one of a listed package; or
            the class alone, `PyDocs`. A short name that means two of them is refused.
        packages: of the user's own, on sys.path.

    Raises:
        ConfigError: no experiment, or more than one, has the name; or it is not registered.
    """
    if len(name) > 200 or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"--exp='{shown(name)}' is not the name of an experiment: wanted module.Class, such as "
            "lm.PyDocs."
        )
    allowed = allowed_packages(packages)
    result = _found({name}, allowed)
    if not result and "." in name:
        result = _found({f"{package}.{name}" for package in (*allowed, _LIBRARY)}, allowed)
    elif not result:
        result = _found(_with_class_name(name, allowed), allowed)
    if len(result) > 1:
        raise ConfigError(
            f"--exp={name} may mean {' or '.join(sorted(result))}: give one of these names."
        )
    if not result:
        raise ConfigError(_unknown(name, allowed, list(list_experiments(packages))))
    full, place = result.popitem()
    if isinstance(place, type):
        return place
    return _imported(full, place)


def list_experiments(packages: Sequence[str] = ()) -> dict[str, str]:
    """Returns the first line of the docstring, or '', by the name that `--exp` takes.

    Of the library's experiments, those of `packages` and those registered; in order.
    """
    listed = {
        item.name.removeprefix(f"{HOME}."): item.summary
        for package in allowed_packages(packages)
        for item in source_scan.registered_in(package)
    }
    for key, experiment in registered.items():
        listed[key.removeprefix(f"{HOME}.")] = source_scan.first_line(experiment.__doc__)
    return dict(sorted(listed.items()))


def _found(names: set[str], allowed: Sequence[str]) -> "dict[str, type | source_scan.Binding]":
    """Returns the object of each full name; names without an object are left out."""
    result = {}
    for full in names:
        is_allowed = any(_is_in(package, full) for package in allowed)
        place = registered.get(full) or (source_scan.find(full) if is_allowed else None)
        if place is not None:
            result[full] = place
    return result


def _is_in(package: str, full: str) -> bool:
    return full.startswith(f"{package}.")


def _with_class_name(name: str, allowed: Sequence[str]) -> set[str]:
    def named(places: list[source_scan.Binding]) -> set[str]:
        return {place.name for place in places if place.name.rpartition(".")[2] == name}

    names = {full for full in registered if full.rpartition(".")[2] == name}
    for package in allowed:
        names |= named(source_scan.registered_in(package))
    # If there are none, a class that lacks @register may be meant.
    return names or {full for item in allowed for full in named(source_scan.classes_of(item))}


def _imported(full: str, place: source_scan.Binding) -> "type[Experiment]":
    if place.is_registered is False:
        raise ConfigError(
            f"{full} ({place.file}, line {place.line}) is not registered: write `@register` (from "
            "praxis_lite import register) on the line above the class."
        )
    module, _, class_name = full.rpartition(".")
    experiment = getattr(importlib.import_module(module), class_name, None)
    if experiment not in registered.values():
        raise ConfigError(
            f"{full} ({place.file}) is {experiment!r} after the import, no registered experiment: "
            "wanted a subclass of Experiment under `@register` (from praxis_lite import register)."
        )
    return experiment


def _unknown(name: str, allowed: Sequence[str], known: Sequence[str]) -> str:
    short = name.removeprefix(f"{HOME}.")
    top = short.partition(".")[0]
    # A class in the wrong module is nearer than its full name looks.
    by_class = [full for full in known if full.rpartition(".")[2] == name.rpartition(".")[2]]
    near = by_class or [full for full in known if short == full.rpartition(".")[2]]
    if not near and "." not in short:  # Of one's own packages, whose full names look unlike.
        classes = {full.rpartition(".")[2]: full for full in known if not _is_in(HOME, full)}
        alike = difflib.get_close_matches(name.rpartition(".")[2], classes, cutoff=0.7)
        near = [classes[item] for item in alike]
    hint = f" Did you mean {', '.join(near[:3])}?" if near else did_you_mean(short, known)
    if not hint and known:
        hint = f" There are {', '.join(known[:7])}{', ...' if len(known) > 7 else ''}."
    where = f"the package {HOME} was" if len(allowed) == 1 else f"{', '.join(allowed)} were"
    text = f"No experiment is called {shown(name)}: {where} searched.{hint}"
    if name.startswith(("tasks.", "paxml.", "praxis.")):
        return f"{text} That is a name of Pax's: docs/coming_from_pax.md says what it is here."
    is_module = any(element.startswith(f"{top}.") for element in known)
    if "." not in name or top in (*allowed, *sys.stdlib_module_names) or is_module:
        return f"{text} Packages of your own are searched with --packages=mypackage."
    return (
        f"{text} If {shown(top)} is a package of your own, on sys.path (the current directory is, "
        f"under `python -m praxis_lite.main`), add --packages={shown(top)}."
    )


def _is_interactive(module: str) -> bool:
    # In a notebook a cell that runs again defines its class again.
    return module == _MAIN and not hasattr(sys.modules[_MAIN], "__file__")
