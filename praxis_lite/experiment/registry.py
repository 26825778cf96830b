"""Registers experiments by name; `lm.PyDocs` imports `praxis_lite.experiments.lm`."""

import ast
import importlib.util
import inspect
import logging
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from praxis_lite.core.callables import callable_name, imported_module
from praxis_lite.core.errors import ConfigError, did_you_mean, first_few, shortened

if TYPE_CHECKING:
    from praxis_lite.experiment.experiment import Experiment

__all__ = ("allowed_packages", "get_experiment", "register")

ExperimentT = TypeVar("ExperimentT", bound="type[Experiment]")

_log = logging.getLogger(__name__)

# The package of the library's experiments.
HOME = "praxis_lite.experiments"
# The module in which notebook cells and scripts run.
_MAIN = "__main__"

# Registered classes, keyed by full name.
registered: dict[str, type] = {}


def register(experiment: ExperimentT) -> ExperimentT:
    """Registers a class as `module.Class`, and returns it.

    Raises:
        ConfigError: The class is not a subclass of Experiment, or its name is already registered.
    """
    # Import Experiment here, because it needs fiddle, which lookups do not need.
    from praxis_lite.experiment.experiment import Experiment

    if not (isinstance(experiment, type) and issubclass(experiment, Experiment)):
        raise ConfigError(
            f"@register is applied to {experiment!r}; expected a subclass of Experiment. Write "
            "`class MyLm(Experiment):`."
        )
    key = callable_name(experiment)
    known = registered.get(key)
    if known not in (None, experiment) and not _is_interactive(experiment.__module__):
        raise ConfigError(
            f"Two classes are registered as {key}. Rename one of them, or restart Python if the "
            "module was reloaded."
        )
    registered[key] = experiment
    return experiment


def allowed_packages(listed: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the packages whose experiments can be launched and whose names a config may use.

    These are `praxis_lite.experiments`, the packages in `listed`, packages with an experiment that
    this process has registered, and in a notebook, the module of its cells ("__main__").

    Args:
        listed: The value of --packages.

    Raises:
        ConfigError: A listed package is not a valid name, is part of Python's standard library, or
            is not on sys.path.
    """
    for package in listed:
        if package == _MAIN:
            continue
        if not package.isidentifier() or package in sys.stdlib_module_names:
            raise ConfigError(
                f"--packages={shortened(package)}: expected your own top-level packages, separated "
                "by commas, such as --packages=mypackage,other."
            )
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--packages={shortened(package)}: there is no such package on sys.path, which "
                "includes the current directory for the command `praxis`."
            )
    own = sorted(key.partition(".")[0] for key in registered if not key.startswith(f"{HOME}."))
    own += [_MAIN] if _is_interactive(_MAIN) else []
    return tuple(dict.fromkeys([HOME, *listed, *own]))


def get_experiment(name: str, packages: Sequence[str] = ()) -> "type[Experiment]":
    """Imports and returns the experiment with the given name.

    Args:
        name: Full name, such as `mypackage.experiments.MyLm`, name without its package, such as
            `lm.PyDocs` for `praxis_lite.experiments.lm.PyDocs`, or class name, such as `PyDocs`,
            of an experiment that `list_experiments` lists.
        packages: The user's packages on sys.path.

    Raises:
        ConfigError: The name does not exist or is ambiguous, or the class is not registered.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"{shortened(name)!r} is not the name of an experiment; expected module.Class, such as "
            "lm.PyDocs."
        )
    allowed = allowed_packages(packages)
    found = _found([name], allowed) or _found(
        [f"{package}.{name}" for package in (*allowed, "praxis_lite")], allowed
    )
    if not found:
        known = _summaries(allowed)
        if "." not in name:
            found = _found([full for full in known if full.endswith(f".{name}")], allowed)
    if not found:
        raise ConfigError(_unknown(name, sorted(known), allowed))
    if len(found) > 1:
        raise ConfigError(
            f"The experiment {name} may mean {' or '.join(sorted(found))}. Use one of these full "
            "names."
        )
    return found.popitem()[1]


