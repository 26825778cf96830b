"""A family's table, applied to a config.json: our settings, or the field that is not understood."""

import dataclasses
import functools
import json
import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean, few, require, shown
from praxis_lite.files.json_text import opened
from praxis_lite.tools.huggingface.entries import Entry, entry_of
from praxis_lite.tools.huggingface.fields.decoder_settings import DecoderSettings
from praxis_lite.tools.huggingface.fields.field_types import check_type
from praxis_lite.tools.huggingface.fields.settings_fit import check_fit

_MAX_BYTES = 16 << 20  # Of a config.json; published ones have a few thousand.
VALUES = ("constants", "defaults")  # Parts of a table in which false is a value.
_MERGED = ("settings", "unused", "only", "reasons", "read_as", *VALUES, "tensors")


@dataclasses.dataclass(frozen=True)
class Family:
    """A table of `families/`, merged into the table that it extends: false takes an entry out.

    Attributes:
      name: of the file.
      architectures: the classes of transformers that it describes.
      settings: by field of config.json, our setting or several, see `DecoderSettings`.
      unused: by field, why it is not followed: said to the user, unless the field asks nothing.
      only: by field, the values that are understood, all of which compute the same; any if empty.
      reasons: by field of `only`, why the other values are refused.
      read_as: by field, values that stand for another one.
      constants: our settings that the family fixes.
      defaults: our settings where config.json lacks the field: those of the family's class in
        transformers, which has them there too.
      tensors: by name in the checkpoint, what it is of our weights.
      inputs_first: matrices are stored [in, out], unlike those of a PyTorch Linear.
      without_effect: fields that change nothing of what is computed.
      refused: by field, what is to be done, where it says anything.
      types: by field, a name of `field_types.TYPES`.
      null_is_none: fields whose null is a value; elsewhere null is as if the field were not there.
      harmless, harmless_prefixes: fields of fine-tunes that pass, and are named in a line.
      optional_prefix: of tensors' names, which some checkpoints lack.
      skipped: tensors that are no weights.
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
    types: Mapping[str, str]
    null_is_none: frozenset[str]
    harmless: frozenset[str]
    harmless_prefixes: tuple[str, ...]
    inputs_first: bool = False
    optional_prefix: str = ""
    skipped: tuple[str, ...] = ()

    def translated(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns our settings by name, given the fields of a config.json.

        Raises:
          ConfigError: a field is not known, has a value that is not understood, or contradicts
            another one.
        """
        known = {*self.settings, *self.unused, *self.refused, *self.only, *self.without_effect}
        for field, value in config.items():
            if field in self.refused and value:
                raise ConfigError(f"config.json of {self.name} has {field}: {self.refused[field]}")
            if field not in known:
                if value is None or self._is_harmless(field):
                    continue
                raise ConfigError(
                    f"config.json of {self.name} has the field {shown(field)!r} = "
                    f"{shown(repr(value))}, which is not known here, and might change what is "
                    f"computed.{did_you_mean(field[:80], known)} If it does not, take it out of "
                    "config.json."
                )
            name = f"config.json of {self.name}: {field}"
            if field in self.types and value is not None:
                check_type(name, value, self.types[field])
            allowed = self.only.get(field)
            if allowed and value is not None:
                require(
                    any(type(value) is type(x) and value == x for x in allowed), name, value,
                    " or ".join(map(repr, allowed)),
                    self.reasons.get(field, "Nothing else is understood here."),
                )
        return {**self.defaults, **self._asked(config), **self.constants}

    def _asked(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns our settings by name that a config.json sets."""
        asked, field_of = {}, {}
        for field, names in self.settings.items():
            value = config.get(field)
            if value is None and not (field in config and field in self.null_is_none):
                continue
            if value == {}:  # A rope_scaling that says nothing is none in transformers, too.
                continue
            if isinstance(value, str):
                value = self.read_as.get(field, {}).get(value, value)
            for name in [names] if isinstance(names, str) else names:
                if asked.setdefault(name, value) != value:
                    raise ConfigError(
                        f"config.json of {self.name}: {field_of[name]} is "
                        f"{shown(repr(asked[name]))} and {field} is {shown(repr(value))}, but both "
                        "are names of one setting. Take out the one that is wrong."
                    )
                field_of[name] = field
        return asked

    def _is_harmless(self, field: str) -> bool:
        return field in self.harmless or field.startswith(self.harmless_prefixes)

    def not_followed(self, config: Mapping[str, Any]) -> list[str]:
        """Returns a line for each field of a config.json that asks for something not done here."""
        lines = [
            f"config.json: {field} = {config[field]!r} is not followed: {why}"
            for field, why in self.unused.items() if config.get(field)
        ]
        passed = [
            field for field, value in config.items()
            if value is not None and self._is_harmless(field)
        ]
        if passed:
            lines.append(
                f"config.json: {few(passed, 8)}: not read, for they say how text is drawn, or what "
                "wrote the file"
            )
        return lines

    def decoder_settings(self, config: Mapping[str, Any]) -> DecoderSettings:
        """Returns the settings that a config.json amounts to.

        Raises:
          ConfigError: a field is missing, not known, or has a value that is not understood.
        """
        translated = self.translated(config)
        required = [
            field.name for field in dataclasses.fields(DecoderSettings)
            if field.default is dataclasses.MISSING
        ]
        if missing := [name for name in required if name not in translated]:
            raise ConfigError(
                f"config.json of {self.name} says nothing of "
                f"{', '.join(map(self.field_of, missing))}."
            )
        settings = DecoderSettings(**translated)
        check_fit(settings, self.field_of)
        return settings

    def field_of(self, setting: str) -> str:
        """Returns the field of config.json that says a setting, or the setting's own name."""
        for field, names in self.settings.items():
            if setting in ([names] if isinstance(names, str) else names):
                return field
        return setting


def settings_in(directory: str | os.PathLike[str]) -> DecoderSettings:
    """Returns the settings of the model in a directory.

    Raises:
      ConfigError: there is no config.json, or it has what is not known here.
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
      ConfigError: there is none for its architecture; names those that there are.
    """
    named = config.get("architectures")
    require(
        isinstance(named, list) and len(named) == 1 and isinstance(named[0], str),
        "config.json: architectures", named,
        "a list of one name, such as ['LlamaForCausalLM']",
    )
    known = families()
    if named[0] not in known:
        raise ConfigError(
            f"config.json: the architecture {shown(named[0])!r} is not known here; known are "
            f"{', '.join(sorted(known))}.{did_you_mean(named[0][:80], known)}"
        )
    return known[named[0]]


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the fields of a directory's config.json.

    Raises:
      ConfigError: there is none, or it is no JSON object.
    """
    path = directory / "config.json"
    try:
        with opened(path) as file:
            config = json.loads(file.read(_MAX_BYTES + 1).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} has no config.json. Name the directory of a model of Hugging Face, with "
            "config.json and model.safetensors in it."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {shown(str(error), 300)}.") from None
    require(isinstance(config, dict), str(path), type(config).__name__, "an object of fields")
    return config


def _family(name: str) -> Family:
    table = _merged(name)
    common = _table("common")
    merged = {part: table.get(part, {}) for part in _MERGED}
    merged["tensors"] = {
        tensor: entry_of(entry, f"The table of {name}: {tensor}")
        for tensor, entry in merged["tensors"].items()
    }
    return Family(
        name, tuple(table["architectures"]), **merged,
        without_effect=frozenset(common["without_effect"]), refused=common["refused"],
        types=common["types"], null_is_none=frozenset(common["null_is_none"]),
        harmless=frozenset(common["harmless"]["fields"]),
        harmless_prefixes=tuple(common["harmless"]["prefixes"]),
        inputs_first=table.get("inputs_first", False),
        optional_prefix=table.get("optional_prefix", ""),
        skipped=(*table.get("skipped", ()), *common["skipped"]),
    )


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
