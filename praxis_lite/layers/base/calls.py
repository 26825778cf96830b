"""Wraps layer methods with signatures, argument checks, name scopes and a fallback to Auto axes."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import (
    ConfigError,
    did_you_mean,
    is_positive_int,
    require,
    require_choice,
)
from praxis_lite.core.models.layer_paths import attribute_name
from praxis_lite.core.sharding.devices.axis_types import (
    UnevenType,
    is_typed,
    note_untyped,
    type_spec,
    untyped,
)
from praxis_lite.layers.base.dims import SplitSetting
from praxis_lite.layers.base.variables import assign, assigned_values

Init = TypeVar("Init", bound=Callable[..., None])


class ConstructorSignature:
    """A descriptor that returns the constructor's signature as the signature of a layer class.

    Without it, Fiddle and `--set` would see the `*args, **kwargs` of nnx's metaclass.
    """

    def __get__(self, layer: Any, layer_class: type) -> inspect.Signature:
        if layer is not None:
            raise AttributeError("__signature__")  # Instances have the signature of `__call__`.
        return inspect.Signature(list(parameters_of(layer_class).values())[1:])


def parameters_of(layer_class: type) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a class's constructor, including `self`."""
    init = layer_class.__init__  # type: ignore[misc]  # Accessed on the class.
    return inspect.signature(init).parameters


