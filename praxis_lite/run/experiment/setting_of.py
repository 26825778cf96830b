"""The settings that an error is about: the names in it are looked for in the config."""

import contextlib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import fiddle as fdl

from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, few, printable
from praxis_lite.host.optional_packages import MissingPackage, install_line, is_installed
from praxis_lite.run.config.paths import iterate_fields

_MARKS = "'\"`,;:.()[]"
# What Fiddle appends to an exception of a constructor.
_FIDDLE = "\n\nFiddle context:"
# A message that names more settings lists the names there are.
_MOST_MENTIONED = 3
# Packages that classes and values of a config need, by their names.
_PACKAGES_OF_CLASSES = {
    f"praxis_lite.{place}.{name}": package
    for place, name, package in (
        ("run.trackers.mlflow", "MLflow", "mlflow"),
        ("run.trackers.weights_and_biases", "WeightsAndBiases", "wandb"),
        ("inputs.sources.hub", "Tfds", "tensorflow_datasets"),
        ("inputs.sources.records", "TfRecords", "google_crc32c"),
        ("inputs.sources.folders", "ImageFiles", "PIL"),
    )
}
_PACKAGES_OF_VALUES = {
    ("quantization", "int8"): "qwix", ("quantization", "float8"): "qwix",
    ("atten_kernel", "tokamax"): "tokamax", ("expert_kernel", "tokamax"): "tokamax",
}
_SHORTEST = 3  # A text of fewer characters stands in many messages by chance.


@contextlib.contextmanager
def naming_settings(config: fdl.Buildable, recorded: Path | None = None) -> Iterator[None]:
    """Adds to a ConfigError the settings that it is about, as `--set` names them.

    For an error about a file they are the fields that name the file.

    Args:
      recorded: the config.json that the config was read from. An error about a setting then says
        that this file was read, and not the experiment's class. None: the class made the config.
    """
    try:
        yield
    except ConfigError as error:
        message, fiddle, context = str(error).partition(_FIDDLE)
        if isinstance(error, MissingPackage):
            message += _other_packages(config, error.package)
        paths = settings_named(config, message)
        if paths and not any(path in message for path in paths):
            message += f" (Set by {few(paths)}.)"
        if recorded is not None and recorded.name not in message:
            message += _of_recorded(config, message, paths, recorded)
        error.args = (f"{message}{fiddle}{context}", *error.args[1:])
        raise


def _other_packages(config: fdl.Buildable, package: str) -> str:
    """Returns a note on other missing packages and the command that installs all, or ""."""
    needed = {package: None}
    for field in iterate_fields(config):
        if isinstance(field.value, fdl.Buildable):
            needed[_PACKAGES_OF_CLASSES.get(callable_name(fdl.get_callable(field.value)))] = None
        elif isinstance(field.value, str):
            last = field.path.rpartition(".")[2]
            needed[_PACKAGES_OF_VALUES.get((last, field.value))] = None
            if last == "init_from_huggingface":
                needed["safetensors"] = None
            if last == "tokenizer":
                needed["tokenizers"] = None
    missing = [name for name in needed if name and (name == package or not is_installed(name))]
    if missing == [package]:
        return ""
    return (
        f" The config also needs {', '.join(missing[1:])}, not installed either. For all: "
        f"{install_line(missing)}."
    )


def _of_recorded(
    config: fdl.Buildable, message: str, paths: Sequence[str], recorded: Path
) -> str:
    """Returns a sentence that names the config a message is about and how to change it, or ""."""
    paths = paths or settings_mentioned(config, message)
    has_set = "--set" in message
    if not has_set and not 0 < len(paths) <= _MOST_MENTIONED:
        return ""
    here = ""
    if not has_set and paths[0] not in ("datasets", "decode_datasets"):
        here = f"--set {paths[0]}=VALUE (in Python settings=) changes it for this call; "
    return (
        f" Settings are read from {printable(str(recorded))}, which training wrote, and not from "
        f"the experiment's class: {here}to record a change of the class, launch --mode=train again."
    )


def settings_mentioned(config: fdl.Buildable, message: str) -> Sequence[str]:
    """Returns the paths of the settings that a message names, as `Sample.k` or `eos_id`."""
    fields = [field.path for field in iterate_fields(config)]
    found: dict[str, None] = {}
    for token in re.findall(r"[A-Za-z_][\w.]*\w", message):
        first, _, rest = token.partition(".")
        name = token.rpartition(".")[2]
        if not rest and "_" not in name and name != "datasets":
            continue  # An ordinary word.
        here = [path for path in fields if path == token] or [
            path for path in fields if path.rpartition(".")[2] == name
        ]
        # A key that a dict lacks, such as inputs_split_mapping.map_1d.
        lacking = [f"{path}.{rest}" for path in fields if path.rpartition(".")[2] == first]
        found |= dict.fromkeys(here or (lacking if rest else ()))
    return list(found)


def settings_named(config: fdl.Buildable, message: str) -> Sequence[str]:
    """Returns the paths of the fields whose value, a path or a glob, stands in a message."""
    words = [word.strip(_MARKS) for word in message.split()]
    return [
        field.path for field in iterate_fields(config)
        if isinstance(field.value, str) and len(field.value) >= _SHORTEST
        and ("/" in field.value or field.path.endswith((".files", ".path")))
        and _is_named(field.value, message, words)
    ]


def _is_named(value: str, message: str, words: Sequence[str]) -> bool:
    if printable(value) in message:
        return True
    patterns = [pattern.strip() for pattern in value.split(",")]
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns for word in words)
