"""The names that a config may use, decided here alone: by their words, and again by the objects.

A job's directory may come from anyone, and `module:name` in its config.json becomes an import and
then a call: so only what is meant to be configured stands here, and none of it writes, connects,
starts anything or changes what is global. (A tracker connects when a job trains: the config of that
comes from an experiment's code, and not from a file.)
"""

import enum
import functools
import inspect
import sys
import types
from collections.abc import Collection
from typing import Any

from praxis_lite.core.errors import shown
from praxis_lite.public_names import homes_of
from praxis_lite.run.config.values import is_dtype

# Functions of these compute and do no more, and a config may name them. Of other public packages it
# may name classes alone: their functions read files, start devices or change what is global.
_FUNCTIONS_OF = (
    "praxis_lite.layers", "praxis_lite.models", "praxis_lite.optimizers", "praxis_lite.schedules",
)
_PURE_FUNCTIONS = {"constrain", "pax_outputs"}
# Classes that act, or that no setting holds.
_NOT_FOR_CONFIGS = {
    "BadExample", "Checkpoints", "ConfigError", "FileSource", "Hook",
    "InputsSplitMapping", "JobMesh", "LOAD_ALL", "Leaf", "LossOutputs", "Outcome", "Source",
    "SplitDims", "StepMade", "StepMetrics", "TrackedRun", "Tracker", "TrainedModel",
    "WeightedScalars",
}


def _for_configs(package: str, names: Collection[str]) -> frozenset[str]:
    """Returns those of a package's public names that a config may have."""
    return frozenset(
        name for name in names if name not in _NOT_FOR_CONFIGS and
        (name[0].isupper() or package in _FUNCTIONS_OF or name in _PURE_FUNCTIONS)
    )


# The library's public names: files move, these stay. Of two packages that show one thing, the first
# is written.
PUBLIC = {
    package: _for_configs(package, homes_of(package))
    for package in (
        "praxis_lite", "praxis_lite.collectives", "praxis_lite.core", "praxis_lite.decode",
        "praxis_lite.inputs", "praxis_lite.inputs.numpy_data", "praxis_lite.inputs.tf_data",
        *_FUNCTIONS_OF,
    )
}

# What is in `__all__` of their modules. One without it is not the library's, but its owner's who
# put it beside ours: it shows all that it defines, as do the packages that a user lists.
TASKS = "praxis_lite.tasks"
PACKAGES = (TASKS, "praxis_lite.experiments")

# Of jax.lax no loop and nothing that makes an array of a size, but maths and how exact it is.
LAX = frozenset({
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "batch_matmul",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "cos", "cosh", "cumlogsumexp",
    "cummax", "cummin", "cumprod", "cumsum", "digamma", "div", "dot", "dot_general", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "integer_pow", "is_finite", "lgamma",
    "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow", "reciprocal", "rem",
    "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "Precision", "DotAlgorithm", "DotAlgorithmPreset", "AccuracyMode",
    "RoundingMethod",
})
# They iterate as often as they are told to, and are no part of an optimizer.
_SOLVERS = {"matrix_inverse_pth_root", "nnls", "power_iteration"}
# Functions of arrays, which a config hands on and never calls: powers of integers may not end.
FUNCTIONS = ("jax.lax", "jax.numpy", "numpy")
# What is called makes an optimizer, a schedule, an initializer or a policy.
FACTORIES = ("jax.nn.initializers", "jax.checkpoint_policies", "optax", "optax.contrib")
_FACTORIES_WITHOUT_A_TYPE = {
    "dog", "dowg", "hutchinson_estimator_diag_hessian", "monitor", "scale_by_factored_rms",
}
# Only scalar types, ufuncs and jitted functions: their other functions read and write files.
ARRAY_LIBRARIES = ("jax.numpy", "numpy")
# Only subclasses of their Module.
LAYER_LIBRARIES = ("flax.linen", "flax.nnx")
LIBRARIES = ("jax.nn", *FACTORIES[:1], "jax.lax", *FACTORIES[1:], *ARRAY_LIBRARIES,
             *LAYER_LIBRARIES)

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
    if module == "jax.lax":
        return is_public and parts[0] in LAX
    if module in LIBRARIES:
        return is_public and not (module == "optax" and name in _SOLVERS)
    if is_of_packages(module):
        return True
    if module in PUBLIC:
        return is_public and parts[0] in PUBLIC[module]
    return module.partition(".")[0] in packages and module.partition(".")[0] != "praxis_lite"


