"""The parts of a check that only run on the experiment's own mesh."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.learner.weight_groups import Group
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of
from praxis_lite.core.task import Task
from praxis_tools.check import plain_update, tolerances
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.check import Check
from praxis_tools.check.parts import data, properties, rows
from praxis_tools.check.parts.as_trained import as_trained
from praxis_tools.check.parts.implementations import remat, settings_switched, unrolled
from praxis_tools.check.parts.resumed import resumed
from praxis_tools.check.parts.types import types_of
from praxis_tools.check.runs.batch_parts import microbatches_in_turn
from praxis_tools.check.runs.float64 import in_float64
from praxis_tools.check.runs.on_mesh import (
    Leaves,
    TaskRunner,
    leaves_of,
    names_of,
    with_reported_gradients,
)


def check_parts(check: Check, runner: TaskRunner) -> None:
    """Runs the parts of a check on a mesh, fastest first."""
    for part, compare in PARTS.items():
        if not check.includes(part):
            continue
        check.print_progress(f"mesh {runner.name}: {part}")
        for comparisons in compare(check, runner):
            check.add(runner, comparisons)


def evaluation(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares evaluations on a mesh with evaluations on a single device.

    The metrics of a batch are also compared with the means over the batch's two halves.
    """
    one_device, reference = check.one_device, check.reference_of(runner)
    mdl_vars, nudged_vars = check.state.mdl_vars, check.nudged.mdl_vars
    for suffix, batch in check.evaluated.items():
        expected = reference.evaluate(mdl_vars, batch)
        nudged = reference.evaluate(nudged_vars, batch)
        yield tolerances.in_float64(
            runner.name, f"evaluation{suffix}", expected, runner.evaluate(mdl_vars, batch), nudged
        )
        if "weights" in batch and not check.couplings:
            parts = [one_device.evaluate(mdl_vars, half) for half in rows.halves(batch)]
            metrics = {name: x for name, x in expected.items() if name.startswith("metrics/")}
            comparisons = tolerances.in_float64(
                one_device.name,
                f"metrics of halves{suffix}",
                metrics,
                rows.combine_reports(parts),
                nudged,
            )
            yield list(map(tolerances.with_loss_epsilon, comparisons))
    yield from rows.in_evaluation(check, runner)