def inherit_params(*bases: type, exclude: Collection[str] = ()) -> Callable[[Init], Init]:
    """Returns a decorator that replaces a constructor's `**settings` with parameters of `bases`.

    The parameters' names, types and defaults appear in the constructor's signature, for help,
    Fiddle and `--set`.

    Args:
      bases: Classes whose constructor parameters are inherited.
      exclude: Parameters to omit.
    """

    def decorated(init: Init) -> Init:
        local = {
            name: parameter
            for name, parameter in inspect.signature(init).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        shared = {
            name: parameter.replace(kind=parameter.KEYWORD_ONLY)
            for base in bases
            for name, parameter in parameters_of(base).items()
            if name not in local and name not in exclude
        }
        signature = inspect.Signature([*local.values(), *shared.values()])

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            init(self, *args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]  # For `inspect`.
        # --set reads the types from here.
        init.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return checked  # type: ignore[return-value]  # Has the signature set above.

    return decorated


def with_settings(
    init: Callable[..., None],
    names: Collection[str],
    take: Callable[[Any, dict[str, Any]], None],
) -> Callable[..., None]:
    """Returns a layer's constructor with additional keyword arguments that default to None.

    Args:
      init: The constructor.
      names: Names of the keyword arguments. If the constructor declares an argument as well (for
        type checkers), it also receives the argument.
      take: Called with the layer and the given keyword arguments, before the constructor.
    """
    if not names:
        return init
    local = inspect.signature(inspect.unwrap(init)).parameters
    parameters = inspect.signature(init).parameters
    added = {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=SplitSetting
        )
        for name in names
        if name not in parameters
    }
    # The new keywords precede **kwargs.
    at_end = [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    signature = inspect.Signature(
        [*(p for p in parameters.values() if p not in at_end), *added.values(), *at_end]
    )

    @functools.wraps(init)
    def init_with_settings(self: Any, *args: Any, **kwargs: Any) -> None:
        # `take` receives the settings. The constructor receives only those that it declares.
        take(self, {name: kwargs[name] for name in names if name in kwargs})
        for name in names:
            if name not in local:
                kwargs.pop(name, None)
        init(self, *args, **kwargs)

    init_with_settings.__signature__ = signature  # type: ignore[attr-defined]  # For `inspect`.
    # --set reads the types from here.
    inspect.unwrap(init).__annotations__ |= {name: SplitSetting for name in added}
    return init_with_settings


# The layer whose method is being traced.
_caller: contextvars.ContextVar[Any] = contextvars.ContextVar("caller", default=None)
# The path of this layer in the model.
_path: contextvars.ContextVar[str] = contextvars.ContextVar("path", default="")


@contextlib.contextmanager
def _calling(layer: Any, name: str) -> Iterator[None]:
    path = _path.get()
    caller_token = _caller.set(layer)
    path_token = _path.set(f"{path}/{name}".strip("/") if name else path)
    try:
        with jax.named_scope(name) if name else contextlib.nullcontext():
            yield
    finally:
        _caller.reset(caller_token)
        _path.reset(path_token)


def checked_and_named(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer's method to reject unknown keywords and to add a name scope.

    While tracing, the layer's name is looked up in the calling layer. If layers stored their names,
    identical layers in a stack would be different pytrees.
    """
    parameters = list(inspect.signature(method, follow_wrapped=False).parameters.values())[1:]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]

    @functools.wraps(method)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        for name in () if takes_any else kwargs:
            if name not in names:
                called = "" if method.__name__ == "__call__" else f".{method.__name__}"
                raise ConfigError(
                    f"{type(layer).__name__}{called} has no argument {name!r}."
                    f"{did_you_mean(name, names)} Its arguments are {', '.join(names) or 'none'}."
                )
        caller = _caller.get()
        # A layer that calls one of its own methods is already in its name scope.
        if caller is layer:
            return method(layer, *args, **kwargs)
        with _calling(layer, "" if caller is None else attribute_name(caller, layer)):
            return with_auto_fallback(method, layer, args, kwargs, _path.get())

    return call


def scope_of(parent: nnx.Module, layer: nnx.Module) -> contextlib.AbstractContextManager[None]:
    """Returns a name scope for `layer`, an attribute of `parent`.

    Layers inside `jax.checkpoint` need this scope set outside, because `jax.checkpoint` calls a
    copy of the layer, and traces identical layers only once.
    """
    return _calling(None, attribute_name(parent, layer))


def require_positive(layer: object, **sizes: int) -> None:
    """Checks that sizes are positive integers.

    Raises:
      ConfigError: A size is not a positive integer.
    """
    for name, size in sizes.items():
        require(is_positive_int(size), f"{type(layer).__name__}.{name}", size, "a positive integer")


def require_floating(layer: object, **dtypes: Any) -> None:
    """Checks that a layer's compute dtypes are floating-point.

    Raises:
      ConfigError: A dtype is not floating-point.
    """
    for name, dtype in dtypes.items():
        require(
            jnp.issubdtype(dtype, jnp.floating),
            f"{type(layer).__name__}.{name}",
            jnp.dtype(dtype).name,
            "a floating-point dtype, such as bfloat16, because other dtypes have no gradient",
            "To multiply in int8, use quantization (docs/training.md).",
        )


def check_collectives_setting(
    layer: object,
    setting: str,
    value: str | None,
    choices: Mapping[str, str],
    unsupported: Mapping[str, bool],
    computation: str,
) -> None:
    """Checks a setting that selects explicit collectives; None leaves them to the compiler.

    Args:
      layer: The layer, for error messages.
      setting: Name of the setting, such as "tensor_parallel".
      value: Value of the setting.
      choices: Valid values.
      unsupported: Maps settings that these collectives do not support to whether they are used.
      computation: The computation that the compiler shards if the value is None, such as "the
        layer", for error messages.

    Raises:
      ConfigError: The value is unknown, or an unsupported setting is used.
    """
    if value is None:
        return
    name = type(layer).__name__
    require_choice(f"{name}.{setting}", value, choices)
    if used := [other for other, is_used in unsupported.items() if is_used]:
        raise ConfigError(
            f"{name}.{setting} is {value!r}, which does not support {' or '.join(used)}. Omit "
            f"{'it' if len(used) == 1 else 'them'}, or set {setting}=None to let the compiler "
            f"shard {computation}."
        )


def with_auto_fallback(
    method: Callable[..., Any],
    layer: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    path: str,
) -> Any:
    """Calls `method`, over Auto axes if its results have no types over Explicit axes.

    This applies to layers that declare it (`BaseLayer.has_types`), and to layers that split a dim
    over Explicit axes that do not divide it. The leading dims of the results are then typed like
    the first array among the arguments, up to the first dim with a different size.

    Args:
      method: The method.
      layer: The layer.
      args: Positional arguments.
      kwargs: Keyword arguments.
      path: Path of the layer, under which the reason for using Auto axes is recorded.
    """
    if not is_typed():
        return method(layer, *args, **kwargs)
    if layer.has_types:
        try:
            return method(layer, *args, **kwargs)
        except UnevenType as error:
            note_untyped(path, str(error))
    else:
        note_untyped(path, f"{type(layer).__name__}.has_types is False")
    # `untyped` passes only arrays, so the layer and its arguments are flattened here and
    # unflattened in `function`.
    leaves, structure = jax.tree.flatten((layer, args, dict(kwargs)))
    is_array = [isinstance(x, jax.Array) for x in leaves]
    arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]
    like = next((x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)), None)

    def function(*arrays: jax.Array) -> Any:
        traced = iter(arrays)
        merged = [next(traced) if a else x for x, a in zip(leaves, is_array, strict=True)]
        # The values that the copy of the layer assigns to its variables are returned, and then
        # assigned to the layer itself.
        layer_copy, args, kwargs = jax.tree.unflatten(structure, merged)
        return method(layer_copy, *args, **kwargs), assigned_values(layer_copy)

    results, values = untyped(
        function, *arrays, out=lambda tree: jax.tree.map(lambda x: _type_like(x, like), tree)
    )
    assign(layer, values)
    return results


def _type_like(x: jax.Array, like: jax.Array | None) -> PartitionSpec:
    """Returns a spec in which leading dims of `x` are sharded like equal dims of `like`."""
    entries = [None] * x.ndim
    if like is not None:
        for dim, entry in enumerate(type_spec(like)[: x.ndim]):
            if like.shape[dim] != x.shape[dim]:
                break
            entries[dim] = entry
    return PartitionSpec(*entries)
