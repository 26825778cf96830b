"""Restricts the names that a config may contain, so that an untrusted config.json is safe to load.

When a config.json is loaded, each `module:name` in it is imported and called. Therefore, names are
only allowed if they are in a package that the user has listed, or refer to classes and functions
without side effects.
"""

import sys
import types
from collections.abc import Collection
from typing import Any

from praxis_lite.config.literals import is_dtype
from praxis_lite.core.errors import shortened
from praxis_lite.public_names import homes_of

# Functions in these packages have no side effects. Functions in other public packages may read
# files, start devices or change global state, so a config may contain only classes from these
# packages.
_FUNCTIONS_OF = (
    "praxis_lite.layers",
    "praxis_lite.models",
    "praxis_lite.optimizers",
    "praxis_lite.optimizers.schedules",
)
_PURE_FUNCTIONS = {"constrain", "pax_outputs"}

# The public names of the library, which stay the same if files are moved. If several packages
# export an object, the name in the first of these packages is written.
PUBLIC = {
    package: frozenset(
        name
        for name in homes_of(package)
        if name != "Checkpoints"
        and (name[0].isupper() or package in _FUNCTIONS_OF or name in _PURE_FUNCTIONS)
    )
    for package in (
        "praxis_lite",
        "praxis_lite.core.collectives",
        "praxis_lite.core",
        "praxis_lite.decode",
        "praxis_lite.inputs",
        "praxis_lite.inputs.numpy_data",
        "praxis_lite.inputs.tf_data",
        *_FUNCTIONS_OF,
    )
}

# In these packages, only scalar types, ufuncs and jitted functions are allowed, because other
# functions may read and write files.
ARRAY_LIBRARIES = ("jax.numpy", "numpy")
# In these packages, only subclasses of Module are allowed.
LAYER_LIBRARIES = ("flax.linen", "flax.nnx")
LIBRARIES = (
    "jax.nn",
    "optax",
    "jax.lax",
    "jax.nn.initializers",
    "jax.checkpoint_policies",
    "optax.contrib",
    *ARRAY_LIBRARIES,
    *LAYER_LIBRARIES,
)

BUILTINS = ("bool", "dict", "float", "frozenset", "int", "list", "set", "slice", "str", "tuple")


def is_allowed(module: str, name: str, packages: Collection[str]) -> bool:
    """Returns whether a config may contain `module:name`, without importing it."""
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
    """Returns whether the type of an object from a module is allowed in a config."""
    if module in ARRAY_LIBRARIES:
        import jax.numpy
        import numpy

        functions = numpy.ufunc | jax.numpy.ufunc | type(jax.numpy.tanh)
        return is_dtype(value) or isinstance(value, functions)
    if module in LAYER_LIBRARIES:
        return isinstance(value, type) and issubclass(value, sys.modules[module].Module)
    return not isinstance(value, types.ModuleType)


def not_allowed_message(where: str, module: str, name: str) -> str:
    """Returns the error message for a name that is not allowed in a config."""
    if module == "__main__":
        return (
            f"{where} contains {shortened(f'{module}.{name}')}, which was defined in a notebook or "
            "script and is available only there. Define it, and call praxis_lite.load(DIR, "
            "packages=['__main__']). For `praxis eval` and other processes, define it in a module "
            "of your package, train from there, and add --packages=PACKAGE."
        )
    top = module.partition(".")[0]
    is_own = top not in ("builtins", "praxis_lite", *sys.stdlib_module_names) and not any(
        library.partition(".")[0] == top for library in LIBRARIES
    )
    hint = "Wrap it in a function or class in your package."
    if is_own:
        hint = f"If {shortened(top)} is your package, add --packages={shortened(top)}."
    elif top == "praxis_lite":
        hint = f"docs/api.md lists the public names. {hint}"
    return (
        f"{where} contains {shortened(f'{module}.{name}')}, which is not allowed in a config. "
        "Allowed are names in the packages of --packages; public names of praxis_lite, its "
        "experiments and tasks; functions of jax.nn, jax.lax and optax; scalar types, ufuncs and "
        f"jitted functions of jax.numpy and numpy; and layers of flax. {hint}"
    )
