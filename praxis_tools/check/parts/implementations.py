"""Checks that implementation settings, such as remat and unrolled stacks, do not change results."""

import functools
from collections.abc import Iterator, Sequence

from praxis_lite.config.build import build
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.check import Check
from praxis_tools.check.parts import data
from praxis_tools.check.runs import config_variants
from praxis_tools.check.runs.implementation_settings import (
    ImplementationSetting,
    implementation_settings,
    switch_remat,
    switch_setting,
)
from praxis_tools.check.runs.on_mesh import (
    Batch,
    Leaves,
    TaskRunner,
    leaves_of,
    with_reported_gradients,
)
from praxis_tools.check.runs.states import restack, restack_like


def remat(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares a step with the same step after toggling remat in all layers.

    Both steps use dropout, because recomputation must draw the same masks. Recomputation also must
    not update variables twice.
    """
    task = switch_remat(check.task)
    if task is None:
        check.add_note("remat switched: not checked, because no layer has an attribute for remat.")
        return
    other = check.run_or_skip("remat switched", lambda: check.on_mesh(check.own_shape, task))
    if other is not None:
        yield from _compare_step("remat switched", check, runner, other, with_state=True)


def unrolled(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares a step with the same step after toggling `unroll` in all stacks."""
    config = config_variants.toggle_unroll(check.config)
    if config is None:
        check.add_note("unrolled: not checked, because no layer's config has this setting.")
        return

    def build_runner() -> TaskRunner:
        return check.on_mesh(check.own_shape, with_reported_gradients(build(config).task))

    other = check.run_or_skip("unrolled", build_runner)
    if other is not None:
        yield from _compare_step("unrolled", check, runner, other)


def _compare_step(
    variant: str, check: Check, runner: TaskRunner, other: TaskRunner, with_state: bool = False
) -> Iterator[list[Comparison]]:
    """Compares the first step of a variant of the task with the original task's first step.

    If `with_state` is True, the states after the step are compared as well.
    """
    state = restack(check.state, other)
    if state is None:
        check.add_note(f"{variant}: not checked, because the weights have different names.")
        return
    reference = check.reference_of(runner)
    (expected,), expected_state = check.train_reference(reference, 1)
    (nudged,), nudged_state = check.train_reference(reference, 1, nudged=True)
    (report,), new, _ = other.train(state, check.batches[:1], check.seed)
    if with_state:
        expected, nudged = expected | expected_state, nudged | nudged_state
        report = report | leaves_of(new)
    actual = restack_like(expected, report)
    comparisons = tolerances.by_kind(runner.name, expected, actual, nudged, 0)
    yield tolerances.with_suffix(variant, comparisons)


def settings_switched(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares training, evaluation and decoding before and after changing each setting.

    Remat settings do not change random numbers, so dropout is enabled when they are changed, and
    the states after the step are compared as well.
    """

    @functools.cache
    def reference_results(is_remat: bool) -> Sequence[dict[str, Leaves]]:
        reference = check.reference_of(runner)
        return [
            _results(check, reference, state, check.one_device, is_remat)
            for state in (check.state, check.nudged)
        ]

    for setting in implementation_settings(check.config):
        reasons = []
        for value in setting.alternatives:
            try:
                actual = _results_with_value(check, setting, value)
            except Exception as error:  # A custom model may raise any exception.
                reasons.append(f"{value!r}: {str(error).splitlines()[0][:200] or type(error)}")
                continue
            if actual is None:
                reasons.append(f"{value!r}: the weights have different names")
                continue
            variant = f"{setting.name} {value!r}"
            expected, nudged = reference_results(setting.is_remat)
            yield from _compare_results(runner.name, variant, expected, nudged, actual)
            break
        else:
            # No alternative could be used.
            reason = "; ".join(reasons) or "no other value is known"
            check.add_note(f"{setting.name} = {setting.value!r}: not switched ({reason}).")


def _results_with_value(
    check: Check, setting: ImplementationSetting, value: object
) -> dict[str, Leaves] | None:
    """Returns the results for a value of a setting, or None if the value renames weights."""
    config = switch_setting(check.config, setting, value)
    task = with_reported_gradients(build(config).task)
    other = check.on_mesh(check.own_shape, task)
    state = restack(check.state, other)
    if state is None:
        return None
    return _results(check, other, state, other, setting.is_remat)


def _results(
    check: Check, runner: TaskRunner, state: TrainState, decode_runner: TaskRunner, is_remat: bool
) -> dict[str, Leaves]:
    """Returns the results of training, of evaluation and of decoding each decode dataset."""
    batch = check.batches[0]
    (report,), last, _ = runner.train(
        state, [batch], check.seed, without_randomness=check.is_random and not is_remat
    )
    if is_remat:
        report |= leaves_of(last)
    results = {"training": report, "evaluation": runner.evaluate(state.mdl_vars, batch)}
    for name, prompts in _prompts(check).items():
        results[name] = decode_runner.decode(state.mdl_vars, prompts)
    return results


def _compare_results(
    mesh: str,
    variant: str,
    expected: dict[str, Leaves],
    nudged: dict[str, Leaves],
    actual: dict[str, Leaves],
) -> Iterator[list[Comparison]]:
    report = restack_like(expected["training"], actual["training"])
    yield tolerances.with_suffix(
        variant, tolerances.by_kind(mesh, expected["training"], report, nudged["training"], 0)
    )
    for kind in [kind for kind in actual if kind != "training"]:
        yield tolerances.in_float64(
            mesh, f"{kind.split()[0]}, {variant}", expected[kind], actual[kind], nudged[kind]
        )


def _prompts(check: Check) -> dict[str, Batch]:
    """Returns the first batch of each decode dataset, with keys "decoding NAME"."""
    return {
        f"decoding {name}": check.with_known_ids(data.first_batches(pipeline, 1)[0])
        for name, pipeline in check.job.decode_datasets.items()
    }
