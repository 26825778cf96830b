"""Applies a function to all examples in a source, in parts, and caches the results on disk.

Parts that an interrupted run has already computed are reused. If a file changes, only its parts are
recomputed. The results do not depend on the number of cores.
"""

import collections
import dataclasses
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

from praxis_lite.inputs.base import fingerprint_json
from praxis_lite.inputs.processes.all_cores import run_on_all_cores
from praxis_lite.inputs.sources import cache
from praxis_lite.inputs.sources.base import Part, Source
from praxis_lite.inputs.sources.cache import Contents


class DerivedPart(NamedTuple):
    """The result of applying a function to one part of a source.

    Attributes:
      part: The part of the source.
      values: JSON values in the result.
      arrays: Arrays in the result, keyed by name.
      digests: Digest of each array.
    """

    part: Part
    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    digests: dict[str, str]


def derive_parts(
    source: Source,
    kind: str,
    recipe: Mapping[str, Any],
    make: Callable[[Part], Contents],
    activity: str,
) -> list[DerivedPart]:
    """Returns `make(part)` for each part of a source, from the cache if possible.

    Args:
      source: Source of the examples.
      kind: Prefix for the name of the cache folder, such as "tokens".
      recipe: JSON with everything that determines the results except the examples. Each recipe has
        a separate cache folder.
      make: Function that computes the result for a part; must be picklable, because it runs on all
        cores.
      activity: Verb for progress messages, such as "tokenizing".

    Raises:
      ConfigError: `make` failed, or the cache folder cannot be written.
    """
    recipe = {**recipe, "skip": sorted(source.skip)}
    text = json.dumps(recipe, sort_keys=True)
    name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = os.path.join(source.cache_folder(), name)
    parts = source.parts()

    def make_missing(numbers: list[int]) -> None:
        # This file is never read; it documents the folder.
        Path(folder, "recipe.json").write_text(json.dumps(recipe, indent=1))
        missing = [parts[number] for number in numbers]
        sizes = [part.stop - part.start for part in missing]
        run_on_all_cores(_MakePart(folder, make), missing, sizes, f"{activity} into {folder}")

    entries = cache.entries(folder, [part.name for part in parts], make_missing)
    return [
        DerivedPart(part, entry.values, entry.arrays, entry.digests)
        for part, entry in zip(parts, entries, strict=True)
    ]


def num_left_out(source: Source, parts: Sequence[DerivedPart]) -> dict[str, int]:
    """Logs and returns the number of skipped examples for each reason: a fault or "filtered"."""
    counter: collections.Counter[str] = collections.Counter()
    for part in parts:
        counter.update(part.values["left_out"])
    counts = dict(sorted(counter.items()))
    if counts:
        message = ", ".join(f"{count:,} ({name})" for name, count in counts.items())
        _log.info("%s: skipped examples: %s", source.location, message)
    return counts


@dataclasses.dataclass(frozen=True)
class _MakePart:
    """A picklable function that computes a part and writes it into the cache."""

    folder: str
    make: Callable[[Part], Contents]

    def __call__(self, part: Part) -> None:
        values, arrays = self.make(part)
        cache.write(self.folder, part.name, values, arrays)


def function_recipe(function: Callable[..., Any] | None) -> Any:
    """Returns the name, bound arguments and source hash of a function, for a recipe.

    Editing the function therefore invalidates the cache; editing the functions that this function
    calls does not.
    """
    if function is None:
        return None
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    try:
        # An object with a __call__ method is identified by the source of its class.
        text = inspect.getsource(inner if inspect.isroutine(inner) else type(inner))
    except (OSError, TypeError):
        text = ""
    return [fingerprint_json(function), hashlib.sha256(text.encode()).hexdigest()[:16]]


_log = logging.getLogger(__name__)
