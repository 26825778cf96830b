"""Tolerances of comparisons, derived from measured rounding errors.

Rounding errors are measured by perturbing ("nudging") the weights by about one rounding error and
measuring how much each result changes.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from praxis_tools.check.certificate import Comparison, differences, largest

Leaves = Mapping[str, np.ndarray]
EXACT = "results must be bitwise equal"
FLOAT64 = "float64: 1e-9 x the leaf's maximum + 1000 x the effect of rounding"
RELATIVE, OF_ALL, TIMES_ROUNDING = 1e-9, 1e-12, 1000.0
OWN_DTYPES = "job's dtypes: 1e-5 x the leaf's maximum + 16 x the effect of rounding"
TIMES_NUDGED = 16.0


def exact(mesh: str, kind: str, expected: Leaves, actual: Leaves) -> list[Comparison]:
    """Compares leaves that must be bitwise equal."""
    return [
        Comparison(mesh, kind, leaf, None, difference, 0.0, EXACT)
        for leaf, difference in differences(expected, actual).items()
    ]


def with_loss_epsilon(comparison: Comparison) -> Comparison:
    """Returns a comparison with the larger tolerance that sums over parts require.

    Losses (also in Pax) are divided by the sum of weights plus 1e-6. If a sum is computed in parts,
    the 1e-6 is added more than once. `comparison` must be a result of `in_float64`.
    """
    why = "float64: 1e-6 x the leaf's maximum, because losses add 1e-6 to the sum of weights"
    factor = 1e-6 / RELATIVE
    return dataclasses.replace(comparison, tolerance=factor * comparison.tolerance, why=why)


def with_suffix(suffix: str, comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Appends a suffix to the kind of each comparison, as in "KIND, SUFFIX"."""
    return [dataclasses.replace(x, kind=f"{x.kind}, {suffix}") for x in comparisons]


def in_float64(
    mesh: str,
    kind: str,
    expected: Leaves,
    actual: Leaves,
    nudged: Leaves | None = None,
    step: int | None = None,
) -> list[Comparison]:
    """Compares two runs in float64 that only differ in the order of summation.

    Args:
      mesh: Name of the mesh of the actual run.
      kind: Kind of value that is compared.
      expected: Results of the expected run.
      actual: Results of the actual run.
      nudged: Results of the expected run with perturbed weights. They reveal gradients that would
        be zero without rounding, and the effect of these gradients on the optimizer.
      step: Training step, counted from 0.
    """
    rounding = {} if nudged is None else differences(expected, nudged)
    of_all = OF_ALL * max((largest(x) for x in expected.values() if _is_float(x)), default=0.0)

    def tolerance(leaf: str) -> float:
        if leaf not in expected or not _is_float(expected[leaf]):
            # Counts and tokens that change due to rounding cannot be compared.
            return np.inf if rounding.get(leaf, 0.0) else 0.0
        from_rounding = TIMES_ROUNDING * rounding.get(leaf, 0.0)
        return RELATIVE * largest(expected[leaf]) + of_all + from_rounding

    return [
        Comparison(mesh, kind, leaf, step, difference, tolerance(leaf), FLOAT64)
        for leaf, difference in differences(expected, actual).items()
    ]


def in_own_dtypes(
    mesh: str, expected: Leaves, one_device: Leaves, actual: Leaves, rounding: Mapping[str, float]
) -> list[Comparison]:
    """Compares a step in the experiment's dtypes with the same step in float64 on one device.

    Args:
      mesh: Name of the mesh of the actual run.
      expected: Results on one device in float64.
      one_device: Results on one device in the experiment's dtypes. Their errors determine the
        tolerance.
      actual: Results on the mesh in the experiment's dtypes.
      rounding: Largest known rounding error of each leaf. If the input of a ReLU is close to 0, one
        of the two runs may have a large error while the other has no error.
    """
    # `share_of_kind` is the largest relative error of the leaves of each kind.
    errors, scales = differences(expected, one_device), _scales(expected)
    share_of_kind: dict[str, float] = {}
    for leaf, share in _relative(errors, scales).items():
        share_of_kind[kind_of(leaf)] = max(share_of_kind.get(kind_of(leaf), 0.0), share)
    of_all = 1e-6 * max(scales.values(), default=0.0)
    why = "job's dtypes: 1e-5 x the leaf's maximum + 16 x the error on one device"

    def tolerance(leaf: str) -> float:
        share = 1e-5 + 2.0 * share_of_kind.get(kind_of(leaf), 0.0)
        from_errors = max(16.0 * errors.get(leaf, 0.0), 4.0 * rounding.get(leaf, 0.0))
        return share * scales.get(leaf, 0.0) + of_all + from_errors

    return [
        Comparison(mesh, f"{kind_of(leaf)} as trained", leaf, 0, difference, tolerance(leaf), why)
        for leaf, difference in differences(expected, actual).items()
    ]


