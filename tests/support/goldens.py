"""The numbers of other systems that our tests compare with; tests/goldens/README.md lists them."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parents[1] / "goldens"

Arrays = dict[str, dict[str, np.ndarray]]


@functools.cache
def golden(path: str) -> Any:
    """Returns the content of a JSON file of the goldens; it is shared, so do not change it."""
    return json.loads((GOLDENS / path).read_text())


def golden_arrays(path: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an npz file of the goldens by their names in it."""
    with np.load(GOLDENS / path) as file:
        return dict(file)


def by_kind(arrays: dict[str, np.ndarray]) -> Arrays:
    """Returns arrays by the first part of their names, then by the rest."""
    actual: Arrays = {}
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        actual.setdefault(kind, {})[rest] = array
    return actual


def pax_cases() -> dict[str, dict[str, Any]]:
    """Returns, by case, what it ran: Pax's class and hyperparameters, and our tolerance."""
    return golden("pax/cases.json")["cases"]


def pax_arrays(name: str) -> Arrays:
    """Returns a case's arrays by kind: in, w (weights), out, grad (of weights), gin (of inputs)."""
    (path,) = GOLDENS.glob(f"pax/**/{name}.npz")
    return by_kind(golden_arrays(str(path.relative_to(GOLDENS))))


def pax_options(name: str) -> dict[str, Arrays]:
    """Returns, by case and kind, the arrays by path in pax_options/layers/NAME.npz.

    Kinds: w (weights), stat (statistics before), new (after), out, grad (of weights), gin (of x).
    The inputs under "in" are those of all cases, which is case "".
    """
    actual: dict[str, Arrays] = {}
    for entry, array in golden_arrays(f"pax_options/layers/{name}.npz").items():
        case, kind, *path = ("/" * entry.startswith("in/") + entry).split("/")
        actual.setdefault(case, {}).setdefault(kind, {})["/".join(path)] = array
    return actual


def trimmed(spec: Any) -> list:
    """Returns a PartitionSpec, or its JSON, as a list without trailing None; P(()) is P(None)."""
    entries = [list(e) if isinstance(e, (list, tuple)) else e for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return entries
