"""Wraps layers' methods: signatures, argument checks, name scopes, and the untyped fallback."""

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
    is_whole,
    require,
    require_choice,
)
from praxis_lite.core.models.layer_paths import attribute_name
from praxis_lite.core.sharding.devices.axis_types import (
    is_type_error,
    is_typed,
    note_untyped,
    type_spec,
    untyped,
)
from praxis_lite.layers.base.dims import SplitSetting
from praxis_lite.layers.base.variables import assign, assigned_values

Init = TypeVar("Init", bound=Callable[..., None])


class ConstructorSignature:
    """The signature of a layer class: that of its constructor.

    Without it, Fiddle and `--set` would see the `*args, **kwargs` of the metaclass of nnx.
    """

    def __get__(self, layer: Any, layer_class: type) -> inspect.Signature:
        if layer is not None:
            raise AttributeError("__signature__")  # The signature of an instance is `__call__`'s.
        return inspect.Signature(list(parameters_of(layer_class).values())[1:])


def parameters_of(layer_class: type) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a class's constructor, including `self`."""
    init = layer_class.__init__  # type: ignore[misc]  # Of a class, not of an instance.
    return inspect.signature(init).parameters


def inherit_params(*bases: type, but: Collection[str] = ()) -> Callable[[Init], Init]:
    """Returns a decorator that replaces a constructor's `**settings` by the parameters of `bases`.

    Their names, types and defaults appear in its signature, for help, Fiddle and `--set`.

    Args:
      bases: Classes whose constructor parameters are inherited.
      but: Parameters to leave out.
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
            if name not in local and name not in but
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
        return checked  # type: ignore[return-value]  # Of the same parameters.

    return decorated


def with_settings(
    init: Callable[..., None], names: Collection[str],
    take: Callable[[Any, dict[str, Any]], None],
) -> Callable[..., None]:
    """Returns a layer's constructor with additional keyword arguments, whose default is None.

    Args:
      init: The constructor.
      names: Names of the keyword arguments. Those that the constructor declares itself, so that
        type checkers know them, are also passed to it.
      take: Called before the constructor with the layer and the given arguments.
    """
    if not names:
        return init
    local = inspect.signature(inspect.unwrap(init)).parameters
    parameters = inspect.signature(init).parameters
    added = {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=SplitSetting
        )
        for name in names if name not in parameters
    }
    at_end = [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    signature = inspect.Signature(
        [*(p for p in parameters.values() if p not in at_end), *added.values(), *at_end]
    )

    @functools.wraps(init)
    def taking(self: Any, *args: Any, **kwargs: Any) -> None:
        take(self, {name: kwargs[name] for name in names if name in kwargs})
        for name in names:
            if name not in local:
                kwargs.pop(name, None)
        init(self, *args, **kwargs)

    taking.__signature__ = signature  # type: ignore[attr-defined]  # For `inspect`.
    # --set reads the types from here.
    inspect.unwrap(init).__annotations__ |= {name: SplitSetting for name in added}
    return taking


# The layer whose method is being traced.
_caller: contextvars.ContextVar[Any] = contextvars.ContextVar("caller", default=None)
# The path of that layer in the model.
_path: contextvars.ContextVar[str] = contextvars.ContextVar("path", default="")


@contextlib.contextmanager
def _calling(layer: Any, name: str) -> Iterator[None]:
    token, path = _caller.set(layer), _path.get()
    inside = _path.set(f"{path}/{name}".strip("/") if name else path)
    try:
        with jax.named_scope(name) if name else contextlib.nullcontext():
            yield
    finally:
        _caller.reset(token)
        _path.reset(inside)


def checked_and_named(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer's method to reject unknown keywords and to add a name scope.

    The layer's name is looked up in the calling layer while tracing. If it were stored in the
    layer, equal layers of a stack would be different pytrees.
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
        if caller is layer:
            return method(layer, *args, **kwargs)
        with _calling(layer, "" if caller is None else attribute_name(caller, layer)):
            return with_auto_fallback(method, layer, args, kwargs, _path.get())

    return call


def scope_of(parent: nnx.Module, layer: nnx.Module) -> contextlib.AbstractContextManager[None]:
    """Returns a name scope for `layer`, an attribute of `parent`.

    For layers inside `jax.checkpoint`, which calls a copy of the layer and traces equal layers only
    once, so that the scope must be set outside.
    """
    return _calling(None, attribute_name(parent, layer))


def require_positive(layer: object, **sizes: int) -> None:
    """Checks that sizes are positive integers.

    Raises:
      ConfigError: A size is not. The message names the layer's class and the setting.
    """
    for name, size in sizes.items():
        require(is_whole(size), f"{type(layer).__name__}.{name}", size, "a positive integer")


def require_floating(layer: object, **dtypes: Any) -> None:
    """Checks that the dtypes a layer computes in are floating-point.

    Raises:
      ConfigError: A dtype is not. The message names the layer's class and the setting.
    """
    for name, dtype in dtypes.items():
        require(
            jnp.issubdtype(dtype, jnp.floating), f"{type(layer).__name__}.{name}",
            jnp.dtype(dtype).name,
            "a floating-point dtype, such as bfloat16: others have no gradient",
            "To multiply in int8, use quantization (docs/training.md).",
        )


def check_way(
    layer: object, field: str, setting: str | None, ways: Mapping[str, str],
    unable: Mapping[str, bool], split: str,
) -> None:
    """Checks a setting that selects explicit collectives; None leaves them to the compiler.

    Args:
      layer: The layer, for messages.
      field: Name of the setting, such as "tensor_parallel".
      setting: Its value.
      ways: Valid values.
      unable: Settings that these collectives do not support, and whether each is used.
      split: What the compiler splits otherwise, such as "the layer", for messages.

    Raises:
      ConfigError: The value is unknown, or an unsupported setting is used.
    """
    if setting is None:
        return
    name = type(layer).__name__
    require_choice(f"{name}.{field}", setting, ways)
    if used := [other for other, is_used in unable.items() if is_used]:
        raise ConfigError(
            f"{name}.{field} is {setting!r}, which does not support {' or '.join(used)}. Omit it, "
            f"or set {field}=None: the compiler then splits {split}."
        )


def with_auto_fallback(
    method: Callable[..., Any], layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
    path: str,
) -> Any:
    """Calls `method`; over Auto axes if JAX cannot type its results over Explicit ones.

    The results are then typed like the first array among the arguments, dim by dim as long as the
    sizes are equal.

    Args:
      method: The method.
      layer: The layer.
      args: Positional arguments.
      kwargs: Keyword arguments.
      path: Path of the layer, under which the reason is recorded.
    """
    if not is_typed():
        return method(layer, *args, **kwargs)
    try:
        return method(layer, *args, **kwargs)
    except Exception as error:
        if not is_type_error(error):
            raise
        note_untyped(path, str(error).strip().splitlines()[0])
    leaves, structure = jax.tree.flatten((layer, args, dict(kwargs)))
    is_array = [isinstance(x, jax.Array) for x in leaves]
    arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]
    like = next((x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)), None)

    def function(*arrays: jax.Array) -> Any:
        given = iter(arrays)
        merged = [next(given) if a else x for x, a in zip(leaves, is_array, strict=True)]
        own, args, kwargs = jax.tree.unflatten(structure, merged)
        return method(own, *args, **kwargs), assigned_values(own)

    results, values = untyped(function, *arrays, out=lambda tree: jax.tree.map(
        lambda x: _type_like(x, like), tree
    ))
    assign(layer, values)
    return results


def _type_like(x: jax.Array, like: jax.Array | None) -> PartitionSpec:
    """Returns a spec that splits the leading dims of `x` like those of `like` with equal sizes."""
    entries = [None] * x.ndim
    if like is not None:
        for dim, entry in enumerate(type_spec(like)[: x.ndim]):
            if like.shape[dim] != x.shape[dim]:
                break
            entries[dim] = entry
    return PartitionSpec(*entries)
