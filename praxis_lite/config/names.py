"""What a config may name: decided from the words alone, and checked again once imported.

`module:name` in a config.json becomes an import and then a call, and a job's directory may come
from anyone: so only what stands here may be named.
"""

import enum
import importlib
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

from praxis_lite.config.values import is_dtype
from praxis_lite.errors import ConfigError, shown

# The library's public names: files move, these stay. Of two packages that show one thing, the first
# is written. No function of these writes a file.
PUBLIC = (
    "praxis_lite",
    "praxis_lite.decode",
    "praxis_lite.inputs",
    "praxis_lite.inputs.numpy_data",
    "praxis_lite.inputs.tf_data",
    "praxis_lite.layers",
    "praxis_lite.learner",
    "praxis_lite.learner.optimizers",
    "praxis_lite.learner.schedules",
    "praxis_lite.models",
    "praxis_lite.partitioner",
    "praxis_lite.sharding",
)

# Actions, which a file may not begin.
_ACTIONS = {("praxis_lite", "TrainedModel"), ("praxis_lite", "load"), ("praxis_lite", "register")}

# Everything public that is defined in them.
WHOLE_LIBRARIES = (
    "jax.nn",
    "jax.nn.initializers",
    "jax.lax",
    "jax.checkpoint_policies",
    "optax",
    "optax.contrib",
)
# Only scalar types, ufuncs and jitted functions: their other functions read and write files.
ARRAY_LIBRARIES = ("jax.numpy", "numpy")
# Only subclasses of their Module.
LAYER_LIBRARIES = ("flax.linen", "flax.nnx")
LIBRARIES = WHOLE_LIBRARIES + ARRAY_LIBRARIES + LAYER_LIBRARIES

# Everything that is defined in them, as in the packages that a user lists.
PACKAGES = ("praxis_lite.tasks", "praxis_lite.experiments")

# Where a bare name behind --set is looked up.
SHORT = (
    "praxis_lite.layers",
    "praxis_lite.learner.optimizers",
    "praxis_lite.learner.schedules",
    "praxis_lite.decode",
    "praxis_lite.inputs",
    "optax",
    "optax.contrib",
    "jax.nn",
)

BUILTINS = ("bool", "dict", "float", "frozenset", "int", "list", "set", "slice", "str", "tuple")


