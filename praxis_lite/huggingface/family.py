"""Converts config.json to `DecoderSettings`, using the TOML table of the model's family."""

import dataclasses
import functools
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from praxis_lite.core.errors import (
    ConfigError,
    did_you_mean,
    first_few,
    require,
    require_choice,
    shortened,
)
from praxis_lite.huggingface.decoder_settings import DecoderSettings
from praxis_lite.huggingface.tensors.tensor_files import model_folder

__all__ = ("family_of", "settings_in")

VALUES = ("constants", "defaults")  # Sections of a table in which false does not remove an entry.
_MERGED = ("settings", "unused", "only", "reasons", "read_as", *VALUES, "tensors")
EMBEDDING, HEAD = "embedding", "head"


class Entry(NamedTuple):
    """An entry in a family's [tensors] section, which lists the weights that a tensor contains.

    In TOML, an entry is the path of a weight, a list of paths, or a table with these fields.

    Attributes:
      to: Paths of our weights, relative to the layer if the tensor's name contains {layer},
        otherwise relative to the model. Or EMBEDDING or HEAD, which are the same weight in a tied
        model. Several weights are concatenated along their output dim unless `joined` is set.
      dims: Dims of the tensor in terms of our weight's dims, such as "embed (heads head_dim)". If
        None, `form_of` infers them.
      joined: How several weights are interleaved. With "heads", the slices of every weight for one
        head are followed by the slices for the next head; with "interleaved", consecutive entries
        of the last dim belong to different weights.
    """

    to: tuple[str, ...]
    dims: str | None = None
    joined: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A table in `families/`, merged with the table that it extends.

    In a table that extends another one, the value false removes an entry.

    Attributes:
      name: Name of the TOML file.
      architectures: Names of the classes in transformers that the table describes.
      settings: One or more `DecoderSettings` names for each field of config.json.
      unused: Maps ignored fields to the reason, which is logged if the field is set.
      only: Supported values per field, none of which changes the results. An empty list allows any
        value.
      reasons: Reasons why other values of a field in `only` are not supported.
      read_as: Synonyms for values, keyed by field.
      constants: Settings that are fixed for the family.
      defaults: Settings for fields that config.json omits, as in the class in transformers.
      tensors: The weights that each tensor in a checkpoint contains.
      without_effect: Fields that do not change the results.
      refused: Maps unsupported fields to instructions.
      null_is_none: Fields for which null is a value. Other fields with null are treated as absent.
      harmless: Fields in fine-tuned models that are ignored and logged.
      harmless_prefixes: Prefixes of such fields.
      inputs_first: Whether matrices are stored as [in, out], unlike in PyTorch's Linear.
      optional_prefix: Prefix of tensor names that some checkpoints omit.
      skipped: Patterns of tensors that are not weights.
    """

    name: str
    architectures: tuple[str, ...]
    settings: Mapping[str, str | list[str]]
    unused: Mapping[str, str]
    only: Mapping[str, list[Any]]
    reasons: Mapping[str, str]
    read_as: Mapping[str, Mapping[str, str]]
    constants: Mapping[str, Any]
    defaults: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    without_effect: frozenset[str]
    refused: Mapping[str, str]
    null_is_none: frozenset[str]
    harmless: frozenset[str]
    harmless_prefixes: tuple[str, ...]
    inputs_first: bool = False
    optional_prefix: str = ""
    skipped: tuple[str, ...] = ()

    def decoder_settings(self, config: Mapping[str, Any]) -> DecoderSettings:
        """Converts the fields of a config.json to settings.

        Raises:
          ConfigError: A field is missing or unknown, has an unsupported value, or contradicts
            another field.
        """
        self._check_fields(config)
        # The family's constants override config.json, which overrides the family's defaults.
        values = {**self.defaults, **self._values_in(config), **self.constants}
        fields = dataclasses.fields(DecoderSettings)
        missing = [
            self._field_of(field.name)
            for field in fields
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise ConfigError(f"config.json of {self.name} lacks {', '.join(missing)}.")
        for field in fields:
            require(
                field.name not in values or _has_type(values[field.name], field.type),
                f"config.json: {self._field_of(field.name)}",
                values.get(field.name),
                re.sub(r"[a-z_.]+\.", "", getattr(field.type, "__name__", str(field.type))),
            )
        return DecoderSettings(**values)

    def _check_fields(self, config: Mapping[str, Any]) -> None:
        known = {*self.settings, *self.unused, *self.refused, *self.only, *self.without_effect}
        for field, value in config.items():
            if field in self.refused and value:
                raise ConfigError(f"config.json of {self.name} has {field}: {self.refused[field]}")
            if field not in known and value is not None and not self._is_harmless(field):
                raise ConfigError(
                    f"config.json of {self.name} has the unknown field {shortened(field)!r} = "
                    f"{shortened(repr(value))}, which might affect the results."
                    f"{did_you_mean(field[:80], known)} If the field has no effect, remove it from "
                    "config.json."
                )
            allowed = self.only.get(field)
            if allowed and value is not None:
                require(
                    any(type(value) is type(x) and value == x for x in allowed),
                    f"config.json of {self.name}: {field}",
                    value,
                    " or ".join(map(repr, allowed)),
                    self.reasons.get(field, "No other value is supported."),
                )

    def _values_in(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that a config.json sets, keyed by name."""
        values: dict[str, Any] = {}
        field_of: dict[str, str] = {}
        for field, names in self.settings.items():
            value = config.get(field)
            if value is None and not (field in config and field in self.null_is_none):
                continue
            if value == {}:  # transformers treats an empty rope_scaling as null.
                continue
            if isinstance(value, str):
                value = self.read_as.get(field, {}).get(value, value)
            for name in [names] if isinstance(names, str) else names:
                if values.setdefault(name, value) != value:
                    raise ConfigError(
                        f"config.json of {self.name}: {field_of[name]} is "
                        f"{shortened(repr(values[name]))}, but {field}, which means the same, is "
                        f"{shortened(repr(value))}. Remove the wrong field."
                    )
                field_of[name] = field
        return values

    def _field_of(self, setting: str) -> str:
        """Returns the config.json field for a setting, or the name of the setting."""
        for field, names in self.settings.items():
            if setting in ([names] if isinstance(names, str) else names):
                return field
        return setting

    def _is_harmless(self, field: str) -> bool:
        return field in self.harmless or field.startswith(self.harmless_prefixes)

    def ignored_fields(self, config: Mapping[str, Any]) -> list[str]:
        """Returns messages about the fields of a config.json that are set but ignored."""
        lines = [
            f"config.json: {field} = {config[field]!r} is ignored: {why}"
            for field, why in self.unused.items()
            if config.get(field)
        ]
        harmless = [
            field
            for field, value in config.items()
            if value is not None and self._is_harmless(field)
        ]
        if harmless:
            lines.append(
                f"config.json: ignored {first_few(harmless, 8)}, which only describe sampling or "
                "the program that wrote the file"
            )
        return lines