def reference_update(check: Check, _: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares the updated weights and moving averages on one device with `plain_update`."""
    one_device, num_steps = check.one_device, check.num_steps
    bound_learner, shapes = one_device.partitioner.bound_learner, one_device.layout.shapes

    # One step in float64, from the gradients and the loss that the train step has reported.
    def step(state: TrainState, grads: dict[str, jax.Array], loss: jax.Array) -> TrainState:
        squares = {path: jnp.sum(g * g) for path, g in grads.items()}
        norm, norms = plain_update.grad_norms(bound_learner, squares)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        is_kept = plain_update.is_step_kept(bound_learner, state.opt_states, norms, is_finite)
        before = dict(leaves_with_path(state))
        new = plain_update.updated_weights(
            bound_learner, state, grads, norms, loss, _layer_by_layer
        )
        new = {path: jnp.where(is_kept, x, before[path]) for path, x in new.items()}
        new |= plain_update.updated_counts(bound_learner, state, is_kept, is_finite)
        return jax.tree.map_with_path(lambda keys, x: new.get(path_of(keys), x), state)

    reports, expected = check.train_reference(one_device, num_steps)
    nudged = check.train_reference(one_device, num_steps, nudged=True)[1]
    trained = bound_learner.groups.split(shapes.mdl_vars["params"])[0]
    paths, state = names_of(trained), check.state
    state_spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    grad_specs = {
        path: jax.ShapeDtypeStruct(x.shape, jnp.float32) for path, x in leaves_with_path(trained)
    }
    loss_spec = jax.ShapeDtypeStruct((), jnp.float32)
    # Set the mesh as in a train step, because optimizers may use shard_map.
    mesh_context = jax.sharding.use_abstract_mesh(one_device.mesh.abstract_mesh)
    with mesh_context, jax.enable_x64(True):
        run = jax.jit(in_float64(step, state_spec, grad_specs, loss_spec))
        for report in reports:
            grads = {path: report[f"gradients/{path}"] for path in paths}
            state = run(state, grads, report["metrics/loss/value"])
        actual = leaves_of(jax.device_get(state))
    names = [name for name in expected if name.startswith(("mdl_vars/params/", "opt_states/ema/"))]
    expected, actual, nudged = (
        {name: x[name] for name in names} for x in (expected, actual, nudged)
    )
    yield tolerances.in_float64(
        "one device", "reference update", expected, actual, nudged, num_steps - 1
    )


def _layer_by_layer(group: Group, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that applies `fn` to each layer of stacked trees in a Python loop."""

    def apply(*trees: Any) -> Any:
        layers = [
            fn(*jax.tree.map(lambda x, index=index: x[index], trees))
            for index in np.ndindex(group.stack_shape)
        ]
        return jax.tree.map(
            lambda *xs: jnp.stack(xs).reshape(*group.stack_shape, *xs[0].shape), *layers
        )

    return apply


def padding_rows(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Checks that the contents of rows with weight 0 do not change any result."""
    batch, reference = check.batches[0], check.reference_of(runner)
    if "weights" not in batch:
        check.add_note("Padding rows: not checked, because batches have no weights.")
        return
    # Replace the last rows by padding, with contents from the same batch and from another batch.
    num_padding_rows = max(1, len(batch["weights"]) // 2)
    other_rows = data.with_rows(check.batches[-1], slice(None, None, -1))
    with_same = rows.with_padding_rows(batch, num_padding_rows, batch)
    with_other = rows.with_padding_rows(batch, num_padding_rows, other_rows)
    expected, _ = check.train_once(reference, with_same)
    nudged, _ = check.train_once(reference, with_same, nudged=True)
    for kind, padded in (("same", with_same), ("other", with_other)):
        if kind == "other" and properties.STATISTICS in check.couplings:
            check.add_note(
                "The contents of padding rows are not varied, because batch statistics include "
                "them."
            )
            continue
        actual, _ = check.train_once(runner, padded)
        comparisons = tolerances.by_kind(runner.name, expected, actual, nudged, 0)
        yield tolerances.with_suffix(f"{kind} padding rows", comparisons)
    # Removing the padding rows must not change the evaluation.
    if not check.couplings:
        one_device = check.one_device
        runner = runner if reference is one_device else one_device
        fewer = data.with_rows(with_same, slice(len(batch["weights"]) - num_padding_rows))
        kind, mdl_vars = "evaluation of fewer rows", check.state.mdl_vars
        fewer_expected = check.run_or_skip(kind, lambda: one_device.evaluate(mdl_vars, fewer))
        if fewer_expected is not None:
            nudged = one_device.evaluate(check.nudged.mdl_vars, fewer)
            actual = runner.evaluate(mdl_vars, with_other)
            yield tolerances.in_float64(runner.name, kind, fewer_expected, actual, nudged)


def microbatches(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares steps with 1, 2 and 4 microbatches.

    Dropout is disabled, because its masks depend on the microbatch.
    """
    batch, reference = check.batches[0], check.one_device
    own_number = check.job.task.learner.gradient_accumulation_steps
    if own_number != 1:
        reference = check.on_one_device(task=with_reported_gradients(check.job.task, 1))
    for number in (1, 2, 4):
        if number == own_number and not check.is_random:
            continue  # "training" already compared this.
        is_manual = runner.partitioner.gradient_functions.num_parts is not None
        if check.num_rows % number or (is_manual and check.couplings):
            check.add_note(f"{number} microbatches: not checked.")
            continue
        task = with_reported_gradients(check.job.task, number)

        def train(task: Task = task) -> tuple[Leaves, Leaves]:
            return check.train_once(check.on_mesh(check.own_shape, task), batch)

        # Rows depend on each other, so the reference must process the same microbatches one by one.
        if check.couplings:
            in_turn = microbatches_in_turn(runner.partitioner.gradient_functions.num_microbatches)
            reference = check.on_one_device(in_turn, task)
        trained = check.run_or_skip(f"{number} microbatches", train)
        if trained is None:
            continue
        actual, actual_state = trained
        expected, expected_state = check.train_once(reference, batch)
        nudged, nudged_state = check.train_once(reference, batch, nudged=True)
        comparisons = tolerances.by_kind(runner.name, expected, actual, nudged, 0)
        comparisons += tolerances.by_kind(
            runner.name, expected_state, actual_state, nudged_state, 0
        )
        if not check.couplings:
            comparisons = list(map(tolerances.with_loss_epsilon, comparisons))
        yield tolerances.with_suffix(f"{number} microbatches", comparisons)


def decoding(check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares the decoded outputs for the first batch in each decode dataset."""
    reference, mdl_vars = check.one_device, check.state.mdl_vars
    for pipeline in check.job.decode_datasets.values():
        batch = check.with_known_ids(data.first_batches(pipeline, 1)[0])
        yield tolerances.in_float64(
            runner.name,
            "decoding",
            reference.decode(mdl_vars, batch),
            runner.decode(mdl_vars, batch),
            reference.decode(check.nudged.mdl_vars, batch),
        )
    yield from rows.in_decoding(check, runner)


def equal_results(part: str, check: Check, runner: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares the two results returned by a function in `properties`; they must be equal."""
    batch = check.batches[0]
    function = None if check.couplings else properties.FUNCTIONS[part](check.task, batch)
    if function is None:
        return
    length = batch["ids"].shape[1]
    if part != "packed segments" and length > properties.MAX_TOKENS:
        check.add_note(
            f"{part}: only the first {properties.MAX_TOKENS} of {length} tokens are checked."
        )
    actual = check.run_or_skip(part, lambda: runner.call(function, check.state.mdl_vars, batch))
    if actual is None:
        return
    # In addition to the expected result, there is exactly one other result.
    expected = actual.pop(properties.EXPECTED)
    nudged = runner.call(function, check.nudged.mdl_vars, batch)[properties.EXPECTED]
    (name,) = actual
    yield tolerances.in_float64(runner.name, part, {name: expected}, actual, {name: nudged})


PARTS: dict[str, Callable[[Check, TaskRunner], Iterator[list[Comparison]]]] = {
    "training": rows.in_training,
    "evaluation": evaluation,
    "reference update": reference_update,
    "padding rows": padding_rows,
    "microbatches": microbatches,
    "decoding": decoding,
    **{part: functools.partial(equal_results, part) for part in properties.FUNCTIONS},
    "remat switched": remat,
    "unrolled": unrolled,
    "settings switched": settings_switched,
    "types": types_of,
    "as trained": as_trained,
    "resumed": resumed,
}
