"""XLA's options by name: those that an installed compiler has, and what became of former ones."""

import difflib
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

from praxis_lite.core.errors import ConfigError, did_you_mean, few

__all__ = ("check_environment",)

# The environment variables that options come from, with the package whose library reads them. XLA
# ends the process at a name that it does not know.
_OF_THE_ENVIRONMENT = {"XLA_FLAGS": "jaxlib", "LIBTPU_INIT_ARGS": "libtpu"}

_PIPELINED = tuple(f"xla_gpu_pipeline_{x}" for x in ("all_gather", "all_reduce", "reduce_scatter"))
_IS_MODE = (
    "is now {}: COLLECTIVE_PIPELINING_MODE_ON or COLLECTIVE_PIPELINING_MODE_OFF, and in XLA_FLAGS "
    "on or off"
)
_IS_ASYNC = "is gone: collectives are asynchronous, but for the kinds in {}"
# What became of options, and today's names, which stand for {}. Sources: openxla/xla#45836 (July
# 2026) of the pipelined ones, and the comments "Was ..." in openxla/xla, xla/xla.proto at 00987f6.
FORMER: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name.replace("pipeline", "enable_pipelined"): (_IS_MODE, (name,)) for name in _PIPELINED},
    "xla_gpu_enable_pipelined_collectives": (_IS_MODE, _PIPELINED),
    **{
        f"xla_gpu_enable_async_{kind}": (_IS_ASYNC, ("xla_gpu_disable_async_collectives",))
        for kind in (
            "all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute",
            "collectives", "reduce_scatter",
        )
    },
    "xla_gpu_graph_level": (
        "is gone: {} lists what is recorded, and '' is level 0", ("xla_gpu_enable_command_buffer",)
    ),
    "xla_detailed_logging_and_dumping": (
        "is now {}", ("xla_detailed_logging", "xla_enable_dumping")
    ),
    "xla_gpu_deterministic_reductions": ("is a part of {}", ("xla_gpu_deterministic_ops",)),
    "xla_use_shardy": ("is jax_use_shardy_partitioner of jax.config", ()),
}


def not_known(
    name: str, package: str, is_option: Callable[[str], bool] = lambda name: True
) -> str:
    """Returns sentences: a package's compiler has no option `name`, and what to say in its place.

    Args:
      package: that the compiler is installed by: "jaxlib" or "libtpu".
      is_option: tells whether the compiler takes a name; if it can be asked.
    """
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    message = f"{name} is no option of XLA in {package} {version}."
    if name in FORMER:
        became, names = FORMER[name]
        return f"{message} It {became.format(' and '.join(names))}."
    if any(re.finditer(name.encode() + rb"(?![a-z_])", _library(package) or b"")):
        message += " XLA had it once."
    near = difflib.get_close_matches(name, names_in(package) - {name}, 9, 0.8)
    return f"{message}{did_you_mean(name, filter(is_option, near))}"


def check_environment() -> None:
    """Checks the options in XLA_FLAGS and LIBTPU_INIT_ARGS, at which XLA would end the process.

    Raises:
      ConfigError: the compiler's library has no such name in it; names them all.
    """
    for variable, package in _OF_THE_ENVIRONMENT.items():
        given = dict.fromkeys(re.findall(r"(?:^|\s)--(xla_\w+)", os.environ.get(variable, "")))
        library = _library(package) if given else None
        if library and (unknown := [x for x in given if not _is_in(library, x.encode())]):
            sentences = " ".join(not_known(name, package) for name in unknown)
            raise ConfigError(
                f"{variable} of the environment: {sentences} Take {few(unknown)} out of {variable}."
            )


@functools.cache
def names_in(package: str) -> frozenset[str]:
    """Returns the names in a compiler's library that may be options; it takes half a second.

    Some are names of other things: XLA alone says which are options.
    """
    library = _library(package) or b""
    matches = re.finditer(rb"xla_[a-z0-9_]+", library)
    names = {x[0] for x in matches if not _is_reserved(library, x.start(), x[0])}
    # An "8" at the end may be the tag of the next field.
    return frozenset(name.decode() for name in names if name[:-1] not in names)


def _is_in(library: mmap.mmap, name: bytes) -> bool:
    """Returns True if a library has a name other than as that of a former option."""
    matches = re.finditer(re.escape(name) + rb"(?![a-z_])", library)
    return any(not _is_reserved(library, match.start(), name) for match in matches)


def _is_reserved(library: mmap.mmap | bytes, start: int, name: bytes) -> bool:
    """Returns True if the name at `start` is one that protobuf keeps DebugOptions from reusing.

    The library has the message's description, where such names are field 10, `reserved_name`.
    """
    return library[start - 2 : start] == b"R%c" % (len(name) % 256)


@functools.cache
def _library(package: str) -> mmap.mmap | None:
    """Returns the largest file of a package, which is XLA; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in Path(folder).glob("*") if path.is_file()]
    if not files:
        return None
    with max(files, key=lambda path: path.stat().st_size).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
