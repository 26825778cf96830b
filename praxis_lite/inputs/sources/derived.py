"""Results of a function over all examples of a source: computed once, in parts, and cached.

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

from praxis_lite.inputs.base import described
from praxis_lite.inputs.processes.all_cores import on_all_cores
from praxis_lite.inputs.sources import cache
from praxis_lite.inputs.sources.base import Part, Source
from praxis_lite.inputs.sources.cache import Made


class DerivedPart(NamedTuple):
    """What was made of a part of a source."""

    part: Part
    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    digests: dict[str, str]


def derived(
    source: Source, kind: str, recipe: Mapping[str, Any], make: Callable[[Part], Made], what: str
) -> list[DerivedPart]:
    """Returns the result of `make` for each part of a source, from the cache or computed now.

    Args:
      kind: of the result, for the folder's name: "tokens".
      recipe: what determines it in addition to the examples, as JSON; another recipe has another
        folder.
      make: picklable, for processes on all cores.
      what: for the line of progress: "tokenising".

    Raises:
      ConfigError: as `make` does, or the disk does not take it.
    """
    recipe = {**recipe, "skip": sorted(source.skip)}
    text = json.dumps(recipe, sort_keys=True)
    name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = os.path.join(source.cache_folder(), name)
    parts = source.parts()

    def make_missing(numbers: list[int]) -> None:
        # For people who wonder what a folder is.
        Path(folder, "recipe.json").write_text(json.dumps(recipe, indent=1))
        missing = [parts[number] for number in numbers]
        sizes = [part.stop - part.start for part in missing]
        on_all_cores(_Make(folder, make), missing, sizes, f"{what} into {folder}")

    result = cache.entries(folder, [part.name for part in parts], make_missing)
    return [
        DerivedPart(part, entry.values, entry.arrays, entry.digests)
        for part, entry in zip(parts, result, strict=True)
    ]


def left_out(source: Source, parts: Sequence[DerivedPart]) -> dict[str, int]:
    """Returns how many examples are left out, by fault, or "filtered"; says so if there are any."""
    counts = collections.Counter()
    for part in parts:
        counts.update(part.values["left_out"])
    result = dict(sorted(counts.items()))
    if result:
        message = ", ".join(f"{count:,} ({name})" for name, count in result.items())
        _log.info("%s: examples left out: %s", source.location, message)
    return result


class _Make(NamedTuple):
    folder: str
    make: Callable[[Part], Made]

    def __call__(self, part: Part) -> None:
        values, arrays = self.make(part)
        cache.write(self.folder, part.name, values, arrays)


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
