"""The parts of a check that are made on the experiment's own mesh only."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.learner.weight_groups import Group
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of
from praxis_tools.check import plain_update, tolerances
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.check import Check
from praxis_tools.check.parts import data, properties, rows
from praxis_tools.check.parts.as_trained import as_trained
from praxis_tools.check.parts.implementations import remat, settings_switched, unrolled
from praxis_tools.check.parts.resumed import resumed
from praxis_tools.check.parts.types import types_of
from praxis_tools.check.runs.batch_parts import micro_batches_in_turn
from praxis_tools.check.runs.float64 import in_float64
from praxis_tools.check.runs.on_mesh import TaskRunner, leaves_of, names_of, reporting


def check_parts(check: Check, runner: TaskRunner) -> None:
    """Adds the comparisons on a mesh to a check, in the order of the time they take."""
    for what, compare in PARTS.items():
        if not check.includes(what):
            continue
        check.note(f"mesh {runner.name}: {what}")
        for comparisons in compare(check, runner):
            check.add(runner, comparisons)


def evaluation(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Metrics and outputs of each row; and that a batch's metrics are the means of its halves'."""
    plain, reference = check.one_device, check.reference_of(runner)
    mdl_vars, nudged = check.state.mdl_vars, check.nudged.mdl_vars
    for of_what, batch in check.evaluated.items():
        expected, moved = reference.evaluate(mdl_vars, batch), reference.evaluate(nudged, batch)
        yield tolerances.in_float64(
            runner.name, f"evaluation{of_what}", expected, runner.evaluate(mdl_vars, batch), moved
        )
        if "weights" in batch and not check.couplings:
            parts = [plain.evaluate(mdl_vars, half) for half in rows.halves(batch)]
            metrics = {name: x for name, x in expected.items() if name.startswith("metrics/")}
            actual = tolerances.in_float64(
                plain.name, f"metrics of halves{of_what}", metrics, rows.sums(parts), moved
            )
            yield list(map(tolerances.with_epsilon, actual))
    yield from rows.in_evaluation(check, runner)


def update_by_hand(check: Check, _: TaskRunner) -> Iterator[list[Comparison]]:
    """Weights and averages after the steps of a single device, recomputed from its gradients."""
    plain, number = check.one_device, check.num_steps
    bound, shapes = plain.partitioner.learner, plain.layout.shapes

    def step(state: TrainState, grads: dict[str, jax.Array], loss: jax.Array) -> TrainState:
        squares = {path: jnp.sum(g * g) for path, g in grads.items()}
        norm, norms = plain_update.grad_norms(bound, squares)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        is_kept = plain_update.is_step_kept(bound, state.opt_states, norms, is_finite)
        before = dict(leaves_with_path(state))
        new = plain_update.updated_weights(bound, state, grads, norms, loss, _layer_by_layer)
        new = {path: jnp.where(is_kept, x, before[path]) for path, x in new.items()}
        new |= plain_update.updated_counts(bound, state, is_kept, is_finite)
        return jax.tree.map_with_path(lambda keys, x: new.get(path_of(keys), x), state)

    reports, expected = check.trained_on_one(plain, number)
    _, moved = check.trained_on_one(plain, number, nudged=True)
    trained, _ = bound.groups.split(shapes.mdl_vars["params"])
    paths, state = names_of(trained), check.state
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    like = {
        path: jax.ShapeDtypeStruct(x.shape, jnp.float32) for path, x in leaves_with_path(trained)
    }
    # An optimizer may run its own shard_map: the mesh is set as in a step.
    in_context = jax.sharding.use_abstract_mesh(plain.mesh.abstract_mesh)
    with in_context, jax.enable_x64(True):
        run = jax.jit(in_float64(step, given, like, jax.ShapeDtypeStruct((), jnp.float32)))
        for report in reports:
            grads = {path: report[f"gradients/{path}"] for path in paths}
            state = run(state, grads, report["metrics/loss/value"])
        actual = leaves_of(jax.device_get(state))
    names = [name for name in expected if name.startswith(("mdl_vars/params/", "opt_states/ema/"))]
    expected, actual, moved = ({name: x[name] for name in names} for x in (expected, actual, moved))
    yield tolerances.in_float64(
        "one device", "update by hand", expected, actual, moved, number - 1
    )


