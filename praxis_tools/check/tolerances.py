"""How far two runs may differ: measured from what rounding alone does, never guessed."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from praxis_tools.check.certificate import Comparison, differences, largest

Leaves = Mapping[str, np.ndarray]
EXACT = "the same bits are promised"
FLOAT64 = "float64: 1e-9 of the leaf, 1000 x what rounding moves"
RELATIVE, OF_ALL, TIMES_ROUNDING = 1e-9, 1e-12, 1000.0
OWN_TYPES = "own types: 1e-5 of the leaf, 16 x what rounding moves"
TIMES_NUDGED = 16.0


def exact(mesh: str, what: str, expected: Leaves, actual: Leaves) -> list[Comparison]:
    """Returns comparisons that allow no difference."""
    return [
        Comparison(mesh, what, leaf, None, apart, 0.0, EXACT)
        for leaf, apart in differences(expected, actual).items()
    ]


def with_epsilon(comparison: Comparison) -> Comparison:
    """Returns a comparison of `in_float64` with a tolerance for a sum in parts.

    Losses, Pax's too, add 1e-6 to the sum of weights that they divide by: parts differ by it.
    """
    why = "float64: 1e-6 of the leaf, which losses add to a sum of weights"
    times = 1e-6 / RELATIVE
    return dataclasses.replace(comparison, tolerance=times * comparison.tolerance, why=why)


def with_what(what: str, comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Returns comparisons whose kinds are called "KIND, WHAT"."""
    return [dataclasses.replace(x, what=f"{x.what}, {what}") for x in comparisons]


def in_float64(
    mesh: str, what: str, expected: Leaves, actual: Leaves, nudged: Leaves | None = None,
    step: int | None = None,
) -> list[Comparison]:
    """Returns comparisons of runs in float64, which differ by the order of sums alone.

    Args:
      nudged: what one device gives for weights moved by rounding. A gradient that is zero but for
        rounding, and what an optimizer makes of it, is known by it.
    """
    moved = {} if nudged is None else differences(expected, nudged)
    of_all = OF_ALL * max((largest(x) for x in expected.values() if _is_float(x)), default=0.0)

    def tolerance(leaf: str) -> float:
        if leaf not in expected or not _is_float(expected[leaf]):
            # A count or a token that rounding changes cannot be compared.
            return np.inf if moved.get(leaf, 0.0) else 0.0
        return RELATIVE * largest(expected[leaf]) + of_all + TIMES_ROUNDING * moved.get(leaf, 0.0)

    return [
        Comparison(mesh, what, leaf, step, apart, tolerance(leaf), FLOAT64)
        for leaf, apart in differences(expected, actual).items()
    ]


def in_own_types(
    mesh: str, expected: Leaves, one_device: Leaves, actual: Leaves, moved: Mapping[str, float]
) -> list[Comparison]:
    """Returns comparisons of a step as trained with the same in float64 on a single device.

    Args:
      expected: in float64.
      one_device: in the experiment's own types; how far it is off is the measure.
      moved: how far rounding may move each leaf besides: where a ReLU's input is 0 but for
        rounding, it may be one device, the mesh or neither that is off by much.
    """
    off, scales = differences(expected, one_device), _scales(expected)
    shares: dict[str, float] = {}
    for leaf, share in _shares(off, scales).items():
        shares[kind_of(leaf)] = max(shares.get(kind_of(leaf), 0.0), share)
    of_all = 1e-6 * max(scales.values(), default=0.0)
    why = "own types: 1e-5 of the leaf, 16 x what one device is off"

    def tolerance(leaf: str) -> float:
        share = 1e-5 + 2.0 * shares.get(kind_of(leaf), 0.0)
        apart = max(16.0 * off.get(leaf, 0.0), 4.0 * moved.get(leaf, 0.0))
        return share * scales.get(leaf, 0.0) + of_all + apart

    return [
        Comparison(mesh, f"{kind_of(leaf)} as trained", leaf, 0, apart, tolerance(leaf), why)
        for leaf, apart in differences(expected, actual).items()
    ]