def list_experiments(packages: Sequence[str] = ()) -> dict[str, str]:
    """Returns the first line of each experiment's docstring, keyed by the experiment's name.

    Lists the classes with the decorator `register` in `praxis_lite.experiments` and `packages`, and
    the classes that this process has registered, such as those in a notebook. Modules are parsed
    instead of imported, because their imports take seconds. Logs a warning for modules that cannot
    be parsed.
    """
    found = _summaries(allowed_packages(packages))
    return {full.removeprefix(f"{HOME}."): summary for full, summary in sorted(found.items())}


def _summaries(packages: Sequence[str]) -> dict[str, str]:
    """Returns the first docstring line of each experiment in packages, keyed by full name."""
    found = {
        full: inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        for full, cls in registered.items()
    }
    for package in packages:
        for module, file in _source_files(package):
            found |= {f"{module}.{name}": text for name, text in _registered_in(module, file)}
    return found


def _source_files(package: str) -> Iterator[tuple[str, Path]]:
    """Yields the name and the file of each module of a package, without importing it."""
    if package == _MAIN:
        return
    spec = importlib.util.find_spec(package)
    if spec is None:
        return
    if spec.origin is not None:
        yield package, Path(spec.origin)
    folders = [(package, Path(folder)) for folder in spec.submodule_search_locations or ()]
    while folders:
        parent, folder = folders.pop()
        for module in pkgutil.iter_modules([str(folder)]):
            name = f"{parent}.{module.name}"
            if module.ispkg:
                yield name, folder / module.name / "__init__.py"
                folders.append((name, folder / module.name))
            elif module.name != _MAIN:
                yield name, folder / f"{module.name}.py"


def _registered_in(module: str, file: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the first docstring line of each registered class in a file."""
    if file.suffix != ".py":
        return
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except (OSError, SyntaxError, ValueError) as error:
        _log.warning("%s cannot be parsed: %s", module, error)
        return
    for node in body:
        decorators = node.decorator_list if isinstance(node, ast.ClassDef) else ()
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(decorator).rpartition(".")[2] == "register" for decorator in decorators
        ):
            yield node.name, (ast.get_docstring(node) or "").partition("\n")[0]


def _found(names: Sequence[str], allowed: Sequence[str]) -> "dict[str, type[Experiment]]":
    """Returns the registered classes among the full names, keyed by name, in allowed packages."""
    prefixes = tuple(f"{package}." for package in allowed)
    classes = {full: _imported(full) for full in names if full.startswith(prefixes)}
    return {full: cls for full, cls in classes.items() if cls is not None}


def _imported(full: str) -> "type[Experiment] | None":
    """Imports and returns the registered class `module.Class`, or None if it does not exist."""
    module, _, class_name = full.rpartition(".")
    if full in registered:
        return registered[full]
    found = getattr(imported_module(module), class_name, None)
    if found is None or inspect.ismodule(found):
        return None
    if not any(found is cls for cls in registered.values()):
        raise ConfigError(
            f"{full} is {shortened(repr(found))}, not a registered experiment: write `@register` "
            "(from praxis_lite import register) above a subclass of Experiment."
        )
    return found


def _unknown(name: str, experiments: Sequence[str], allowed: Sequence[str]) -> str:
    """Returns the error message for an unknown experiment, with similar names."""
    known = [full.removeprefix(f"{HOME}.") for full in experiments]
    # First suggest classes with the same name in other modules.
    last = name.rpartition(".")[2]
    near = [full for full in known if full.rpartition(".")[2] == last]
    classes = {full.rpartition(".")[2]: full for full in known}
    hint = (
        f" Did you mean {first_few(near)}?"
        if near
        else (
            did_you_mean(name.removeprefix(f"{HOME}."), known)
            or did_you_mean(last, classes)
            or f" There are {first_few(known, 7)}."
        )
    )
    text = f"There is no experiment {shortened(name)} in {', '.join(allowed)}.{hint}"
    if name.startswith(("tasks.", "paxml.", "praxis.")):
        return f"{text} The name is from Pax; docs/coming_from_pax.md has its counterpart."
    return f"{text} --packages=mypackage adds your package."


def _is_interactive(module: str) -> bool:
    # In a notebook, rerunning a cell redefines its classes.
    return module == _MAIN and not hasattr(sys.modules[_MAIN], "__file__")
