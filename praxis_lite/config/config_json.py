"""Converts configs to JSON and back, and to readable lines."""

import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl

from praxis_lite.config import json_nodes
from praxis_lite.config.json_nodes import FORMAT, damaged
from praxis_lite.config.named_values import text_of_value
from praxis_lite.config.paths import iterate_fields
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.host.file_reading import parse_json, read_json

__all__ = ("LoadedConfig", "load_config_file")


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
    """The content of `config.json`.

    Attributes:
        config: The config of the job, with overrides applied.
        experiment: Full name of the experiment's class.
        overrides: The settings that were passed to `--set`.
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
    """Serializes a config to JSON for `load_config`, which also restores shared objects.

    Args:
        config: The config of the job.
        experiment: Full name of the experiment's class. The config may use names in the package of
            this class.
        overrides: The settings of `--set` to record.
        packages: Additional top-level packages whose functions and classes the config may use.

    Raises:
        ConfigError: A value, such as a lambda or an array, cannot be serialized, or is a function
            in a package that is not allowed. The message contains the path.
    """
    node = json_nodes.write(config, {experiment.partition(".")[0], *packages})
    header = {"format": FORMAT, "experiment": experiment, "overrides": list(overrides)}
    return json.dumps({**header, "config": node}, indent=1, allow_nan=False) + "\n"


def load_config(text: str, *, packages: Collection[str] = ()) -> LoadedConfig:
    """Rebuilds a config from the output of `dump_config`.

    Names are checked before they are imported.

    Args:
        text: The content of `config.json`.
        packages: Top-level packages whose functions and classes the text may contain, in addition
            to `praxis_lite.experiments` and `praxis_lite.tasks`. The text cannot add packages.

    Raises:
        ConfigError: The text is damaged, or contains a name that is not allowed or no longer
            exists.
    """
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise damaged("the text", str(error)) from None
    return _loaded(parsed, packages)


def load_config_file(path: Path, *, packages: Collection[str] = ()) -> LoadedConfig:
    """Rebuilds a config from a file, like `load_config`."""
    return _loaded(read_json(path), packages)


def _loaded(parsed: Any, packages: Collection[str]) -> LoadedConfig:
    if type(parsed) is not dict or not {"format", "experiment", "config"} <= set(parsed):
        keys = "format, experiment, overrides and config"
        raise damaged("the text", f"expected an object with {keys}")
    if parsed["format"] != FORMAT or type(parsed["format"]) is not int:
        raise ConfigError(
            f"config.json has format {shortened(json.dumps(parsed['format']))}; this praxis_lite "
            f"reads format {FORMAT}. Use the version that wrote it, or start a new job."
        )
    experiment, overrides = parsed["experiment"], parsed.get("overrides")
    is_name = type(experiment) is str and re.fullmatch(r"\w+(\.\w+)+", experiment)
    if not is_name or len(experiment) > 200:
        raise damaged("experiment", "expected module.Class")
    if type(overrides) is not list or not all(type(override) is str for override in overrides):
        raise damaged("overrides", "expected a list of strings")
    config = json_nodes.read(parsed["config"], packages)
    if not isinstance(config, fdl.Buildable):
        raise damaged("config", "expected a Config or Partial")
    _check_parameters(config)
    return LoadedConfig(config, experiment, tuple(overrides))


def config_lines(config: fdl.Config) -> list[str]:
    """Returns a line `path=value` for each field, quoted so that it can be pasted after `--set`.

    Fields without a value, which are passed by the caller of the function, are omitted.
    """
    return [f"{path}={shlex.quote(text)}" for path, text in _texts(config).items()]


def config_values(config: fdl.Config) -> dict[str, str | int | float | bool]:
    """Returns all field values, keyed by path. All values except numbers and booleans are text."""
    values = {field.path: field.value for field in iterate_fields(config)}
    return {
        path: values[path] if isinstance(values[path], bool | int | float) else text
        for path, text in _texts(config).items()
    }


def config_difference(old: fdl.Config, new: fdl.Config) -> list[str]:
    """Returns a line such as 'run.seed: 0 -> 7' for each field that differs."""
    before, after = _texts(old), _texts(new)

    def value_text(texts: dict[str, str], path: str) -> str:
        below = any(other.startswith((f"{path}.", f"{path}[")) for other in texts)
        return texts.get(path, "(below)" if below else "(absent)")

    return [
        f"{path}: {value_text(before, path)} -> {value_text(after, path)}"
        for path in dict.fromkeys([*after, *before])
        if before.get(path) != after.get(path)
    ]


def _texts(config: fdl.Config) -> dict[str, str]:
    texts = (
        (field.path, text_of_value(field.value, field.annotation))
        for field in iterate_fields(config)
    )
    return {path: text for path, text in texts if text is not None}


def _check_parameters(config: fdl.Config) -> None:
    """Checks that the functions in a config still have the parameters that the config sets."""
    below = ((f"{field.path}.", field.value) for field in iterate_fields(config))
    for prefix, value in (("", config), *below):
        if not isinstance(value, fdl.Buildable):
            continue
        function = fdl.get_callable(value)
        for name in (key for key in value.__arguments__ if isinstance(key, str)):
            try:
                value.__signature_info__.validate_param_name(name, function)
            except AttributeError:
                path = shortened(f"{prefix}{name}", 300)
                raise ConfigError(
                    f"{path}: config.json sets this parameter, but {callable_name(function)} no "
                    "longer has it. Restore the code, or start a new job."
                ) from None
