"""Comparisons on the experiment's own mesh alone: all parts of a job but training."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.run.config.build import build
from praxis_lite.tools.testing import tolerances
from praxis_lite.tools.testing.certificate import Comparison
from praxis_lite.tools.testing.check import Check
from praxis_lite.tools.testing.parts import data, properties, rows
from praxis_lite.tools.testing.parts.as_trained import as_trained
from praxis_lite.tools.testing.parts.by_hand import update_by_hand
from praxis_lite.tools.testing.parts.resumed import resumed
from praxis_lite.tools.testing.parts.switched import settings_switched
from praxis_lite.tools.testing.parts.types import types_of
from praxis_lite.tools.testing.runs import remat_attributes, variants
from praxis_lite.tools.testing.runs.on_mesh import OnMesh, leaves_of, reporting
from praxis_lite.tools.testing.runs.parts import micro_batches_in_turn
from praxis_lite.tools.testing.runs.states import restacked, stacked_like

Batch = dict[str, np.ndarray]


def check(check: Check, one: OnMesh) -> None:
    """Adds the comparisons on a mesh to a check, in the order of the time they take."""
    for what, compare in PARTS.items():
        if not check.makes(what):
            continue
        check.note(f"mesh {one.name}: {what}")
        for comparisons in compare(check, one):
            check.add(one, comparisons)


def evaluation(check: Check, one: OnMesh) -> Iterator[list[Comparison]]:
    """Metrics and outputs of each row; and that a batch's metrics are the means of its halves'."""
    plain, reference = check.plain_one, check.reference_of(one)
    mdl_vars, nudged = check.state.mdl_vars, check.nudged.mdl_vars
    for of_what, batch in check.evaluated.items():
        expected, moved = reference.evaluate(mdl_vars, batch), reference.evaluate(nudged, batch)
        yield tolerances.in_float64(
            one.name, f"evaluation{of_what}", expected, one.evaluate(mdl_vars, batch), moved
        )
        if "weights" in batch and not check.couplings:
            parts = [plain.evaluate(mdl_vars, half) for half in rows.halves(batch)]
            metrics = {name: x for name, x in expected.items() if name.startswith("metrics/")}
            actual = tolerances.in_float64(
                plain.name, f"metrics of halves{of_what}", metrics, rows.sums(parts), moved
            )
            yield list(map(tolerances.with_epsilon, actual))
    yield from rows.in_evaluation(check, one)


def filler(check: Check, one: OnMesh) -> Iterator[list[Comparison]]:
    """A batch whose last rows have no weight: their contents enter nothing."""
    batch, reference = check.batches[0], check.reference_of(one)
    if "weights" not in batch:
        check.remark("Rows of filler: not checked, for batches have no weights.")
        return
    num_filler = max(1, len(batch["weights"]) // 2)
    others = data.with_rows(check.batches[-1], slice(None, None, -1))
    same = rows.with_filler(batch, num_filler, batch)
    other = rows.with_filler(batch, num_filler, others)
    expected, _ = check.train_once(reference, same)
    moved, _ = check.train_once(reference, same, nudged=True)
    for kind, filled in (("the same", same), ("other", other)):
        if kind == "other" and properties.STATISTICS in check.couplings:
            check.remark("Batch statistics see rows of filler: their contents are not exchanged.")
            continue
        actual, _ = check.train_once(one, filled)
        compared = tolerances.by_kind(one.name, expected, actual, moved, 0)
        yield tolerances.of(f"{kind} rows of filler", compared)
    if not check.couplings:
        one, plain = (one if reference is check.plain_one else check.plain_one), check.plain_one
        fewer = data.with_rows(same, slice(len(batch["weights"]) - num_filler))
        what, mdl_vars = "evaluation of fewer rows", check.state.mdl_vars
        expected = check.tried(what, lambda: plain.evaluate(mdl_vars, fewer))
        if expected is not None:
            moved = plain.evaluate(check.nudged.mdl_vars, fewer)
            actual = one.evaluate(mdl_vars, other)
            yield tolerances.in_float64(one.name, what, expected, actual, moved)


def micro_batches(check: Check, one: OnMesh) -> Iterator[list[Comparison]]:
    """A batch worked on in 1, 2 and 4 parts, without dropout, which differs by part."""
    batch, whole = check.batches[0], (1,) * len(one.mesh.shape)
    num_steps = check.job.task.learner.gradient_accumulation_steps
    num_rows = check.num_rows
    reference = check.plain_one
    if num_steps != 1:
        reference = check.on_mesh(whole, Partitioner, reporting(check.job.task, 1))
    for number in (1, 2, 4):
        if number == num_steps and not check.is_random:
            continue  # It was trained so.
        by_hand = one.partitioner.gradients.num_parts is not None
        if num_rows % number or (by_hand and check.couplings):
            check.remark(f"{number} micro-batches: not checked.")
            continue
        task = reporting(check.job.task, number)
        if check.couplings:
            gradients = micro_batches_in_turn(one.partitioner.gradients.num_micro_batches)
            in_turn = functools.partial(Partitioner, gradients=gradients)
            reference = check.on_mesh(whole, in_turn, task)
        trained = check.tried(
            f"{number} micro-batches",
            lambda task=task: check.train_once(
                check.on_mesh(check.own_shape, None, task), batch
            ),
        )
        if trained is None:
            continue
        actual, state = trained
        expected, right = check.train_once(reference, batch)
        moved, moved_state = check.train_once(reference, batch, nudged=True)
        compared = tolerances.by_kind(one.name, expected, actual, moved, 0)
        compared += tolerances.by_kind(one.name, right, state, moved_state, 0)
        if not check.couplings:
            compared = list(map(tolerances.with_epsilon, compared))
        yield tolerances.of(f"{number} micro-batches", compared)


def decoding(check: Check, one: OnMesh) -> Iterator[list[Comparison]]:
    """The task's decoded outputs of the first batch of each of its prompts."""
    reference, mdl_vars = check.plain_one, check.state.mdl_vars
    for pipeline in check.job.decode_datasets.values():
        batch = check.known(data.first_batches(pipeline, 1)[0])
        yield tolerances.in_float64(
            one.name, "decoding", reference.decode(mdl_vars, batch), one.decode(mdl_vars, batch),
            reference.decode(check.nudged.mdl_vars, batch),
        )
    yield from rows.in_decoding(check, one)


