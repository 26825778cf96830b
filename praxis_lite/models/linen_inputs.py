"""Parses the inputs that initialize a Linen module, and explains errors from calling modules."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors as flax_errors
from flax import linen as nn

from praxis_lite.core.errors import ConfigError, did_you_mean

# Names of arguments that select the training mode, with their values in training.
TRAINING_FLAGS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def init_arguments(init_inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Returns the positional and keyword arguments that `init_inputs` describes.

    Args:
      init_inputs: A dict keyed by argument name, a sequence of positional inputs, or a single
        input. An input is a shape (float32), a pair (dtype, shape), an array, a
        ShapeDtypeStruct, or a dict of inputs. Flags and None are passed unchanged.

    Raises:
      ConfigError: An input has an unsupported type.
    """
    if isinstance(init_inputs, Mapping):
        named = {name: _struct(x, f"init_inputs[{name!r}]") for name, x in init_inputs.items()}
        return (), named
    if _is_single_input(init_inputs):
        return (_struct(init_inputs, "init_inputs"),), {}
    if not isinstance(init_inputs, Sequence) or isinstance(init_inputs, str):
        raise _input_error("init_inputs", init_inputs)
    return tuple(_struct(x, f"init_inputs[{i}]") for i, x in enumerate(init_inputs)), {}


def example_array(struct: Any) -> Any:
    """Returns ones for a ShapeDtypeStruct with a float dtype, and zeros for other dtypes."""
    if not isinstance(struct, jax.ShapeDtypeStruct):
        return struct
    is_float = jnp.issubdtype(struct.dtype, jnp.inexact)
    return (jnp.ones if is_float else jnp.zeros)(struct.shape, struct.dtype)


def resolve_method(
    module: nn.Module, method: str | Callable[..., Any] | None
) -> Callable[..., Any]:
    """Returns a method (by default `__call__`) as a function of the module and its arguments.

    Raises:
      ConfigError: The module has no method with this name.
    """
    if callable(method):
        return method
    function = getattr(type(module), method or "__call__", None)
    if function is None:
        methods = [name for name in vars(type(module)) if not name.startswith("_")]
        raise ConfigError(
            f"{type(module).__name__} has no method {method!r}."
            f"{did_you_mean(str(method), methods)} Its methods are {', '.join(methods)}."
        )
    return function


def training_flags(
    function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], *, is_training: bool
) -> dict[str, bool]:
    """Returns the training flags that `function` accepts and the caller did not pass."""
    signature = inspect.signature(function)
    try:
        given = signature.bind_partial(None, *args, **kwargs).arguments
    except TypeError:  # Calling the function raises a better error.
        return {}
    return {
        name: is_training == when_training
        for name, when_training in TRAINING_FLAGS.items()
        if name in signature.parameters and name not in given
    }


@contextlib.contextmanager
def as_config_error(
    module: nn.Module, action: str, args: tuple, kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Converts Flax and JAX errors from tracing a model into a ConfigError that names the layer."""
    try:
        yield
    except (flax_errors.FlaxError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        inputs = ", ".join([*map(_format, args), *(f"{k}={_format(x)}" for k, x in kwargs.items())])
        raise ConfigError(
            f"{type(module).__name__} cannot be {action} ({inputs}): "
            f"{' '.join(str(error).split())} ({_innermost_layer(error.__traceback__)})"
        ) from error


def _innermost_layer(traceback: TracebackType | None) -> str:
    """Returns the path of the innermost layer in a traceback, and its source line."""
    layer = line = None
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module.scope is not None:
            layer = "/".join(module.scope.path) or "the model itself"
            if "flax" not in Path(frame.f_code.co_filename).parts:
                line = f"{Path(frame.f_code.co_filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return ", ".join(filter(None, [layer and f"layer: {layer}", line])) or "outside all layers"


def _format(x: Any) -> str:
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{name}: {_format(child)}" for name, child in x.items()) + "}"
    return f"{jnp.dtype(x.dtype).name}{tuple(x.shape)}" if hasattr(x, "shape") else repr(x)


def _is_shape(x: Any) -> bool:
    return (
        isinstance(x, Sequence)
        and not isinstance(x, str)
        and all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in x)
    )


def _is_pair(x: Any) -> bool:
    """Returns whether `x` is a pair (dtype, shape)."""
    is_two = isinstance(x, Sequence) and not isinstance(x, str) and len(x) == 2
    return is_two and _is_shape(x[1]) and isinstance(x[0], str | type | np.dtype)


def _is_single_input(x: Any) -> bool:
    is_array = isinstance(x, jax.ShapeDtypeStruct) or hasattr(x, "__array__")
    return is_array or _is_shape(x) or _is_pair(x)


def _struct(x: Any, name: str) -> Any:
    if x is None or isinstance(x, bool):
        return x
    if isinstance(x, Mapping):
        return {key: _struct(child, f"{name}[{key!r}]") for key, child in x.items()}
    if not _is_single_input(x):
        raise _input_error(name, x)
    if _is_pair(x):
        try:
            return jax.ShapeDtypeStruct(tuple(x[1]), jnp.dtype(x[0]))
        except TypeError as error:
            raise _input_error(name, x) from error
    return jax.ShapeDtypeStruct(tuple(x), jnp.float32) if _is_shape(x) else x


def _input_error(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"LinenModel.{name} is {value!r}; expected a shape such as (1, 784), a pair of dtype and "
        'shape such as ("int32", (1, 128)), or an array.'
    )
