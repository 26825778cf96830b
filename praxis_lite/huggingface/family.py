"""Translates a config.json to `DecoderSettings` by the table of its family."""

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
    few,
    require,
    require_choice,
    shown,
)
from praxis_lite.huggingface.decoder_settings import DecoderSettings

__all__ = ("family_of", "settings_in")

VALUES = ("constants", "defaults")  # Parts of a table in which false is a value.
_MERGED = ("settings", "unused", "only", "reasons", "read_as", *VALUES, "tensors")
EMBEDDING, HEAD = "embedding", "head"


class Entry(NamedTuple):
    """An entry of a family's [tensors]: the weights that a tensor consists of.

    In a table it is the path of a weight, a list of paths, or a table with these fields.

    Attributes:
      to: paths of our weights: within a layer if the tensor's name has {layer}, else within the
        model; or EMBEDDING or HEAD, which are the same weight in a tied model. Several weights are
        concatenated along their outputs.
      dims: the dims of the tensor by the names of our weight's dims, "embed (heads head_dim)";
        None: `form_of` infers them.
      joined: how several weights alternate in the tensor instead. "heads": each head has its part
        of each weight; "interleaved": consecutive entries of the last dim are of different weights.
    """

    to: tuple[str, ...]
    dims: str | None = None
    joined: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A table of `families/`, merged into the table that it extends; false removes an entry.

    Attributes:
      name: of the file.
      architectures: the classes of transformers that it describes.
      settings: by field of config.json, one or several names of `DecoderSettings`.
      unused: by field, why it is ignored; the user is told if the field is set.
      only: by field, the supported values, which all compute the same; empty: any value.
      reasons: by field of `only`, why other values are not supported.
      read_as: by field, values that stand for another value.
      constants: settings that the family fixes.
      defaults: settings for fields that config.json lacks, as the class in transformers has them.
      tensors: by name in the checkpoint, the weights that a tensor consists of.
      without_effect: fields that change nothing of what is computed.
      refused: by field, what to do if it is set.
      null_is_none: fields whose null is a value; elsewhere null is as if the field were not there.
      harmless, harmless_prefixes: fields of fine-tunes that are ignored and logged.
      inputs_first: matrices are stored [in, out], unlike those of a PyTorch Linear.
      optional_prefix: of tensors' names, which some checkpoints lack.
      skipped: tensors that are not weights.
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
        """Returns the settings for the fields of a config.json.

        Raises:
          ConfigError: a field is missing, unknown, has an unsupported value, or contradicts another
            one.
        """
        self._check_fields(config)
        values = {**self.defaults, **self._values_in(config), **self.constants}
        fields = dataclasses.fields(DecoderSettings)
        missing = [
            self._field_of(field.name) for field in fields
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise ConfigError(f"config.json of {self.name} lacks {', '.join(missing)}.")
        for field in fields:
            require(
                field.name not in values or _has_type(values[field.name], field.type),
                f"config.json: {self._field_of(field.name)}", values.get(field.name),
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
                    f"config.json of {self.name} has the unknown field {shown(field)!r} = "
                    f"{shown(repr(value))}, which might change what is computed."
                    f"{did_you_mean(field[:80], known)} If it does not, remove it from config.json."
                )
            allowed = self.only.get(field)
            if allowed and value is not None:
                require(
                    any(type(value) is type(x) and value == x for x in allowed),
                    f"config.json of {self.name}: {field}", value, " or ".join(map(repr, allowed)),
                    self.reasons.get(field, "No other value is supported."),
                )

    def _values_in(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings by name that a config.json sets."""
        values, field_of = {}, {}
        for field, names in self.settings.items():
            value = config.get(field)
            if value is None and not (field in config and field in self.null_is_none):
                continue
            if value == {}:  # An empty rope_scaling is none in transformers, too.
                continue
            if isinstance(value, str):
                value = self.read_as.get(field, {}).get(value, value)
            for name in [names] if isinstance(names, str) else names:
                if values.setdefault(name, value) != value:
                    raise ConfigError(
                        f"config.json of {self.name}: {field_of[name]} is "
                        f"{shown(repr(values[name]))} and {field} is {shown(repr(value))}, but "
                        "both are names of one setting. Remove the wrong one."
                    )
                field_of[name] = field
        return values

    def _field_of(self, setting: str) -> str:
        """Returns the field of config.json for a setting, or the setting's own name."""
        for field, names in self.settings.items():
            if setting in ([names] if isinstance(names, str) else names):
                return field
        return setting

    def _is_harmless(self, field: str) -> bool:
        return field in self.harmless or field.startswith(self.harmless_prefixes)

    def ignored_fields(self, config: Mapping[str, Any]) -> list[str]:
        """Returns a message for each ignored field of a config.json that asks for something."""
        lines = [
            f"config.json: {field} = {config[field]!r} is ignored: {why}"
            for field, why in self.unused.items() if config.get(field)
        ]
        harmless = [
            field for field, value in config.items()
            if value is not None and self._is_harmless(field)
        ]
        if harmless:
            lines.append(
                f"config.json: {few(harmless, 8)}: ignored, because they describe sampling or the "
                "program that wrote the file"
            )
        return lines


def _has_type(value: Any, annotation: Any) -> bool:
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else [annotation]
    for kind in kinds:
        kind = typing.get_origin(kind) or kind
        # In Python a bool is an int, an int no float, and a str a Sequence; in JSON it is not so.
        if kind in (bool, int, str) or isinstance(value, bool | str):
            is_right = type(value) is kind
        else:
            is_right = isinstance(value, (int, float) if kind is float else kind)
        if is_right:
            return True
    return False


def settings_in(directory: str | os.PathLike[str]) -> DecoderSettings:
    """Returns the settings of the model in a directory.

    Raises:
      ConfigError: there is no config.json, or it has an unknown field or value.
    """
    config = read_config(Path(directory))
    return family_of(config).decoder_settings(config)


@functools.cache
def families() -> dict[str, Family]:
    """Returns all families by the architectures that they describe."""
    result = {}
    for file in resources.files(__package__).joinpath("families").iterdir():
        name = file.name.removesuffix(".toml")
        if file.name.endswith(".toml") and name != "common":
            family = _family(name)
            result |= dict.fromkeys(family.architectures, family)
    return result


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json.

    Raises:
      ConfigError: its architecture is in no table; names the known ones.
    """
    named = config.get("architectures")
    require(
        isinstance(named, list) and len(named) == 1, "config.json: architectures", named,
        "a list of one name, such as ['LlamaForCausalLM']",
    )
    require_choice("config.json: architectures", named[0], sorted(families()))
    return families()[named[0]]


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the fields of a directory's config.json.

    Raises:
      ConfigError: there is none, or it is not a JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} has no config.json. Name the directory of a Hugging Face model, with "
            "config.json and model.safetensors in it."
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
        name, tuple(table["architectures"]), **merged,
        without_effect=frozenset(common["without_effect"]), refused=common["refused"],
        null_is_none=frozenset(common["null_is_none"]),
        harmless=frozenset(common["harmless"]["fields"]),
        harmless_prefixes=tuple(common["harmless"]["prefixes"]),
        inputs_first=table.get("inputs_first", False),
        optional_prefix=table.get("optional_prefix", ""),
        skipped=(*table.get("skipped", ()), *common["skipped"]),
    )


def _entry(given: Any, where: str) -> Entry:
    fields = {**given} if isinstance(given, dict) else {"to": given}
    to = fields.pop("to")
    entry = Entry((to,) if isinstance(to, str) else tuple(to), **fields)
    if entry.joined is not None:
        require_choice(f"{where}: joined", entry.joined, ("heads", "interleaved"))
    return entry


def _merged(name: str) -> dict[str, Any]:
    table = _table(name)
    if "extends" not in table:
        return table
    base = _merged(table.pop("extends"))
    merged, left_out = {}, table.pop("without_defaults", ())
    for name in left_out:
        del base["defaults"][name]
    for part in _MERGED:
        entries = {**base.get(part, {}), **table.get(part, {})}
        merged[part] = {key: x for key, x in entries.items() if x is not False or part in VALUES}
    return {**base, **table, **merged}


def _table(name: str) -> dict[str, Any]:
    file = resources.files(__package__).joinpath("families", f"{name}.toml")
    return tomllib.loads(file.read_text("utf-8"))