def is_of_packages(module: str) -> bool:
    """Returns True for a module of the experiments and tasks."""
    return any(f"{module}.".startswith(f"{package}.") for package in PACKAGES)


def is_shown(module: str, name: str) -> bool:
    """Returns True if an imported module shows `name` to configs."""
    shows = PUBLIC.get(module)
    if is_of_packages(module):
        shows = getattr(sys.modules.get(module), "__all__", None)
        if shows is not None and f"{module}.".startswith(f"{TASKS}."):
            shows = _for_configs(module, shows)
    return shows is None or name.partition(".")[0] in shows


def is_of_kind(module: str, name: str, value: Any) -> bool:
    """Returns True if `value`, which is `module:name`, is of a kind that a config may hold."""
    if isinstance(value, types.ModuleType) or not is_shown(module, name):
        return False
    if module in ARRAY_LIBRARIES:
        return is_dtype(value) or isinstance(value, _array_functions())
    if module in LAYER_LIBRARIES:
        return isinstance(value, type) and issubclass(value, sys.modules[module].Module)
    is_ours = module in PUBLIC or is_of_packages(module) and hasattr(sys.modules[module], "__all__")
    if "." in name and (is_ours or module in LIBRARIES):
        return _is_of_a_class(module, name, value)
    return module not in LIBRARIES or callable(value) or isinstance(value, enum.Enum)


def may_be_called(module: str, name: str, value: Any) -> bool:
    """Returns True if a config may call `value` itself, rather than hand it on to be called."""
    if module in FUNCTIONS or (module, name) == ("jax.nn", "one_hot"):
        return False
    if module not in FACTORIES or isinstance(value, type) or module == "jax.checkpoint_policies":
        return True
    if name in _FACTORIES_WITHOUT_A_TYPE:
        return True
    try:
        result = str(inspect.signature(value, eval_str=False).return_annotation)
    except (TypeError, ValueError):
        return False
    kinds = ("GradientTransformation", "Callable[", "Schedule", "Initializer")
    return any(kind in result for kind in kinds)


def refused(where: str, module: str, name: str) -> str:
    """Returns the paragraph about a name that a config may not have."""
    if module == "__main__":
        return (
            f"{where} names {shown(f'{module}.{name}')}, which a notebook or a script defined, and "
            "which only that can use: define it, and call praxis_lite.load(DIR, "
            "packages=['__main__']). For --mode=eval and other processes define it in a module of "
            "a package of yours, train from there, and name the package with --packages."
        )
    top = module.partition(".")[0]
    is_own = top not in ("builtins", "praxis_lite", *sys.stdlib_module_names) and not any(
        library.partition(".")[0] == top for library in LIBRARIES
    )
    hint = "Put a function or class of your own, in your package, around it."
    if is_own:
        hint = f"If {shown(top)} is a package of your own, add --packages={shown(top)}."
    elif is_of_packages(module):
        hint = f"If it is meant to be configured, add it to __all__ of {shown(module)}. {hint}"
    elif top == "praxis_lite":
        hint = (
            "Of praxis_lite take what praxis_lite.layers, .core, .models and such list in "
            f"__all__. {hint}"
        )
    return (
        f"{where} names {shown(f'{module}.{name}')}, and a config may name only what is defined in "
        "the packages given by --packages and what the experiments, tasks, layers, models, inputs "
        "and such of praxis_lite show to be configured; functions of jax.nn, jax.lax and optax; "
        "scalar types, ufuncs and jitted functions of jax.numpy and numpy; and layers of flax. "
        f"{hint}"
    )


def refused_call(where: str, module: str, name: str) -> str:
    """Returns the paragraph about a call that a config may not make."""
    return (
        f"{where} calls {module}.{name}, a function of arrays, which a config may hand on but not "
        "call. Name it without the call, or put a function of your own, in your package, around it."
    )


def _is_of_a_class(module: str, name: str, value: Any) -> bool:
    """Returns True for a member of an enum, a class in a class and a maker of the class."""
    *owners, last = name.split(".")
    owner = functools.reduce(getattr, owners, sys.modules[module])
    member = inspect.getattr_static(owner, last, None)
    return isinstance(value, enum.Enum | type) or isinstance(member, classmethod | staticmethod)


def _array_functions() -> tuple[type, ...]:
    import jax.numpy
    import numpy

    return numpy.ufunc, jax.numpy.ufunc, type(jax.numpy.tanh)
