"""Checks the first step on a mesh in the experiment's dtypes, such as float32 or bfloat16."""

from collections.abc import Iterable, Iterator, Mapping

import jax

from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison, differences, largest
from praxis_tools.check.check import Check
from praxis_tools.check.runs import config_variants
from praxis_tools.check.runs.on_mesh import Leaves, TaskRunner, report
from praxis_tools.check.runs.states import nudge_state
from praxis_tools.check.tolerances import kind_of

# Relative tolerance for float32 arithmetic. It is between the rounding errors of float32 (2^-24)
# and bfloat16 (2^-9), so that sums in bfloat16 exceed it.
FLOAT32_ERROR = 2.0**-11
FLOAT32_ROUNDING = 2.0**-24
_MORE_PATTERNS = 9


def as_trained(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares the first step in the experiment's dtypes with the first step in float64."""
    name, reference = runner.name, check.reference_of(runner)
    (expected, *_), _ = check.train_reference(reference, 1)
    actual = _train_in_own_dtypes(check, runner)
    one_device = _train_in_own_dtypes(check, reference)
    measured = [leaf for leaf in expected if kind_of(leaf) in ("loss", "metrics", "gradients")]
    expected, one_device, actual = (
        {leaf: x[leaf] for leaf in measured} for x in (expected, one_device, actual)
    )
    low_precision = config_variants.low_precision_settings(check.config)
    if low_precision:
        check.add_note(
            f"Float32 precision is not checked, because {low_precision[0]} has a narrower dtype."
        )
        yield tolerances.in_own_dtypes(name, expected, one_device, actual, {})
        return
    # One perturbation usually shows the effect of rounding. However, if the input of a ReLU is
    # close to 0, only half of the perturbations change its sign, so try more of them.
    for patterns in (range(1), range(1, _MORE_PATTERNS)):
        rounding = _float32_rounding(check, reference, expected, patterns)
        on_mesh = tolerances.in_own_dtypes(name, expected, one_device, actual, rounding)
        on_one_device = _check_float32_precision(expected, one_device, rounding)
        if all(x.is_equal for x in (*on_mesh, *on_one_device)):
            break
    yield on_mesh
    yield on_one_device


def _float32_rounding(
    check: Check, reference: TaskRunner, expected: Leaves, patterns: Iterable[int]
) -> dict[str, float]:
    """Returns the change in each float64 leaf when weights are perturbed by float32 rounding."""
    rounding: dict[str, float] = {}
    for pattern in patterns:
        state = nudge_state(check.state, FLOAT32_ROUNDING, pattern)
        (nudged, *_), _, _ = reference.train(state, check.batches[:1], check.seed)
        for leaf, difference in differences(expected, nudged).items():
            rounding[leaf] = max(rounding.get(leaf, 0.0), difference)
    return rounding


def _train_in_own_dtypes(check: Check, runner: TaskRunner) -> Leaves:
    """Trains one step in the experiment's dtypes and returns its report."""
    partitioner = runner.partitioner
    batch, key = partitioner.global_batch(check.batches[0]), partitioner.key(check.seed)
    state = runner.place_state(check.state)
    patch_matmuls(partitioner.train_step.lower(state, batch, key), runner.mesh)
    with jax.transfer_guard("disallow"):
        _, outputs = partitioner.train_step(state, batch, key)
    return report(jax.device_get(outputs))


def _check_float32_precision(
    expected: Leaves, one_device: Leaves, rounding: Mapping[str, float]
) -> list[Comparison]:
    """Compares results on one device with a tolerance that bfloat16 sums would exceed.

    Args:
      expected: Results in float64.
      one_device: Results in the experiment's dtypes.
      rounding: Known rounding error of each leaf. The error is large for differences between large
        numbers, such as a reward before training, and for ReLUs with inputs close to 0.
    """
    gradients = [largest(x) for leaf, x in expected.items() if kind_of(leaf) == "gradients"]
    of_all = {"gradients": 1e-5 * max(gradients, default=0.0)}
    why = "float32 on one device: 2^-11 x the leaf's maximum + 4 x the effect of rounding"
    return [
        Comparison(
            "one device",
            f"{kind_of(leaf)} in float32",
            leaf,
            0,
            difference,
            FLOAT32_ERROR * largest(expected[leaf])
            + of_all.get(kind_of(leaf), 1e-6)
            + 4.0 * rounding.get(leaf, 0.0),
            why,
        )
        for leaf, difference in differences(expected, one_device).items()
    ]
