"""What a function makes of all examples of a source: made once, part by part, and kept on disk.

A run that ends early has the parts that are done, and where a file changes only its parts are made
again. Which cores made them, and how many, changes nothing.
"""

import collections
import functools
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.base import described
from praxis_lite.inputs.processes.all_cores import on_all_cores
from praxis_lite.inputs.sources import kept
from praxis_lite.inputs.sources.base import Part, Source
from praxis_lite.inputs.sources.file_index import Made

_WORTH_PROCESSES = 8_192  # Examples.
_VERIFIED_BYTES = 1 << 30  # More is not read again at each start.


class DerivedPart(NamedTuple):
    """What was made of a part of a source."""

    part: Part
    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    digests: dict[str, str]


def derived(
    source: Source, kind: str, recipe: Mapping[str, Any], make: Callable[[Part], Made], what: str
) -> list[DerivedPart]:
    """Returns what `make` gives of each part of a source, read from the disk or made now.

    Args:
      kind: what is made, for the folder's name: "tokens".
      recipe: what decides it besides the examples, as JSON; another recipe has another folder.
      make: picklable, for processes on all cores.
      what: for the line of progress: "tokenising".

    Raises:
      ConfigError: as `make` does, or the disk does not take it, or has it damaged.
    """
    recipe = {**recipe, "skip": sorted(source.skip)}
    text = json.dumps(recipe, sort_keys=True)
    name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = os.path.join(source.cache_folder(), name)
    parts = source.parts()
    found = {one: kept.read(folder, one.name) for one in parts}
    earlier = [one for one in parts if found[one] is not None]
    if len(earlier) < len(parts):
        with kept.locked(folder):
            # For people who wonder what a folder is.
            Path(folder, "recipe.json").write_text(json.dumps(recipe, indent=1))
            # Another process may have made some by now.
            missing = [
                one for one in parts
                if found[one] is None and kept.read(folder, one.name) is None
            ]
            sizes = [one.stop - one.start for one in missing]
            on_all_cores(
                _Make(folder, make), missing, sizes, f"{what} into {folder}", "examples",
                is_worth_it=sum(sizes) >= _WORTH_PROCESSES,
            )
    made = [_part(folder, one, found[one] or kept.read(folder, one.name)) for one in parts]
    _verify(folder, [one for one in made if one.part in set(earlier)])
    return made


def left_out(source: Source, parts: Sequence[DerivedPart]) -> dict[str, int]:
    """Returns how many examples are left out, by fault, or "filtered"; says so if there are any."""
    counts = collections.Counter(source.faults_of_files())
    for one in parts:
        counts.update(one.values["left_out"])
    found = dict(sorted(counts.items()))
    if found:
        said = ", ".join(f"{count:,} ({name})" for name, count in found.items())
        _log.info("%s: examples left out: %s", source.location, said)
    return found


class _Make(NamedTuple):
    folder: str
    make: Callable[[Part], Made]

    def __call__(self, part: Part) -> None:
        values, arrays = self.make(part)
        kept.write(self.folder, part.name, values, arrays)


def _part(folder: str, part: Part, found: Made | None) -> DerivedPart:
    if found is None:
        raise ConfigError(f"{folder} has lost {part.name}. Launch again, which makes it anew.")
    return DerivedPart(part, *found, kept.digests(folder, part.name))


def _verify(folder: str, found: list[DerivedPart]) -> None:
    """Compares what earlier runs left with its digests, unless that is more than 1 GiB."""
    size = sum(array.nbytes for one in found for array in one.arrays.values())
    if size > _VERIFIED_BYTES:
        _log.info("%s has %.1f GiB: their digests are not compared at each start", folder,
                  size / 2**30)
        return
    for one in found:
        if kept.is_damaged(folder, one.part.name):
            raise ConfigError(
                f"{folder}: the bytes of {one.part.name} are not those that were written. Remove "
                "the folder, and launch again, which makes it anew; and look after the disk."
            )


def code_of(function: Callable[..., Any] | None) -> Any:
    """Returns a user's function as a recipe has it: its name, arguments and a hash of its text.

    Another text makes another recipe. What the function calls does not count.
    """
    if function is None:
        return None
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    try:
        text = inspect.getsource(inner if inspect.isroutine(inner) else type(inner))
    except (OSError, TypeError):
        text = ""
    return [described(function), hashlib.sha256(text.encode()).hexdigest()[:16]]


_log = logging.getLogger(__name__)
