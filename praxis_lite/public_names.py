"""Imports a package's public names lazily. docs/api.md lists these names.

A package's stub `__init__.pyi` specifies the module that defines each public name. With this line
in the package's `__init__.py`, a name is imported when it is first used:

    __getattr__, __dir__, __all__ = public_names(__name__)

For example, `from praxis_lite.layers import Linear` imports one file instead of
a hundred, and `import praxis_lite` does not import jax. Type checkers and editors use the same
stub.
"""

import ast
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ("public_names",)

PACKAGES = (
    "praxis_lite",
    "praxis_lite.core",
    "praxis_lite.core.xla_workarounds",
    "praxis_lite.core.collectives",
    "praxis_lite.layers",
    "praxis_lite.optimizers",
    "praxis_lite.optimizers.schedules",
    "praxis_lite.models",
    "praxis_lite.decode",
    "praxis_lite.inputs",
    "praxis_lite.inputs.numpy_data",
    "praxis_lite.inputs.tf_data",
    "praxis_lite.inputs.tokenizers",
    "praxis_lite.modes",
    "praxis_lite.tasks.image_classification",
    "praxis_lite.tasks.language_model",
    "praxis_lite.tasks.loss",
    "praxis_lite.tasks.preference",
    "praxis_lite.tasks.sequence_to_sequence",
    "praxis_lite.experiments.classify",
    "praxis_lite.experiments.explicit",
    "praxis_lite.experiments.finetune",
    "praxis_lite.experiments.functions",
    "praxis_lite.experiments.huggingface",
    "praxis_lite.experiments.linen",
    "praxis_lite.experiments.linen_models",
    "praxis_lite.experiments.lm",
    "praxis_lite.experiments.moe",
    "praxis_lite.experiments.nnx_guide",
    "praxis_lite.experiments.pipelined",
    "praxis_lite.experiments.python_texts",
    "praxis_lite.experiments.seq2seq",
    "praxis_lite.experiments.vision",
    "praxis_lite.huggingface",
    "praxis_lite.checkpoints.nnx",
    "praxis_lite.pax",
    "praxis_tools.check",
    "praxis_tools.lm_eval",
)

# Deprecated public names and their replacements, as in
#
#     {"praxis_lite.layers.Linear": "praxis_lite.layers.Dense"}
#
# A name in this table works in Python, in --set and in config.json. It is not a public name, but
# the package's stub still contains it (`import Dense as Linear`), for type checkers. A package
# without a stub needs `__getattr__ = functools.partial(replacement_of, __name__)`. Entries are
# removed in the next major version only, because every config.json of this major version must load.
DEPRECATED: dict[str, str] = {}


def current_name(package: str, name: str) -> tuple[str, str]:
    """Returns the package and the name that replace a deprecated name; other names unchanged.

    The name may contain attributes, as in `WeightInit.Xavier`.
    """
    first, dot, attributes = name.partition(".")
    replacement = DEPRECATED.get(f"{package}.{first}")
    if replacement is None:
        return package, name
    new_package, _, new_name = replacement.rpartition(".")
    return new_package, f"{new_name}{dot}{attributes}"


def warn_deprecated(package: str, name: str, stacklevel: int = 1) -> None:
    """Warns that a name is deprecated, and names its replacement."""
    new = ".".join(current_name(package, name))
    # Python hides DeprecationWarning outside of __main__, and experiments are imported.
    warnings.warn(
        f"{package}.{name} is deprecated: use {new} instead (see CHANGELOG.md).",
        FutureWarning,
        stacklevel=stacklevel + 1,
    )


def replacement_of(package: str, name: str, stacklevel: int = 1) -> Any:
    """Returns the replacement of a deprecated name, with a warning at the caller's line.

    Raises:
      AttributeError: The name is not deprecated.
    """
    new_package, new_name = current_name(package, name)
    if (new_package, new_name) == (package, name):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    warn_deprecated(package, name, stacklevel + 1)
    return getattr(importlib.import_module(new_package), new_name)


def homes_of(package: str) -> dict[str, str]:
    """Returns the module that defines each public name of a package, without importing it.

    Public names are the names imported in the package's stub `__init__.pyi` or, if there is no
    stub, the names in its `__all__`, except deprecated names.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, package
    file = Path(spec.origin)
    stub = file.with_suffix(".pyi")
    body = ast.parse((stub if stub.is_file() else file).read_text(encoding="utf-8")).body
    imported = {
        alias.asname or alias.name: node.module
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if f"{package}.{alias.asname or alias.name}" not in DEPRECATED
    }
    if stub.is_file():
        return imported
    names = next(
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name: imported.get(name, package) for name in names}


def public_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns the `__getattr__`, `__dir__` and `__all__` for a package that has a stub.

    Each line of the stub is `from MODULE import NAME as NAME`.
    """
    homes = homes_of(package)

    def load(name: str) -> Any:
        if name not in homes:
            return replacement_of(package, name, stacklevel=2)
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return load, lambda: sorted(homes), sorted(homes)
