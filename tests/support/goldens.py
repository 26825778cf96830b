"""Reads golden results of other systems; tests/goldens/README.md lists the files."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parents[1] / "goldens"

Arrays = dict[str, dict[str, np.ndarray]]


@functools.cache
def golden(path: str) -> Any:
    """Returns the content of a golden JSON file. It is cached, so do not modify it."""
    return json.loads((GOLDENS / path).read_text())


def golden_arrays(path: str) -> dict[str, np.ndarray]:
    """Returns the arrays in a golden npz file by name."""
    with np.load(GOLDENS / path) as file:
        return dict(file)


def by_kind(arrays: dict[str, np.ndarray]) -> Arrays:
    """Groups arrays by the first part of their names."""
    actual: Arrays = {}
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        actual.setdefault(kind, {})[rest] = array
    return actual


def pax_cases() -> dict[str, dict[str, Any]]:
    """Returns Pax's class, its hyperparameters and our tolerance, by case."""
    return golden("pax/cases.json")["cases"]


def pax_arrays(name: str) -> Arrays:
    """Returns a case's arrays by kind: in, w (weights), out, grad (of weights), gin (of inputs)."""
    (path,) = GOLDENS.glob(f"pax/**/{name}.npz")
    return by_kind(golden_arrays(str(path.relative_to(GOLDENS))))


def pax_options(name: str) -> dict[str, Arrays]:
    """Returns the arrays in pax_options/layers/NAME.npz by case, kind and path.

    Kinds: w (weights), stat (statistics before), new (statistics after), out, grad (of weights) and
    gin (gradient of x). Case "" contains the inputs of all cases as kind "in".
    """
    actual: dict[str, Arrays] = {}
    for entry, array in golden_arrays(f"pax_options/layers/{name}.npz").items():
        case, kind, *path = ("/" * entry.startswith("in/") + entry).split("/")
        actual.setdefault(case, {}).setdefault(kind, {})["/".join(path)] = array
    return actual


def trimmed(spec: Any) -> list:
    """Converts a PartitionSpec or its JSON to a list without trailing None; P(()) is P(None)."""
    entries = [list(e) if isinstance(e, (list, tuple)) else e for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return entries
