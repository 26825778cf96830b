"""Names of XLA options in the installed compiler, and replacements for removed options."""

import difflib
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

from praxis_lite.core.errors import ConfigError, did_you_mean, first_few

__all__ = ("check_environment",)

# Environment variables with XLA options, and the package whose library reads them. XLA terminates
# the process if a name is unknown.
_PACKAGES = {"XLA_FLAGS": "jaxlib", "LIBTPU_INIT_ARGS": "libtpu"}

_PIPELINED = tuple(f"xla_gpu_pipeline_{x}" for x in ("all_gather", "all_reduce", "reduce_scatter"))
_IS_MODE = (
    "is now {}, with the values COLLECTIVE_PIPELINING_MODE_ON and COLLECTIVE_PIPELINING_MODE_OFF "
    "(on and off in XLA_FLAGS)"
)
_IS_ASYNC = "was removed: all collectives are asynchronous, except those listed in {}"
# Maps each removed option to an explanation, and to the current names that replace {} in it.
# Sources: openxla/xla#45836 (July 2026) for the pipelined options, and the comments "Was ..." in
# xla/xla.proto of openxla/xla at 00987f6.
REMOVED_OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name.replace("pipeline", "enable_pipelined"): (_IS_MODE, (name,)) for name in _PIPELINED},
    "xla_gpu_enable_pipelined_collectives": (_IS_MODE, _PIPELINED),
    **{
        f"xla_gpu_enable_async_{kind}": (_IS_ASYNC, ("xla_gpu_disable_async_collectives",))
        for kind in (
            "all_gather",
            "all_reduce",
            "all_to_all",
            "collective_broadcast",
            "collective_permute",
            "collectives",
            "reduce_scatter",
        )
    },
    "xla_gpu_graph_level": (
        "was removed: {} lists the commands to record, and '' is the same as level 0",
        ("xla_gpu_enable_command_buffer",),
    ),
    "xla_detailed_logging_and_dumping": (
        "is now {}",
        ("xla_detailed_logging", "xla_enable_dumping"),
    ),
    "xla_gpu_deterministic_reductions": ("is now part of {}", ("xla_gpu_deterministic_ops",)),
    "xla_use_shardy": ("is now the setting jax_use_shardy_partitioner of jax.config", ()),
}


def unknown_option_message(
    name: str, package: str, is_option: Callable[[str], bool] = lambda name: True
) -> str:
    """Returns a message that reports an unknown XLA option and suggests replacements.

    Args:
      name: The unknown option.
      package: The package that contains the compiler: "jaxlib" or "libtpu".
      is_option: Returns whether the compiler accepts a name. By default, any name is suggested.
    """
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    message = f"{name} is not an option of XLA in {package} {version}."
    if name in REMOVED_OPTIONS:
        change, names = REMOVED_OPTIONS[name]
        return f"{message} It {change.format(' and '.join(names))}."
    if any(re.finditer(name.encode() + rb"(?![a-z_])", _library(package) or b"")):
        message += " It was removed from XLA."
    similar = difflib.get_close_matches(name, option_names(package) - {name}, 9, 0.8)
    return f"{message}{did_you_mean(name, filter(is_option, similar))}"


def check_environment() -> None:
    """Checks the names of options in XLA_FLAGS and LIBTPU_INIT_ARGS.

    XLA terminates the process if a name is unknown.

    Raises:
      ConfigError: Options do not exist in the compiler's library. The message lists all of them.
    """
    for variable, package in _PACKAGES.items():
        given = dict.fromkeys(re.findall(r"(?:^|\s)--(xla_\w+)", os.environ.get(variable, "")))
        library = _library(package) if given else None
        if library and (unknown := [x for x in given if not _is_in(library, x.encode())]):
            sentences = " ".join(unknown_option_message(name, package) for name in unknown)
            raise ConfigError(
                f"Environment variable {variable}: {sentences} Remove {first_few(unknown)} from "
                f"{variable}."
            )


@functools.cache
def option_names(package: str) -> frozenset[str]:
    """Returns the strings in a compiler's library that may be option names; takes half a second.

    Some of the strings are not option names, but only XLA itself can tell which.
    """
    library = _library(package) or b""
    matches = re.finditer(rb"xla_[a-z0-9_]+", library)
    names = {x[0] for x in matches if not _is_reserved(library, x.start(), x[0])}
    # A trailing "8" may be the tag of the next protobuf field.
    return frozenset(name.decode() for name in names if name[:-1] not in names)


def _is_in(library: mmap.mmap, name: bytes) -> bool:
    """Returns whether a library contains a name that does not belong to a removed option."""
    matches = re.finditer(re.escape(name) + rb"(?![a-z_])", library)
    return any(not _is_reserved(library, match.start(), name) for match in matches)


def _is_reserved(library: mmap.mmap | bytes, start: int, name: bytes) -> bool:
    """Returns whether the name at `start` is a reserved field name of DebugOptions.

    The library contains the protobuf descriptor of DebugOptions, which stores reserved names in
    field 10.
    """
    return library[start - 2 : start] == b"R%c" % (len(name) % 256)


@functools.cache
def _library(package: str) -> mmap.mmap | None:
    """Memory-maps XLA's library, a package's largest file; returns None without the package."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in Path(folder).glob("*") if path.is_file()]
    if not files:
        return None
    with max(files, key=lambda path: path.stat().st_size).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