def _layer_by_layer(group: Group, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn`, of a layer's trees, applied to one layer after the other without jax.vmap."""

    def applied(*trees: Any) -> Any:
        layers = [
            fn(*jax.tree.map(lambda x, index=index: x[index], trees))
            for index in np.ndindex(group.stack_shape)
        ]
        return jax.tree.map(
            lambda *xs: jnp.stack(xs).reshape(*group.stack_shape, *xs[0].shape), *layers
        )

    return applied


def padding_rows(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """A batch whose last rows have weight 0: their contents change no result."""
    batch, reference = check.batches[0], check.reference_of(runner)
    if "weights" not in batch:
        check.remark("Rows of filler: not checked, for batches have no weights.")
        return
    num_padding_rows = max(1, len(batch["weights"]) // 2)
    others = data.with_rows(check.batches[-1], slice(None, None, -1))
    same = rows.with_padding_rows(batch, num_padding_rows, batch)
    other = rows.with_padding_rows(batch, num_padding_rows, others)
    expected, _ = check.train_once(reference, same)
    moved, _ = check.train_once(reference, same, nudged=True)
    for kind, filled in (("the same", same), ("other", other)):
        if kind == "other" and properties.STATISTICS in check.couplings:
            check.remark("Batch statistics see rows of filler: their contents are not exchanged.")
            continue
        actual, _ = check.train_once(runner, filled)
        compared = tolerances.by_kind(runner.name, expected, actual, moved, 0)
        yield tolerances.with_what(f"{kind} rows of filler", compared)
    if not check.couplings:
        plain = check.one_device
        runner = runner if reference is plain else plain
        fewer = data.with_rows(same, slice(len(batch["weights"]) - num_padding_rows))
        what, mdl_vars = "evaluation of fewer rows", check.state.mdl_vars
        expected = check.tried(what, lambda: plain.evaluate(mdl_vars, fewer))
        if expected is not None:
            moved = plain.evaluate(check.nudged.mdl_vars, fewer)
            actual = runner.evaluate(mdl_vars, other)
            yield tolerances.in_float64(runner.name, what, expected, actual, moved)


def micro_batches(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """A batch in 1, 2 and 4 micro-batches, without dropout, whose masks differ by micro-batch."""
    batch, reference = check.batches[0], check.one_device
    num_steps = check.job.task.learner.gradient_accumulation_steps
    if num_steps != 1:
        reference = check.on_one_device(task=reporting(check.job.task, 1))
    for number in (1, 2, 4):
        if number == num_steps and not check.is_random:
            continue  # It was trained so.
        by_hand = runner.partitioner.gradients.num_parts is not None
        if check.num_rows % number or (by_hand and check.couplings):
            check.remark(f"{number} micro-batches: not checked.")
            continue
        task = reporting(check.job.task, number)
        if check.couplings:
            in_turn = micro_batches_in_turn(runner.partitioner.gradients.num_micro_batches)
            reference = check.on_one_device(in_turn, task)
        trained = check.tried(
            f"{number} micro-batches",
            lambda task=task: check.train_once(check.on_mesh(check.own_shape, task), batch),
        )
        if trained is None:
            continue
        actual, actual_state = trained
        expected, expected_state = check.train_once(reference, batch)
        moved, moved_state = check.train_once(reference, batch, nudged=True)
        compared = tolerances.by_kind(runner.name, expected, actual, moved, 0)
        compared += tolerances.by_kind(runner.name, expected_state, actual_state, moved_state, 0)
        if not check.couplings:
            compared = list(map(tolerances.with_epsilon, compared))
        yield tolerances.with_what(f"{number} micro-batches", compared)


def decoding(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """The task's decoded outputs of the first batch of each of its prompts."""
    reference, mdl_vars = check.one_device, check.state.mdl_vars
    for pipeline in check.job.decode_datasets.values():
        batch = check.with_known_ids(data.first_batches(pipeline, 1)[0])
        yield tolerances.in_float64(
            runner.name, "decoding", reference.decode(mdl_vars, batch),
            runner.decode(mdl_vars, batch), reference.decode(check.nudged.mdl_vars, batch),
        )
    yield from rows.in_decoding(check, runner)


def two_ways(what: str, check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """A function of `properties` that computes the same in two ways."""
    batch = check.batches[0]
    function = None if check.couplings else properties.FUNCTIONS[what](check.task, batch)
    if function is None:
        return
    length = batch["ids"].shape[1]
    if what != "packed segments" and length > properties.MOST_TOKENS:
        check.remark(f"{what}: the first {properties.MOST_TOKENS} of {length} tokens.")
    actual = check.tried(what, lambda: runner.call(function, check.state.mdl_vars, batch))
    if actual is None:
        return
    moved = runner.call(function, check.nudged.mdl_vars, batch)
    expected, moved = (x.pop(properties.EXPECTED) for x in (actual, moved))
    (name,) = actual
    yield tolerances.in_float64(runner.name, what, {name: expected}, actual, {name: moved})


PARTS: dict[str, Callable[[Check, TaskRunner], Iterator[list[Comparison]]]] = {
    "training": rows.in_training,
    "evaluation": evaluation,
    "update by hand": update_by_hand,
    "rows of filler": padding_rows,
    "micro-batches": micro_batches,
    "decoding": decoding,
    **{what: functools.partial(two_ways, what) for what in properties.FUNCTIONS},
    "remat switched": remat,
    "unrolled": unrolled,
    "settings switched": settings_switched,
    "types": types_of,
    "as trained": as_trained,
    "resumed": resumed,
}