def by_rounding(
    mesh: str, expected: Leaves, nudged: Iterable[Leaves], actual: Leaves
) -> list[Comparison]:
    """Compares a step in the job's dtypes with a re-run on a different mesh.

    The tolerance is derived from runs with perturbed weights. The largest relative change of any
    leaf is used for all leaves, because a single number may happen to be unchanged in these runs.

    Args:
      mesh: Name of the mesh of the re-run.
      expected: Results on the job's mesh.
      nudged: Results on the job's mesh with perturbed weights, with one entry per perturbation.
      actual: Results of the re-run.
    """
    changes = [differences(expected, leaves) for leaves in nudged]
    rounding = {leaf: max(change[leaf] for change in changes) for leaf in expected}
    scales = _scales(expected)
    scale_of_kind = _largest_by_kind(scales)
    share = 1e-5 + TIMES_NUDGED * max(_relative(rounding, scales).values(), default=0.0)

    def tolerance(leaf: str) -> float:
        of_all = 1e-6 * scale_of_kind.get(kind_of(leaf), 0.0)
        return share * scales.get(leaf, 0.0) + of_all + TIMES_NUDGED * rounding.get(leaf, 0.0)

    return [
        Comparison(mesh, kind_of(leaf), leaf, None, difference, tolerance(leaf), OWN_DTYPES)
        for leaf, difference in differences(expected, actual).items()
    ]


def _scales(leaves: Leaves) -> dict[str, float]:
    return {leaf: largest(x) for leaf, x in leaves.items()}


def _largest_by_kind(scales: Mapping[str, float]) -> dict[str, float]:
    largest_scales: dict[str, float] = {}
    for leaf, scale in scales.items():
        largest_scales[kind_of(leaf)] = max(largest_scales.get(kind_of(leaf), 0.0), scale)
    return largest_scales


def _relative(errors: Mapping[str, float], scales: Mapping[str, float]) -> dict[str, float]:
    """Returns errors relative to the scale of their leaves.

    Leaves that are tiny compared to other leaves of the same kind are omitted, because they consist
    of rounding errors.
    """
    scale_of_kind = _largest_by_kind(scales)
    return {
        leaf: x / scales[leaf]
        for leaf, x in errors.items()
        if scales.get(leaf, 0.0) > 1e-4 * scale_of_kind.get(kind_of(leaf), 0.0) and np.isfinite(x)
    }


def _is_float(x: np.ndarray) -> bool:
    return bool(np.issubdtype(np.asarray(x).dtype, np.inexact))


def by_kind(
    mesh: str, expected: Leaves, actual: Leaves, nudged: Leaves, step: int
) -> list[Comparison]:
    """Compares reports or states with `in_float64`, one kind of leaf at a time."""
    kinds: dict[str, list[str]] = {}
    for leaf in dict.fromkeys([*expected, *actual]):
        kinds.setdefault(kind_of(leaf), []).append(leaf)
    comparisons = []
    for kind in sorted(kinds, key=ORDER.index):
        leaves = kinds[kind]
        expected_of_kind, actual_of_kind, nudged_of_kind = (
            {k: x[k] for k in leaves if k in x} for x in (expected, actual, nudged)
        )
        comparisons += in_float64(
            mesh, kind, expected_of_kind, actual_of_kind, nudged_of_kind, step
        )
    return comparisons


KINDS = {
    "metrics/": "metrics",
    "learner/": "learner",
    "gradients/": "gradients",
    "mdl_vars/params/": "weights",
    "mdl_vars/non_trainable/": "variables",
    "opt_states/ema/": "averages",
    "opt_states/slots/": "slots",
    "opt_states/": "counts",
}


# Order in which kinds are reported.
ORDER = (
    *("loss", "metrics", "gradients", "learner"),
    *("weights", "variables", "slots", "averages", "counts"),
)


def kind_of(leaf: str) -> str:
    """Returns the kind of a leaf in a report or a state, such as "gradients"."""
    if leaf.startswith("metrics/loss/"):
        return "loss"
    return next((kind for prefix, kind in KINDS.items() if leaf.startswith(prefix)), "counts")


def padding(
    mesh: str, largest_by_leaf: Mapping[str, float], step: int | None = None
) -> list[Comparison]:
    """Checks that padding is zero, given the largest absolute value in each leaf's padding."""
    return [
        Comparison(mesh, "padding", leaf, step, difference, 0.0, "padding must be zero")
        for leaf, difference in largest_by_leaf.items()
    ]
