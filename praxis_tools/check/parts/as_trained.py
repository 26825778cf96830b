"""A mesh's first step in the experiment's own types: how far rounding may take it."""

from collections.abc import Iterable, Iterator, Mapping

import jax

from praxis_lite.core.xla_workarounds.mended_products import mended
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison, differences, largest
from praxis_tools.check.check import Check
from praxis_tools.check.runs import config_variants
from praxis_tools.check.runs.on_mesh import Leaves, TaskRunner, report
from praxis_tools.check.runs.states import nudged
from praxis_tools.check.tolerances import kind_of

# Between the rounding of float32, 2^-24, and of bfloat16, 2^-9: far from the one, below the other.
FLOAT32_OFF = 2.0**-11
FLOAT32_ROUNDING = 2.0**-24
_MORE_PATTERNS = 9


def as_trained(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """The first step, as the experiment's own types make it."""
    name, reference = runner.name, check.reference_of(runner)
    (expected, *_), _ = check.trained_on_one(reference, 1)
    actual = _report(check, runner)
    local = _report(check, reference)
    measured = [leaf for leaf in expected if kind_of(leaf) in ("loss", "metrics", "gradients")]
    expected, local, actual = (
        {leaf: x[leaf] for leaf in measured} for x in (expected, local, actual)
    )
    low = config_variants.low_precision_settings(check.config)
    if low:
        check.remark(f"Sums are not held against float32, for {low[0]} is of fewer bits.")
        yield tolerances.in_own_types(name, expected, local, actual, {})
        return
    # One pattern of nudges shows what rounding does, as a rule. A ReLU whose input is 0 but for
    # rounding is moved over its edge by half of them: what differs is held against more.
    for patterns in (range(1), range(1, _MORE_PATTERNS)):
        moved = _moved(check, reference, expected, patterns)
        on_mesh = tolerances.in_own_types(name, expected, local, actual, moved)
        on_one = _in_float32(expected, local, moved)
        if all(item.is_equal for item in (*on_mesh, *on_one)):
            break
    yield on_mesh
    yield on_one


def _moved(
    check: Check, reference: TaskRunner, expected: Leaves, patterns: Iterable[int]
) -> dict[str, float]:
    """Returns how far rounding in float32 moves each leaf: in float64, by moving the weights."""
    moved: dict[str, float] = {}
    for pattern in patterns:
        state = nudged(check.state, FLOAT32_ROUNDING, pattern)
        (report_of_moved, *_), _, _ = reference.train(state, check.batches[:1], check.seed)
        for leaf, apart in differences(expected, report_of_moved).items():
            moved[leaf] = max(moved.get(leaf, 0.0), apart)
    return moved


def _report(check: Check, runner: TaskRunner) -> Leaves:
    """Returns the report of the first step."""
    partitioner = runner.partitioner
    placed, key = partitioner.global_batch(check.batches[0]), partitioner.key(check.seed)
    state = runner.stored(check.state)
    mended(partitioner.train_step.lower(state, placed, key), runner.mesh)
    with jax.transfer_guard("disallow"):
        _, outputs = partitioner.train_step(state, placed, key)
    return report(jax.device_get(outputs))


def _in_float32(
    expected: Leaves, local: Leaves, moved: Mapping[str, float]
) -> list[Comparison]:
    """Returns comparisons that tell sums in bfloat16 from sums in float32, on a single device.

    Args:
      moved: how far rounding moves each leaf; a difference of large numbers, such as a reward
        before anything is learnt, moves far, and so does what is on a ReLU's edge.
    """
    gradients = [largest(x) for leaf, x in expected.items() if kind_of(leaf) == "gradients"]
    of_all = {"gradients": 1e-5 * max(gradients, default=0.0)}
    why = "float32 on one device: 2^-11 of the leaf, 4 x what rounding moves; bfloat16 is further"
    return [
        Comparison(
            "one device", f"{kind_of(leaf)} in float32", leaf, 0, apart,
            FLOAT32_OFF * largest(expected[leaf]) + of_all.get(kind_of(leaf), 1e-6)
            + 4.0 * moved.get(leaf, 0.0),
            why,
        )
        for leaf, apart in differences(expected, local).items()
    ]
