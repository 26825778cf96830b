"""Builds the objects that a config describes, and adds config paths to error messages."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

import fiddle as fdl

from praxis_lite.config.paths import iterate_fields
from praxis_lite.core.errors import ConfigError, first_few, printable, shortened
from praxis_lite.core.user_lines import LIBRARY_FOLDERS, user_line
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.host.optional_packages import (
    MissingPackage,
    NeedsPackage,
    install_line,
    is_installed,
)
from praxis_lite.host.user_errors import first_paragraph

__all__ = ("build",)

# The text that Fiddle appends to an exception raised by a constructor.
_FIDDLE = "\n\nFiddle context:"
_FAILED = re.compile(r"\n\nFiddle context: failed to construct or call (.+?) at <root>(\S*) with ")


def build(config: fdl.Config) -> Any:
    """Builds the object that a config describes.

    Raises:
        ConfigError: A class or function in an installed package rejects its arguments, or a class
            does not implement abstract methods. The message contains the path. Exceptions from the
            user's or the library's code are raised unchanged.
    """
    try:
        return fdl.build(config)
    except Exception as error:
        match = _FAILED.search(str(error))
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        is_ours = isinstance(error, ConfigError) or innermost.startswith(LIBRARY_FOLDERS)
        if not match or is_ours or user_line(error):
            raised = _without_fiddle(error)
            raise raised.with_traceback(error.__traceback__) from raised.__cause__
        name, path = match.groups()
        path = path.lstrip(".").replace("['", ".").replace("']", "")
        message = first_paragraph(error)
        hint = "Fix the class, or its arguments in the experiment."
        if "'rngs'" in message:
            hint = f"It is called with rngs later, so use fdl.Partial({name}, ...) instead."
        raise ConfigError(
            f"{path}: {name} cannot be built: {shortened(message, 1000).rstrip('.')}. {hint}"
        ) from error


# Optional packages that settings require, keyed by (last component of the path, value). The value
# "" matches any value. Classes specify their packages as subclasses of NeedsPackage.
_PACKAGES_OF_SETTINGS = {
    ("quantization", "int8"): "qwix",
    ("quantization", "float8"): "qwix",
    ("atten_kernel", "tokamax"): "tokamax",
    ("expert_kernel", "tokamax"): "tokamax",
    ("init_from_huggingface", ""): "safetensors",
    ("tokenizer", ""): "tokenizers",
}


@contextlib.contextmanager
def naming_settings(config: fdl.Buildable, recorded: AnyPath | None = None) -> Iterator[None]:
    """Adds details from the config to any ConfigError that is raised in the context.

    For an error about a file, these are the paths of the settings that contain the file. For a
    missing package, these are the other missing packages that the config requires. For a setting,
    this is the file from which the setting was read.

    Args:
      config: The config.
      recorded: The config.json from which `config` was read, or None if an experiment created it.
    """
    try:
        yield
    except ConfigError as error:
        # Additions go before Fiddle's text, in which `build` finds the path of the constructor.
        message, fiddle, context = str(error).partition(_FIDDLE)
        if isinstance(error, MissingPackage):
            message += _other_missing_packages(config, error.package)
        paths = [
            field.path
            for field in iterate_fields(config)
            if isinstance(field.value, str) and "/" in field.value and field.value in message
        ]
        if paths and not any(path in message for path in paths):
            message += f" (Set by {first_few(paths)}.)"
        if (
            recorded is not None
            and recorded.name not in message
            and _names_setting(message, config)
        ):
            message += (
                f" Settings are read from {printable(str(recorded))}, which was written by "
                "training, not from the experiment's class. Change them with --set PATH=VALUE (in "
                "Python, settings=), or run `praxis train` again to record changes to the class."
            )
        error.args = (f"{message}{fiddle}{context}", *error.args[1:])
        raise


def _other_missing_packages(config: fdl.Buildable, package: str) -> str:
    """Returns a message about other missing packages and how to install them all, or ""."""
    names: list[str | None] = []
    for field in iterate_fields(config):
        if isinstance(field.value, fdl.Buildable):
            function = fdl.get_callable(field.value)
            if isinstance(function, type) and issubclass(function, NeedsPackage):
                names.append(function.needed_package)
        elif isinstance(field.value, str):
            last_name = field.path.rpartition(".")[2]
            names += [_PACKAGES_OF_SETTINGS.get((last_name, value)) for value in (field.value, "")]
    needed = dict.fromkeys(name for name in names if name is not None and name != package)
    missing = [name for name in needed if not is_installed(name)]
    if not missing:
        return ""
    return (
        f" The config also needs {', '.join(missing)}, which is not installed either. To install "
        f"all: {install_line([package, *missing])}."
    )


def _names_setting(message: str, config: fdl.Buildable) -> bool:
    """Returns whether a message mentions a config field, as a path or as CLASS.FIELD."""
    if "--set" in message:
        return True
    paths = {field.path for field in iterate_fields(config)}
    names = {path.rpartition(".")[2] for path in paths}
    tokens = re.findall(r"[A-Za-z_][\w.]*\w", message)
    return any(
        token in paths or names & set(token.split(".")[:2])
        for token in tokens
        if "." in token or token in ("datasets", "decode_datasets")
    )


def _without_fiddle(error: Exception) -> Exception:
    """Returns the exception raised by a constructor, without Fiddle's proxy around it."""
    while "proxy_base_exception" in vars(error):
        error = vars(error)["proxy_base_exception"]
    return error
