"""Converts a config to JSON, from which it is rebuilt, and to lines for people."""

import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl

from praxis_lite.config import json_nodes
from praxis_lite.config.callables import text_of_value
from praxis_lite.config.json_nodes import FORMAT, damaged
from praxis_lite.config.paths import iterate_fields
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.file_reading import parse_json, read_json

__all__ = ("LoadedConfig", "load_config_file")


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
    """The content of `config.json`.

    Attributes:
        config: Of the complete job, overrides applied.
        experiment: The full name of the experiment's class.
        overrides: The settings as they were given to `--set`.
    """

    config: fdl.Config
    experiment: str
    overrides: tuple[str, ...]


def dump_config(
    config: fdl.Config,
    experiment: str,
    overrides: Sequence[str] = (),
    *,
    packages: Collection[str] = (),
) -> str:
    """Returns JSON text from which `load_config` rebuilds `config` exactly, shared parts shared.

    Args:
        config: Of the complete job.
        experiment: The full name of the experiment's class; its package may be named.
        overrides: The settings of `--set`, for the record.
        packages: Further top-level packages whose functions and classes the config may name.

    Raises:
        ConfigError: A value has no text form, such as a lambda or an array, or is a function from a
            package that `load_config` would refuse; names the path.
    """
    node = json_nodes.write(config, {experiment.partition(".")[0], *packages})
    header = {"format": FORMAT, "experiment": experiment, "overrides": list(overrides)}
    return json.dumps({**header, "config": node}, indent=1, allow_nan=False) + "\n"


def load_config(text: str, *, packages: Collection[str] = ()) -> LoadedConfig:
    """Returns the config that `dump_config` wrote.

    A name is imported only after it has been checked.

    Args:
        text: The content of `config.json`.
        packages: Top-level packages whose functions and classes the text may name, in addition to
            `praxis_lite.experiments` and `.tasks`. The text itself cannot add packages.

    Raises:
        ConfigError: The text is damaged, or has a name outside the allowed packages or one that the
            code no longer has.
    """
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise damaged("the text", str(error)) from None
    return _loaded(parsed, packages)


def load_config_file(path: Path, *, packages: Collection[str] = ()) -> LoadedConfig:
    """Returns the config in a file; as `load_config`."""
    return _loaded(read_json(path), packages)


def _loaded(parsed: Any, packages: Collection[str]) -> LoadedConfig:
    if type(parsed) is not dict or not {"format", "experiment", "config"} <= set(parsed):
        keys = "format, experiment, overrides and config"
        raise damaged("the text", f"expected an object with {keys}")
    if parsed["format"] != FORMAT or type(parsed["format"]) is not int:
        raise ConfigError(
            f"config.json has format {shown(json.dumps(parsed['format']))}; this praxis_lite reads "
            f"format {FORMAT}. Use the version that wrote it, or start the job anew."
        )
    experiment, overrides = parsed["experiment"], parsed.get("overrides")
    is_name = type(experiment) is str and re.fullmatch(r"\w+(\.\w+)+", experiment)
    if not is_name or len(experiment) > 200:
        raise damaged("experiment", "it is not module.Class")
    if type(overrides) is not list or not all(type(override) is str for override in overrides):
        raise damaged("overrides", "they are not a list of texts")
    config = json_nodes.read(parsed["config"], packages)
    if not isinstance(config, fdl.Buildable):
        raise damaged("config", "it is not a config")
    _check_parameters(config)
    return LoadedConfig(config, experiment, tuple(overrides))


def config_lines(config: fdl.Config) -> list[str]:
    """Returns a line `path=value` for every field, in the order of the roots.

    It is quoted for a shell, so that each line can be pasted after `--set`. A field without a
    value, which the function's caller gives, has no line.
    """
    return [f"{path}={shlex.quote(text)}" for path, text in _texts(config).items()]


def config_values(config: fdl.Config) -> dict[str, str | int | float | bool]:
    """Returns the value of every field by path: numbers and booleans as such, others as text."""
    values = {field.path: field.value for field in iterate_fields(config)}
    return {
        path: values[path] if isinstance(values[path], bool | int | float) else text
        for path, text in _texts(config).items()
    }


def config_difference(old: fdl.Config, new: fdl.Config) -> list[str]:
    """Returns a line 'run.seed: 0 -> 7' for every field that differs, in the order of the roots."""
    before, after = _texts(old), _texts(new)

    def value_text(texts: dict[str, str], path: str) -> str:
        below = any(other.startswith((f"{path}.", f"{path}[")) for other in texts)
        return texts.get(path, "(below)" if below else "(absent)")

    return [
        f"{path}: {value_text(before, path)} -> {value_text(after, path)}"
        for path in dict.fromkeys([*after, *before]) if before.get(path) != after.get(path)
    ]


def _texts(config: fdl.Config) -> dict[str, str]:
    texts = ((field.path, text_of_value(field.value, field.annotation))
             for field in iterate_fields(config))
    return {path: text for path, text in texts if text is not None}


def _check_parameters(config: fdl.Config) -> None:
    below = ((f"{field.path}.", field.value) for field in iterate_fields(config))
    for prefix, value in (("", config), *below):
        if not isinstance(value, fdl.Buildable):
            continue
        function = fdl.get_callable(value)
        for name in (key for key in value.__arguments__ if isinstance(key, str)):
            try:
                value.__signature_info__.validate_param_name(name, function)
            except AttributeError:
                path = shown(f"{prefix}{name}", 300)
                raise ConfigError(
                    f"{path}: config.json sets it, and {callable_name(function)} has "
                    "no such parameter: the code has changed since the job began. Restore it, or "
                    "start a new job."
                ) from None