def is_allowed(module: str, name: str, packages: Collection[str]) -> bool:
    """Returns True if a config may name `module:name`, from the words alone; imports nothing."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in (*parts, *module.split("."))):
        return False
    if any(part.startswith("__") for part in parts):
        return False
    is_public = not any(part.startswith("_") for part in parts)
    if module == "builtins":
        return name in BUILTINS
    if module in LIBRARIES:
        return is_public
    top = module.partition(".")[0]
    if any(f"{module}.".startswith(f"{one}.") for one in PACKAGES):
        return True
    if top == "praxis_lite":
        return is_public and module in PUBLIC and (module, name) not in _ACTIONS
    return top in packages


def imported(module: str, name: str) -> Any:
    """Returns what `module:name`, which is allowed, is.

    Raises:
        ConfigError: it is not there, or is not a class, function or constant defined there. What
            the module itself raises comes as it is.
    """
    gone = (
        f"config.json names {module}.{name}, which is not there: the code has changed since the "
        "job began, or its package is not on sys.path. Restore it, or start a new job."
    )
    found = _holder(module)
    for depth, part in enumerate(name.split(".")):
        # Not getattr of an instance: a name leads to what stands in modules and classes only.
        if depth > 0 and not isinstance(found, type):
            raise ConfigError(refused("config.json", module, name))
        found = getattr(found, part, None)
        if found is None:
            raise ConfigError(gone)
        # `os.system` is an attribute of every module that imports os.
        if not _is_defined_in(found, module, depth):
            raise ConfigError(refused("config.json", module, name))
    if not _is_of_kind(module, found):
        raise ConfigError(refused("config.json", module, name))
    return found


def named(text: str, packages: Collection[str], beside: Sequence[str] = ()) -> Any:
    """Returns what a name behind `--set` means, or None if a config may not name it.

    Args:
        text: a full name, `optax.lion`; or a bare one, `lion`, which is looked up in the modules
            `beside` and SHORT, in this order.
        packages: top-level packages of the user's own.
        beside: modules that define what is to be replaced.
    """
    parts = text.split(".")
    if len(text) > 200 or not all(part.isidentifier() for part in parts):
        return None
    splits = [(".".join(parts[:n]), ".".join(parts[n:])) for n in range(len(parts) - 1, 0, -1)]
    for module, name in splits or [(place, text) for place in (*beside, *SHORT)]:
        is_beside = module in beside and module in sys.modules
        may_look = is_beside or is_allowed(module, name, packages)
        value = _shown_in(module, name) if may_look else None
        symbol = None if value is None else name_of(value)
        # A module shows what others define: the place of the definition decides.
        if symbol is not None and is_allowed(*symbol, packages):
            return imported(*symbol)
    return None


def names_in(beside: Sequence[str]) -> list[str]:
    """Returns the bare names of functions and classes that `named` knows."""
    holders = [vars(_loaded(place) or object) for place in (*beside, *SHORT)]
    return sorted({
        name for holder in holders for name, one in holder.items()
        if callable(one) and not name.startswith("_")
    })


def name_of(value: Any) -> tuple[str, str] | None:
    """Returns (module, name) under which `value` itself is imported, or None.

    It is the library's public name for it, if there is one: private modules move.
    """
    if isinstance(value, enum.Enum):
        owner = name_of(type(value))
        return owner and (owner[0], f"{owner[1]}.{value.name}")
    if isinstance(value, types.MethodType):
        owner = name_of(value.__self__) if isinstance(value.__self__, type) else None
        return owner and (owner[0], f"{owner[1]}.{value.__name__}")
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or isinstance(value, types.ModuleType):
        return None
    if module != "builtins":
        for library in (*PUBLIC, *LIBRARIES):
            if (name := _name_in(_loaded(library), value)) is not None:
                return library, name
    if module not in sys.modules:
        return None
    name = _name_in(sys.modules[module], value)
    return None if name is None else (module, name)


def _is_of_kind(module: str, value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return False
    if module in ARRAY_LIBRARIES:
        return is_dtype(value) or isinstance(value, _array_functions())
    if module in LAYER_LIBRARIES:
        return isinstance(value, type) and issubclass(value, sys.modules[module].Module)
    return module not in WHOLE_LIBRARIES or callable(value) or isinstance(value, enum.Enum)


def refused(where: str, module: str, name: str) -> str:
    """Returns the paragraph about a name that a config may not have."""
    top = module.partition(".")[0]
    is_own = top not in ("builtins", "praxis_lite", *sys.stdlib_module_names) and not any(
        one.partition(".")[0] == top for one in LIBRARIES
    )
    hint = "Put a function or class of your own, in your package, around it."
    if is_own:
        hint = f"If {shown(top)} is a package of your own, add --packages={shown(top)}."
    elif top == "praxis_lite":
        hint = (
            "Of praxis_lite take what praxis_lite.layers, .learner, .models and such list in "
            f"__all__. {hint}"
        )
    return (
        f"{where} names {shown(f'{module}.{name}')}, and a config may name only what is defined in "
        "the packages given by --packages and in the experiments, tasks, layers, models, inputs "
        "and such of praxis_lite; functions of jax.nn, jax.lax and optax; scalar types, ufuncs and "
        f"jitted functions of jax.numpy and numpy; and layers of flax. {hint}"
    )


def _shown_in(module: str, name: str) -> Any:
    found = _holder(module)
    for depth, part in enumerate(name.split(".")):
        found = getattr(found, part, None) if depth == 0 or isinstance(found, type) else None
    return found


def _holder(module: str) -> Any:
    """Returns a module, or None if there is none by that name."""
    if module == "jax.checkpoint_policies":  # An attribute, not a module.
        return importlib.import_module("jax").checkpoint_policies
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # The module is there, but something that it imports is not.
        return None


def _is_defined_in(value: Any, module: str, depth: int) -> bool:
    place = getattr(value, "__module__", None)
    if not isinstance(place, str) or isinstance(value, enum.Enum):
        place = type(value).__module__
    top = module.partition(".")[0]
    if module in ARRAY_LIBRARIES:
        return True  # jax.numpy shows some of numpy's; the kind decides.
    if module not in (*LIBRARIES, *PUBLIC) and depth == 0:
        return place == module
    # Classes of the user's inherit methods from praxis_lite's, and libraries show jaxlib's.
    others = ("jaxlib",) if module in LIBRARIES else ("praxis_lite",)
    return place.partition(".")[0] in (top, *others)


def _loaded(library: str) -> Any:
    parent, _, last = library.rpartition(".")
    return sys.modules.get(library) or getattr(sys.modules.get(parent), last, None)


def _name_in(holder: Any, value: Any) -> str | None:
    # The first has the class before it, of a static method: `WeightInit.Xavier`.
    for attribute in ("__qualname__", "__name__"):
        name = getattr(value, attribute, None)
        if isinstance(name, str) and not name.startswith("__") and _is_at(holder, name, value):
            return name
    # An instance at the top of a module, such as some of JAX's remat policies.
    names = vars(holder).items() if holder is not None else ()
    return next((name for name, one in names if one is value and not name.startswith("__")), None)


def _is_at(holder: Any, name: str, value: Any) -> bool:
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return holder is not None and holder is value


def _array_functions() -> tuple[type, ...]:
    import jax.numpy
    import numpy

    return numpy.ufunc, jax.numpy.ufunc, type(jax.numpy.tanh)
