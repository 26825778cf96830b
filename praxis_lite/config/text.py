"""A config as text: JSON from which it is rebuilt, and lines for people."""

import dataclasses
import enum
import functools
import json
import shlex
import sys
import types
from collections.abc import Sequence
from typing import Any

import fiddle as fdl
from fiddle import daglish
from fiddle.experimental import serialization

from praxis_lite.config.paths import callable_name, describe, iterate_fields, join
from praxis_lite.config.symbols import (
    check_exists,
    checked_symbols,
    policy_for,
    refused,
    symbol_of,
)
from praxis_lite.config.values import dtype_name, format_value
from praxis_lite.errors import ConfigError

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
    """What `config.json` holds.

    Attributes:
        config: of the whole job, overrides applied.
        experiment: the full name of the experiment's class.
        overrides: the settings as they were given to `--set`.
    """

    config: fdl.Config
    experiment: str
    overrides: tuple[str, ...]


def dump_config(
    config: fdl.Config,
    experiment: str,
    overrides: Sequence[str] = (),
    *,
    packages: Sequence[str] = (),
) -> str:
    """Returns JSON text from which `load_config` rebuilds `config` exactly, shared parts shared.

    Args:
        config: of the whole job.
        experiment: the full name of the experiment's class.
        overrides: the settings of `--set`, for the record.
        packages: further top-level packages whose functions and classes the config may name.

    Raises:
        ConfigError: a value that text cannot hold, such as a lambda or an array, or a function
            from a package that `load_config` would refuse; names the path.
    """
    try:
        plain = _encode(config, "", {})
        text = serialization.dump_json(plain, policy_for(experiment, packages))
    except serialization.PyrefPolicyError as error:
        raise ConfigError(refused("The config", error.module, error.symbol)) from None
    except serialization.UnserializableValueError as error:
        # What _encode has not refused, with its path, before.
        raise ConfigError(f"The config cannot be written as text: {error}") from error
    header = {"format": _FORMAT, "experiment": experiment, "overrides": list(overrides)}
    return json.dumps({**header, "config": json.loads(text)}, indent=1) + "\n"


