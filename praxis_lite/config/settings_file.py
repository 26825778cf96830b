"""Reads settings from a file (`--config`): lines as in a job's config.txt, or YAML."""

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.host.file_reading import has_extension

_YAML = (".yaml", ".yml")


class SettingInFile(str):
    """A setting `path=value` from a file.

    Attributes:
      location: The file and the number of the line, for error messages.
    """

    location: str = ""


def settings_in_file(file: Path) -> list[SettingInFile]:
    """Reads the settings in a file.

    Args:
      file: A file with lines `path=value`, quoted as in a shell, in which lines that start with #
        are comments. FILE.yaml and FILE.yml contain a mapping from paths to values instead; a
        nested mapping contains the fields below its path.

    Raises:
      ConfigError: The file cannot be read, or a line does not have this form. The message contains
        the number of the line.
    """
    if has_extension(file, ".json"):
        raise ConfigError(
            f"--config={file} is JSON; expected lines path=value or FILE.yaml. A job's config.txt, "
            "next to its config.json, contains all of its settings."
        )
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--config={file} cannot be read: {getattr(error, 'strerror', None) or error}. Specify "
            "a file with settings, such as the config.txt of a job."
        ) from None
    return list(_in_yaml(file, text) if has_extension(file, *_YAML) else _in_lines(file, text))


def _in_lines(file: Path, text: str) -> Iterator[SettingInFile]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise _malformed(file, number, f"{shortened(line)}: {error}") from None
        if len(words) != 1 or "=" not in words[0]:
            raise _malformed(file, number, shortened(line))
        yield _setting(words[0], file, number)


def _setting(text: str, file: Path, line: int) -> SettingInFile:
    setting = SettingInFile(text)
    setting.location = f"{file}, line {line}"
    return setting


def _malformed(file: Path, number: int, found: str) -> ConfigError:
    return ConfigError(
        f"{file}, line {number}: {found}; expected path=value, such as run.seed=7. Quote values "
        "with spaces, as in a shell."
    )


def _in_yaml(file: Path, text: str) -> Iterator[SettingInFile]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{file}{line}: {error.problem}. Correct the YAML.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {error}. Correct the YAML.") from None
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{file}, line {node.start_mark.line + 1}: expected a mapping from paths to values, "
            "such as `run.seed: 7`."
        )
    _require_unique_keys(file, node)
    yield from _fields(file, node, "")


def _require_unique_keys(file: Path, node: yaml.Node) -> None:
    """Raises ConfigError if a mapping repeats a key, all but the last of which would be ignored."""
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        first_keys: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            first = first_keys.setdefault(key.value, key) if isinstance(key.value, str) else key
            if first is not key:
                raise ConfigError(
                    f"{file}, line {key.start_mark.line + 1}: the key {shortened(key.value)!r} is "
                    f"also on line {first.start_mark.line + 1}. Remove one of them."
                )
        children = [value for _, value in node.value]
    for child in children:
        _require_unique_keys(file, child)


def _fields(file: Path, mapping: yaml.MappingNode, prefix: str) -> Iterator[SettingInFile]:
    for key, value in mapping.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or not key.value:
            raise ConfigError(f"{file}, line {line}: the key is not a name, such as run.seed.")
        path = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _fields(file, value, f"{path}.")
        else:
            yield _setting(f"{path}={_text(value)}", file, line)


def _text(node: yaml.Node) -> str:
    """Formats a YAML value as the value of a `--set` option."""
    value = _value(node)
    # A quoted number is a string. Other text is not quoted, because it may name a function.
    is_text = isinstance(value, str) and _literal(value) == value
    return value if is_text else repr(value)


def _value(node: yaml.Node) -> Any:
    """Returns the Python value of a node; sequences become tuples."""
    if isinstance(node, yaml.SequenceNode):
        return tuple(_value(item) for item in node.value)
    if isinstance(node, yaml.MappingNode):
        return {_value(key): _value(value) for key, value in node.value}
    if node.tag == "tag:yaml.org,2002:null":
        return None
    if node.tag == "tag:yaml.org,2002:bool":
        return node.value.lower() in ("true", "yes", "on")
    # YAML 1.1 reads 1e-3 as a string, so read plain scalars as Python does.
    return _literal(node.value) if node.style is None else node.value


def _literal(text: str) -> Any:
    """Parses a Python literal, such as a number; returns any other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
