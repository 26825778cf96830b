"""The names that a config may have: classes and functions that compute, and the user's packages.

`module:name` in a job's config.json becomes an import and then a call, so a third-party config
must not run code of packages that the user did not list.
"""

import sys
import types
from collections.abc import Collection
from typing import Any

from praxis_lite.config.values import is_dtype
from praxis_lite.core.errors import shown
from praxis_lite.public_names import homes_of

# Functions of these packages only compute. Those of other public packages read files, start devices
# or change global state, so a config may name only their classes.
_FUNCTIONS_OF = (
    "praxis_lite.layers", "praxis_lite.models", "praxis_lite.optimizers",
    "praxis_lite.optimizers.schedules",
)
_PURE_FUNCTIONS = {"constrain", "pax_outputs"}

# The library's public names: files move, these stay. If two packages export the same object, the
# name of the first one is written.
PUBLIC = {
    package: frozenset(
        name for name in homes_of(package) if name != "Checkpoints" and
        (name[0].isupper() or package in _FUNCTIONS_OF or name in _PURE_FUNCTIONS)
    )
    for package in (
        "praxis_lite", "praxis_lite.core.collectives", "praxis_lite.core", "praxis_lite.decode",
        "praxis_lite.inputs", "praxis_lite.inputs.numpy_data", "praxis_lite.inputs.tf_data",
        *_FUNCTIONS_OF,
    )
}

# Only scalar types, ufuncs and jitted functions: their other functions read and write files.
ARRAY_LIBRARIES = ("jax.numpy", "numpy")
# Only subclasses of their Module.
LAYER_LIBRARIES = ("flax.linen", "flax.nnx")
LIBRARIES = (
    "jax.nn", "optax", "jax.lax", "jax.nn.initializers", "jax.checkpoint_policies",
    "optax.contrib", *ARRAY_LIBRARIES, *LAYER_LIBRARIES,
)

BUILTINS = ("bool", "dict", "float", "frozenset", "int", "list", "set", "slice", "str", "tuple")


def is_allowed(module: str, name: str, packages: Collection[str]) -> bool:
    """Returns True if a config may name `module:name`; imports nothing."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in (*parts, *module.split("."))):
        return False
    if any(part.startswith("__") for part in parts):
        return False
    if module == "builtins":
        return name in BUILTINS
    if module in LIBRARIES or module in PUBLIC:
        is_public = not any(part.startswith("_") for part in parts)
        return is_public and parts[0] in PUBLIC.get(module, parts)
    top = module.partition(".")[0]
    is_ours = module.startswith(("praxis_lite.tasks.", "praxis_lite.experiments."))
    return is_ours or (top in packages and top not in ("praxis_lite", "praxis_tools"))


def is_of_kind(module: str, value: Any) -> bool:
    """Returns True if an object of a module is of a kind that a config may hold."""
    if module in ARRAY_LIBRARIES:
        import jax.numpy
        import numpy

        functions = numpy.ufunc | jax.numpy.ufunc | type(jax.numpy.tanh)
        return is_dtype(value) or isinstance(value, functions)
    if module in LAYER_LIBRARIES:
        return isinstance(value, type) and issubclass(value, sys.modules[module].Module)
    return not isinstance(value, types.ModuleType)


def refused(where: str, module: str, name: str) -> str:
    """Returns the error message for a name that a config may not have."""
    if module == "__main__":
        return (
            f"{where} names {shown(f'{module}.{name}')}, which a notebook or a script defined, and "
            "which only that can use: define it, and call praxis_lite.load(DIR, "
            "packages=['__main__']). For --mode=eval and other processes define it in a module of "
            "your package, train from there, and name the package with --packages."
        )
    top = module.partition(".")[0]
    is_own = top not in ("builtins", "praxis_lite", *sys.stdlib_module_names) and not any(
        library.partition(".")[0] == top for library in LIBRARIES
    )
    hint = "Wrap it in a function or class in your package."
    if is_own:
        hint = f"If {shown(top)} is your package, add --packages={shown(top)}."
    elif top == "praxis_lite":
        hint = f"docs/api.md lists the public names. {hint}"
    return (
        f"{where} names {shown(f'{module}.{name}')}, and a config may name only what is defined in "
        "the packages given by --packages; public names of praxis_lite, its experiments and tasks; "
        "functions of jax.nn, jax.lax and optax; scalar types, ufuncs and jitted functions of "
        "jax.numpy and numpy; and layers of flax. "
        f"{hint}"
    )