def _has_type(value: Any, annotation: Any) -> bool:
    """Returns whether a JSON value has the annotated type of a setting."""
    is_union = isinstance(annotation, types.UnionType)
    for expected in typing.get_args(annotation) if is_union else [annotation]:
        expected = typing.get_origin(expected) or expected
        # Unlike isinstance, accept an int as a float, but not a bool as an int or a str as a
        # Sequence.
        if expected in (bool, int, str) or isinstance(value, bool | str):
            matches = type(value) is expected
        else:
            matches = isinstance(value, (int, float) if expected is float else expected)
        if matches:
            return True
    return False


def settings_in(directory: str | os.PathLike[str]) -> DecoderSettings:
    """Reads the settings of a model from its config.json.

    Args:
      directory: Directory of the model, or hf://org/name[@revision] on the Hugging Face Hub.

    Raises:
      ConfigError: There is no config.json, or it contains an unknown field or value.
    """
    config = read_config(model_folder(directory, with_weights=False))
    return family_of(config).decoder_settings(config)


@functools.cache
def families() -> dict[str, Family]:
    """Loads all tables of `families/`, keyed by architecture."""
    family_by_architecture: dict[str, Family] = {}
    for file in resources.files(__package__).joinpath("families").iterdir():
        name = file.name.removesuffix(".toml")
        if file.name.endswith(".toml") and name != "common":
            family = _family(name)
            family_by_architecture |= dict.fromkeys(family.architectures, family)
    return family_by_architecture


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the model family for the architecture named in a config.json.

    Raises:
      ConfigError: No table describes the architecture. The message lists known architectures.
    """
    architectures = config.get("architectures")
    is_single = isinstance(architectures, list) and len(architectures) == 1
    expected = "a list with one name, such as ['LlamaForCausalLM']"
    require(is_single, "config.json: architectures", architectures, expected)
    (architecture,) = config["architectures"]
    known = sorted(families())
    # Similar names are not suggested, because the names of unrelated architectures are similar.
    require(
        architecture in known,
        "config.json: architectures",
        architectures,
        f"one of {', '.join(known)}",
        "Use a model with one of these architectures, or add a family: see docs/how_to_add.md.",
    )
    return families()[architecture]


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the fields of the config.json in a directory.

    Raises:
      ConfigError: The file is missing or unreadable, or is not a JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} has no config.json. Specify the directory of a Hugging Face model, which "
            "contains config.json and model.safetensors."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    require(isinstance(config, dict), str(path), type(config).__name__, "an object of fields")
    return config


def _family(name: str) -> Family:
    table = _merged(name)
    common = _table("common")
    merged = {part: table.get(part, {}) for part in _MERGED}
    merged["tensors"] = {
        tensor: _entry(entry, f"The table of {name}: {tensor}")
        for tensor, entry in merged["tensors"].items()
    }
    return Family(
        name,
        tuple(table["architectures"]),
        **merged,
        without_effect=frozenset(common["without_effect"]),
        refused=common["refused"],
        null_is_none=frozenset(common["null_is_none"]),
        harmless=frozenset(common["harmless"]["fields"]),
        harmless_prefixes=tuple(common["harmless"]["prefixes"]),
        inputs_first=table.get("inputs_first", False),
        optional_prefix=table.get("optional_prefix", ""),
        skipped=(*table.get("skipped", ()), *common["skipped"]),
    )


def _entry(value: Any, where: str) -> Entry:
    """Parses an entry of [tensors]; `where` identifies the entry in error messages."""
    fields = {**value} if isinstance(value, dict) else {"to": value}
    to = fields.pop("to")
    entry = Entry((to,) if isinstance(to, str) else tuple(to), **fields)
    if entry.joined is not None:
        require_choice(f"{where}: joined", entry.joined, ("heads", "interleaved"))
    return entry


def _merged(name: str) -> dict[str, Any]:
    """Returns the table of a family, merged with all tables that it extends."""
    table = _table(name)
    if "extends" not in table:
        return table
    base = _merged(table.pop("extends"))
    merged = {}
    for setting in table.pop("without_defaults", ()):
        del base["defaults"][setting]
    for part in _MERGED:
        entries = {**base.get(part, {}), **table.get(part, {})}
        # An entry that is false removes the entry of the base table, except in VALUES.
        merged[part] = {key: x for key, x in entries.items() if x is not False or part in VALUES}
    return {**base, **table, **merged}


def _table(name: str) -> dict[str, Any]:
    file = resources.files(__package__).joinpath("families", f"{name}.toml")
    return tomllib.loads(file.read_text("utf-8"))