def load_config(text: str, *, packages: Sequence[str] = ()) -> LoadedConfig:
    """Returns the config that `dump_config` wrote.

    Nothing is imported before every name in the text has been checked.

    Args:
        text: of `config.json`.
        packages: further top-level packages whose functions and classes the text may name.

    Raises:
        ConfigError: damaged text, a name outside the allowed packages, or one that the code no
            longer has.
    """
    try:
        parsed = json.loads(text)
        file_format, experiment, graph = parsed["format"], parsed["experiment"], parsed["config"]
        overrides = tuple(parsed["overrides"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            "config.json is damaged, or praxis_lite did not write it: wanted a JSON object with "
            "format, experiment, overrides and config. Restore the file or start a new job."
        ) from None
    if file_format != _FORMAT:
        raise ConfigError(
            f"config.json has format {file_format!r}, this praxis_lite reads {_FORMAT}. Use the "
            "version that wrote it."
        )
    policy = policy_for(experiment, packages)
    for module, symbol in checked_symbols(graph, policy):
        check_exists(module, symbol)
    try:
        config = _decode(serialization.load_json(json.dumps(graph), policy), {})
    except serialization.PyrefPolicyError as error:
        raise ConfigError(refused("config.json", error.module, error.symbol)) from None
    except (
        serialization.DeserializationError,
        AssertionError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(
            f"config.json is damaged ({type(error).__name__}: {error}). Restore the file or start "
            "a new job."
        ) from error
    _check_parameters(config)
    return LoadedConfig(config, experiment, overrides)


def config_lines(config: fdl.Config) -> list[str]:
    """Returns a line `path=value` for every field, in the order of the roots.

    A plain value is quoted as a shell wants it, so that the line can be pasted behind `--set`. A
    config or a function stands in angle brackets: those only the experiment's code can change.
    """
    return [
        f"{path}={shlex.quote(text) if is_literal else text}"
        for path, (text, is_literal) in _texts(config).items()
    ]


def config_difference(old: fdl.Config, new: fdl.Config) -> list[str]:
    """Returns a line 'run.seed: 0 -> 7' for every field that differs, in the order of the roots."""
    old_texts, new_texts = _texts(old), _texts(new)
    absent = ("(absent)", False)
    return [
        f"{path}: {old_texts.get(path, absent)[0]} -> {new_texts.get(path, absent)[0]}"
        for path in dict.fromkeys([*new_texts, *old_texts])
        if old_texts.get(path) != new_texts.get(path)
    ]


def _texts(config: fdl.Config) -> dict[str, tuple[str, bool]]:
    texts = {}
    for field in iterate_fields(config):
        text = format_value(field.value, field.annotation) if field.is_settable else None
        if text is not None:
            texts[field.path] = (text, True)
        else:
            texts[field.path] = (describe(field.value), False)
    return texts


# What fiddle cannot write stands in the text as a config of one of these three.
def _dtype(name: str) -> Any:
    import ml_dtypes  # noqa: F401 - numpy learns the name bfloat16 from it.
    import numpy as np

    return np.dtype(name)


def _partial(function: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return functools.partial(function, *args, **keywords)


def _partition_spec(entries: tuple[Any, ...]) -> Any:
    from jax.sharding import PartitionSpec

    return PartitionSpec(*entries)


def _encode(value: Any, path: str, memo: dict[int, tuple[Any, Any]]) -> Any:
    """Returns `value` in terms that fiddle can write; what was one object stays one."""
    if id(value) in memo:
        return memo[id(value)][1]
    encoded = _encode_new(value, path, memo)
    # The value is kept too: a freed one's id could come again.
    memo[id(value)] = (value, encoded)
    return encoded


def _encode_new(value: Any, path: str, memo: dict[int, tuple[Any, Any]]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.dtype):
        return fdl.Config(_dtype, dtype_name(value))
    sharding = sys.modules.get("jax.sharding")
    if sharding is not None and isinstance(value, sharding.PartitionSpec):
        return fdl.Config(_partition_spec, _encode(tuple(value), path, memo))
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, dict(value.keywords))
        return fdl.Config(_partial, *(_encode(one, path, memo) for one in parts))
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    traverser = serialization.find_node_traverser(type(value))
    if traverser is None:
        _check_importable(value, path)
        return value
    if isinstance(value, fdl.Buildable):
        _check_importable(fdl.get_callable(value), path)
    values, metadata = traverser.flatten(value)
    keys = [_key(element) for element in traverser.path_elements(value)]
    items = [_encode(one, join(path, key), memo) for one, key in zip(values, keys, strict=True)]
    return traverser.unflatten(items, metadata)


def _decode(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    if id(value) not in memo:
        memo[id(value)] = (value, _decode_new(value, memo))
    return memo[id(value)][1]


def _decode_new(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    traverser = serialization.find_node_traverser(type(value))
    if traverser is None:
        return value
    values, metadata = traverser.flatten(value)
    decoded = traverser.unflatten([_decode(one, memo) for one in values], metadata)
    # Called, not built: a config among the arguments stays one.
    if isinstance(decoded, fdl.Config) and fdl.get_callable(decoded) is _dtype:
        return _dtype(decoded.name)
    if isinstance(decoded, fdl.Config) and fdl.get_callable(decoded) is _partition_spec:
        return _partition_spec(decoded.entries)
    if isinstance(decoded, fdl.Config) and fdl.get_callable(decoded) is _partial:
        return _partial(decoded.function, decoded.args, decoded.keywords)
    return decoded


def _key(element: daglish.PathElement) -> Any:
    for attribute in ("name", "key", "index"):
        if hasattr(element, attribute):
            return getattr(element, attribute)
    return element.code


def _check_importable(value: Any, path: str) -> None:
    """Checks that a function, a class or a constant is what importing its name gives."""
    symbol = symbol_of(value)
    if symbol is None:
        is_local = "<" in getattr(value, "__qualname__", "")
        what = (
            f"the function or class {value.__qualname__}, which has no name at the top of a module"
            if is_local
            else f"{describe(value)}, which has no literal and no name in a module"
        )
        raise ConfigError(
            f"{path}: is {what}, so the job's config.json could not hold it. Define it at the top "
            "of a module, or write fdl.Config(...) of the class or function that makes it."
        )
    # fiddle finds functions and classes itself; jitted ones and ufuncs it must be told of.
    if not isinstance(value, type | types.FunctionType | types.MethodType | enum.Enum):
        serialization.register_constant(*symbol, compare_by_identity=True)


def _check_parameters(config: fdl.Config) -> None:
    for field in iterate_fields(config):
        if not isinstance(field.value, fdl.Buildable):
            continue
        function = fdl.get_callable(field.value)
        for name in (key for key in field.value.__arguments__ if isinstance(key, str)):
            try:
                field.value.__signature_info__.validate_param_name(name, function)
            except AttributeError:
                raise ConfigError(
                    f"{field.path}.{name}: config.json sets it, and {callable_name(function)} has "
                    "no such parameter: the code has changed since the job began. Restore it, or "
                    "start a new job."
                ) from None