def two_ways(
    what: str, property_of: Callable[..., Any], check: Check, one: OnMesh
) -> Iterator[list[Comparison]]:
    """A function of `properties`, computed in two ways: the first is to be trusted."""
    batch = check.batches[0]
    function = None if check.couplings else property_of(check.task, batch)
    if function is None:
        return
    length = batch["ids"].shape[1]
    if property_of is not properties.packed and length > properties.MOST_TOKENS:
        check.remark(f"{what}: the first {properties.MOST_TOKENS} of {length} tokens.")
    result = check.tried(what, lambda: one.call(function, check.state.mdl_vars, batch))
    if result is None:
        return
    moved = one.call(function, check.nudged.mdl_vars, batch)
    trusted, other = properties.TWO_WAYS[property_of]
    yield tolerances.in_float64(
        one.name, what, {other: result[trusted]}, {other: result[other]}, {other: moved[trusted]}
    )


def remat(check: Check, one: OnMesh) -> Iterator[list[Comparison]]:
    """A step and its state with remat on where it is off, and off where it is on.

    Dropout is on in both: what is computed again draws the same masks, and updates nothing twice.
    """
    task = remat_attributes.remat_switched(check.task)
    if task is None:
        check.remark("remat switched: not checked, for no layer has an attribute that says that.")
        return
    other = check.tried("remat switched", lambda: check.on_mesh(check.own_shape, None, task))
    if other is not None:
        yield from _same_step("remat switched", check, one, other, with_state=True)


def unrolled(check: Check, one: OnMesh) -> Iterator[list[Comparison]]:
    """A step of the model with its scanned stacks in a row, and the other way."""
    config = variants.unrolled(check.config)
    if config is None:
        check.remark("unrolled: not checked, for no layer's config says that.")
        return

    def changed() -> OnMesh:
        return check.on_mesh(check.own_shape, None, reporting(build(config).task))

    other = check.tried("unrolled", changed)
    if other is not None:
        yield from _same_step("unrolled", check, one, other)


def _same_step(
    what: str, check: Check, one: OnMesh, other: OnMesh, with_state: bool = False
) -> Iterator[list[Comparison]]:
    state = restacked(check.state, other)
    if state is None:
        check.remark(f"{what}: not checked, for its weights have other names.")
        return
    reference = check.reference_of(one)
    (expected,), last = check.trained_on_one(reference, 1)
    (moved,), last_moved = check.trained_on_one(reference, 1, nudged=True)
    (report,), new, _ = other.train(state, check.batches[:1], check.seed)
    if with_state:
        expected, moved, report = expected | last, moved | last_moved, report | leaves_of(new)
    actual = stacked_like(expected, report)
    yield tolerances.of(what, tolerances.by_kind(one.name, expected, actual, moved, 0))


PARTS: dict[str, Callable[[Check, OnMesh], Iterator[list[Comparison]]]] = {
    "training": rows.in_training,
    "evaluation": evaluation,
    "update by hand": update_by_hand,
    "rows of filler": filler,
    "micro-batches": micro_batches,
    "decoding": decoding,
    **{
        what: functools.partial(two_ways, what, property_of) for what, property_of in (
            ("token by token", properties.token_by_token),
            ("ragged prompts", properties.ragged_prompts),
            ("packed segments", properties.packed),
        )
    },
    "remat switched": remat,
    "unrolled": unrolled,
    "settings switched": settings_switched,
    "types": types_of,
    "as trained": as_trained,
    "resumed": resumed,
}
