"""The same numbers however a model computes them: remat, unrolled stacks, other settings."""

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
    remat_switched,
    switched,
)
from praxis_tools.check.runs.on_mesh import Leaves, TaskRunner, leaves_of, reporting
from praxis_tools.check.runs.states import restacked, stacked_like


def remat(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """A step and its state with remat on where it is off, and off where it is on.

    Dropout is on in both: what is computed again draws the same masks, and updates nothing twice.
    """
    task = remat_switched(check.task)
    if task is None:
        check.remark("remat switched: not checked, for no layer has an attribute that says that.")
        return
    other = check.tried("remat switched", lambda: check.on_mesh(check.own_shape, task))
    if other is not None:
        yield from _same_step("remat switched", check, runner, other, with_state=True)


def unrolled(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """A step of the model with its scanned stacks in a row, and the other way."""
    config = config_variants.unrolled(check.config)
    if config is None:
        check.remark("unrolled: not checked, for no layer's config says that.")
        return

    def changed() -> TaskRunner:
        return check.on_mesh(check.own_shape, reporting(build(config).task))

    other = check.tried("unrolled", changed)
    if other is not None:
        yield from _same_step("unrolled", check, runner, other)


def _same_step(
    what: str, check: Check, runner: TaskRunner, other: TaskRunner, with_state: bool = False
) -> Iterator[list[Comparison]]:
    state = restacked(check.state, other)
    if state is None:
        check.remark(f"{what}: not checked, for its weights have other names.")
        return
    reference = check.reference_of(runner)
    (expected,), last = check.trained_on_one(reference, 1)
    (moved,), last_moved = check.trained_on_one(reference, 1, nudged=True)
    (report,), new, _ = other.train(state, check.batches[:1], check.seed)
    if with_state:
        expected, moved, report = expected | last, moved | last_moved, report | leaves_of(new)
    actual = stacked_like(expected, report)
    yield tolerances.with_what(what, tolerances.by_kind(runner.name, expected, actual, moved, 0))


def settings_switched(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """A step, an evaluation and decoding with each such setting switched, against a device.

    A setting of remat changes no random draw, so the step is with dropout and its state compared.
    """

    @functools.cache
    def reference(is_of_remat: bool) -> Sequence[dict[str, Leaves]]:
        device = check.reference_of(runner)
        return [
            _results(check, device, state, check.one_device, is_of_remat)
            for state in (check.state, check.nudged)
        ]

    for setting in implementation_settings(check.config):
        refusals = []
        for value in setting.others:
            try:
                result = _with_value(check, setting, value)
            except Exception as error:  # A custom model may raise anything.
                refusals.append(f"{value!r}: {str(error).splitlines()[0][:200] or type(error)}")
                continue
            if result is None:
                refusals.append(f"{value!r}: its weights have other names")
                continue
            what = f"{setting.name} {value!r}"
            yield from _compared(runner.name, what, *reference(setting.is_of_remat), result)
            break
        else:
            why = "; ".join(refusals) or "no other value of it is known"
            check.remark(f"{setting.name} = {setting.value!r}: not switched ({why}).")


def _with_value(
    check: Check, setting: ImplementationSetting, value: object
) -> dict[str, Leaves] | None:
    """Returns the results with another value, by kind; None if it has other weights."""
    task = reporting(build(switched(check.config, setting, value)).task)
    other = check.on_mesh(check.own_shape, task)
    state = restacked(check.state, other)
    if state is None:
        return None
    return _results(check, other, state, other, setting.is_of_remat)


def _results(
    check: Check, mesh: TaskRunner, state: TrainState, decoding: TaskRunner, is_of_remat: bool
) -> dict[str, Leaves]:
    """Returns the results of a step, an evaluation and decoding, by kind."""
    batch = check.batches[0]
    (report,), last, _ = mesh.train(
        state, [batch], check.seed, without_randomness=check.is_random and not is_of_remat
    )
    if is_of_remat:
        report |= leaves_of(last)
    results = {"training": report, "evaluation": mesh.evaluate(state.mdl_vars, batch)}
    for name, prompts in _prompts(check).items():
        results[name] = decoding.decode(state.mdl_vars, prompts)
    return results


def _compared(
    mesh: str, what: str, expected: dict[str, Leaves], moved: dict[str, Leaves],
    actual: dict[str, Leaves],
) -> Iterator[list[Comparison]]:
    report = stacked_like(expected["training"], actual["training"])
    yield tolerances.with_what(
        what, tolerances.by_kind(mesh, expected["training"], report, moved["training"], 0)
    )
    for kind in [kind for kind in actual if kind != "training"]:
        yield tolerances.in_float64(
            mesh, f"{kind.split()[0]}, {what}", expected[kind], actual[kind], moved[kind]
        )


def _prompts(check: Check) -> dict[str, dict]:
    return {
        f"decoding {name}": check.with_known_ids(data.first_batches(pipeline, 1)[0])
        for name, pipeline in check.job.decode_datasets.items()
    }