def by_rounding(
    mesh: str, expected: Leaves, nudged: Iterable[Leaves], actual: Leaves
) -> list[Comparison]:
    """Returns comparisons of a step in its own types with a re-run on another mesh.

    Rounding is measured by moving the weights by a unit of it. A single number may not move by
    chance, so the largest relative change of any leaf is used for all.

    Args:
      expected: of the job's own mesh.
      nudged: the same, each time with weights moved by a unit of rounding.
    """
    each = [differences(expected, item) for item in nudged]
    moved, scales = {leaf: max(item[leaf] for item in each) for leaf in expected}, _scales(expected)
    largest_of = _largest_by_kind(scales)
    share = 1e-5 + TIMES_NUDGED * max(_shares(moved, scales).values(), default=0.0)

    def tolerance(leaf: str) -> float:
        of_all = 1e-6 * largest_of.get(kind_of(leaf), 0.0)
        return share * scales.get(leaf, 0.0) + of_all + TIMES_NUDGED * moved.get(leaf, 0.0)

    return [
        Comparison(mesh, kind_of(leaf), leaf, None, apart, tolerance(leaf), OWN_TYPES)
        for leaf, apart in differences(expected, actual).items()
    ]


def _scales(leaves: Leaves) -> dict[str, float]:
    return {leaf: largest(x) for leaf, x in leaves.items()}


def _largest_by_kind(scales: Mapping[str, float]) -> dict[str, float]:
    result: dict[str, float] = {}
    for leaf, scale in scales.items():
        result[kind_of(leaf)] = max(result.get(kind_of(leaf), 0.0), scale)
    return result


def _shares(apart: Mapping[str, float], scales: Mapping[str, float]) -> dict[str, float]:
    """Returns differences as shares of the leaves, but for leaves that are rounding alone."""
    largest_of = _largest_by_kind(scales)
    return {
        leaf: x / scales[leaf] for leaf, x in apart.items()
        if scales.get(leaf, 0.0) > 1e-4 * largest_of.get(kind_of(leaf), 0.0) and np.isfinite(x)
    }


def _is_float(x: np.ndarray) -> bool:
    return np.issubdtype(np.asarray(x).dtype, np.inexact)


def by_kind(
    mesh: str, expected: Leaves, actual: Leaves, nudged: Leaves, step: int
) -> list[Comparison]:
    """Returns `in_float64` of reports or states, the leaves of each kind apart."""
    kinds: dict[str, list[str]] = {}
    for leaf in dict.fromkeys([*expected, *actual]):
        kinds.setdefault(kind_of(leaf), []).append(leaf)
    comparisons = []
    for what in sorted(kinds, key=ORDER.index):
        leaves = kinds[what]
        some = [{k: x[k] for k in leaves if k in x} for x in (expected, actual, nudged)]
        comparisons += in_float64(mesh, what, *some, step=step)
    return comparisons


KINDS = {
    "metrics/": "metrics", "learner/": "learner", "gradients/": "gradients",
    "mdl_vars/params/": "weights", "mdl_vars/non_trainable/": "variables",
    "opt_states/ema/": "averages", "opt_states/slots/": "slots", "opt_states/": "counts",
}


# The order in which kinds are reported.
ORDER = (
    *("loss", "metrics", "gradients", "learner"),
    *("weights", "variables", "slots", "averages", "counts"),
)


def kind_of(leaf: str) -> str:
    """Returns the kind of a leaf of a report or of a state, such as "gradients"."""
    if leaf.startswith("metrics/loss/"):
        return "loss"
    return next((kind for start, kind in KINDS.items() if leaf.startswith(start)), "counts")


def padding(
    mesh: str, largest_by_leaf: Mapping[str, float], step: int | None = None
) -> list[Comparison]:
    """Returns comparisons of what was cut off as padding with zeros."""
    return [
        Comparison(mesh, "padding", leaf, step, apart, 0.0, "padding is zeros")
        for leaf, apart in largest_by_leaf.items()
    ]
