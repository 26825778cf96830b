"""Reports the layer that produced a step's first NaN or infinity (run.debug_nans)."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from praxis_lite.core.partitioner import accumulation
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.leaf_paths import path_of
from praxis_lite.core.user_lines import LIBRARY_FOLDERS
from praxis_lite.host.file_reading import opened_to_append
from praxis_lite.layers.stacking.pipelining import ticks as pipeline_ticks
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_tools.explain.hlo_layers import GRADIENT_OF, layers_of_name, own_frames
from praxis_tools.nan_finder.origins import Origin, OriginSearch
from praxis_tools.nan_finder.tags import Loop, Operation

MAX_REPORTS = 20


class NonFinite(Hook):
    """Reports the layer that produced a step's first NaN or infinity (run.debug_nans)."""

    # `after_step` waits for the step itself, and this wait is counted as step time.
    waits = False

    def __init__(self, job: JobOnMesh):
        self._job = job

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._watchdog = loop.watchdog
        self._reports = NonFiniteReports(
            self._job.partitioner, self._job.files.non_finite_txt, loop.note
        )

    def after_step(self, dispatched: DispatchedStep) -> None:
        with self._watchdog.during(f"looking for a NaN in step {dispatched.step}"):
            self._reports.check(
                dispatched.step,
                dispatched.state,
                dispatched.batch,
                dispatched.key,
                dispatched.outputs,
            )


class NonFiniteReports:
    """Checks every step, and reruns steps whose loss or gradient is not finite.

    These steps change neither weights nor optimizer slots, so the state before the step is still
    available. The rerun uses a separate compiled function that checks the result of every
    operation. The function is compiled when the first such step occurs, requires the memory of a
    step in addition to the state, and is several times slower than a step.

    Args:
      partitioner: Partitioner of the training step.
      path: Path of the file to which at most `max_reports` reports are appended.
      note: Function called with each line of a report.
      max_reports: Maximum number of reports.

    Attributes:
      search: The function that reruns a step, or None before the first rerun.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        path: Path,
        note: Callable[[str], None],
        max_reports: int = MAX_REPORTS,
    ):
        self._partitioner, self._path, self._note = partitioner, path, note
        self._num_left = self._max_reports = max_reports
        self.search: OriginSearch | None = None

    def check(self, step: int, state: TrainState, batch: Any, key: jax.Array, outputs: Any) -> None:
        """Waits for a step and reports the cause if its loss or gradient is not finite.

        Args:
          step: Number of the step.
          state: State after the step; it is not donated.
          batch: Batch of the step.
          key: Random key of the step.
          outputs: Outputs of the step.
        """
        loss, grad_norm = map(float, jax.device_get(_watched(outputs)))
        if (math.isfinite(loss) and math.isfinite(grad_norm)) or not self._num_left:
            return
        self._num_left -= 1
        args = (self._state_before(step, state, outputs), batch, key)
        lines = [
            f"step {step}: the loss is {loss} and the gradient norm is {grad_norm}; rerun "
            "operation by operation:",
            *(f"  {line}" for line in self._reasons(args)),
        ]
        if not self._num_left:
            lines.append(f"  (no more steps are examined after {self._max_reports} reports)")
        try:
            with opened_to_append(self._path) as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:  # For example, a full disk must not end the run.
            lines.append(f"  (not written to {self._path}: {error.strerror or error})")
        for line in lines:
            self._note(line)

    def _state_before(self, step: int, state: TrainState, outputs: Any) -> TrainState:
        """Returns the state before a skipped step, given the state after it."""
        opt_states = dict(state.opt_states)
        if "loss_scale" in opt_states:  # Skipped steps change only the loss scale and counters.
            scale = outputs["learner"]["loss_scale"]
            opt_states["loss_scale"] = {**opt_states["loss_scale"], "scale": scale}
        before = jax.device_put(np.int32(step - 1), self._partitioner.replicated)
        return dataclasses.replace(state, step=before, opt_states=opt_states)

    def _reasons(self, args: tuple) -> list[str]:
        leaves = jax.tree.leaves_with_path(args)
        if self.search is None:
            # The indices of the loss and the gradient among the flat outputs of the step.
            traced = self._partitioner.train_step.trace(*args)
            structure = jax.tree.structure(traced.out_info)
            num_outputs = len(jax.tree.leaves(traced.out_info))
            _, indices = jax.tree.unflatten(structure, range(num_outputs))
            self.search = OriginSearch(
                traced.jaxpr, _watched(indices), self._partitioner.replicated
            )
        arrays = [x for _, x in leaves]
        loss, gradient = self.search(arrays, only_nan=False)
        first = loss or gradient
        if first is None:
            return [
                "all numbers were finite in the rerun. The cause depends on how XLA fuses "
                "operations (fusions keep extra precision in bfloat16 and float16), or is not "
                "reproducible."
            ]
        if first.operation is not None and first.operation.argument is not None:
            path, x = leaves[first.operation.argument]
            return _argument_reasons(path, x, self._partitioner.replicated)
        loss_nan, gradient_nan = self.search(arrays, only_nan=True)
        return _reasons(first, loss_nan if loss else gradient_nan, is_forward=loss is not None)


def _watched(outputs: Any) -> tuple[Any, Any]:
    """Extracts the loss and the gradient norm from the outputs of a step."""
    return outputs["metrics"]["loss"][0], outputs["learner"]["grad_norm"]


def _argument_reasons(path: tuple, x: jax.Array, replicated: NamedSharding) -> list[str]:
    """Reports a non-finite argument of the step, such as a weight."""
    name = path_of(path)
    for prefix, kind in (
        ("0/mdl_vars/params/", "the weight"),
        ("0/mdl_vars/non_trainable/", "the variable"),
        ("0/", "the state's"),
        ("1/inputs/", "the batch's"),
    ):
        if name.startswith(prefix):
            name = f"{kind} {name.removeprefix(prefix)}"
            break
    by_row = tuple(range(1, x.ndim))
    is_nan, rows = jax.device_get(
        jax.jit(
            lambda x: (jnp.isnan(x).any(), (~jnp.isfinite(x)).any(by_row)), out_shardings=replicated
        )(x)
    )
    where = ""
    if x.ndim:
        first = [int(row) for row in np.flatnonzero(rows)[:5]]
        where = f", in {int(rows.sum())} of its {len(rows)} rows (first dim), the first {first}"
    kind = "NaN" if is_nan else "infinite"
    return [f"{name} was {kind} before the step{where}, so no operation caused it"]


def _reasons(first: Origin, first_nan: Origin | None, is_forward: bool) -> list[str]:
    """Reports the operations that produced the first infinity and the first NaN."""
    where = "the forward pass" if is_forward else "the backward pass (the loss is finite)"
    if first.operation is None:
        # A mask of -inf is intended, so the error is in the code that turned it into a NaN.
        if first_nan is None or first_nan.operation is None:
            constant = "infinity" if first_nan is None else "NaN"
            return [f"in {where}, from a constant {constant} in the model's code"]
        return [f"the first NaN, in {where}, from an infinite constant: {_describe(first_nan)}"]
    if first_nan == first:
        return [f"the first NaN, in {where}: {_describe(first)}"]
    lines = [f"the first infinity, in {where}: {_describe(first)}"]
    if first_nan is not None:
        lines.append(f"the first NaN, computed from it: {_describe(first_nan)}")
    return lines


def _describe(origin: Origin) -> str:
    """Formats an origin: 'in the layer encoder/blocks[3]/ffn, produced by log, at block.py:12'."""
    operation, depth = origin.operation, 0
    if operation is None:
        return "from a constant in the model's code"
    iterations: list[str] = []
    scopes = _scopes(operation)
    for loop, iteration in zip(operation.loops, origin.iterations, strict=True):
        depth = max(depth, len(_scopes(loop)))
        file = next((file for file, _ in _frames(loop.tracebacks)), "")
        name = {accumulation.__file__: "microbatch", pipeline_ticks.__file__: "tick"}.get(file)
        if iteration is None:
            continue
        # The index of a loop over stacked layers belongs to the first scope inside the loop.
        if name is None and depth < len(scopes) and "[" not in scopes[depth]:
            scopes[depth] += f"[{iteration}]"
        else:
            iterations.append(f"{name or 'iteration'} {iteration}")
    layer = "/".join(scopes)
    hint = " (an index out of range gives NaN)" if operation.primitive == "gather" else ""
    parts = [f"in the layer {layer}" if layer else "", f"produced by {operation.primitive}{hint}"]
    lines = _source_lines(operation.tracebacks)
    parts += [f"at {lines}" if lines else "", *iterations]
    return ", ".join(part for part in parts if part)


def _scopes(source: Operation | Loop) -> list[str]:
    # layers_of_name drops the last component of a name, which is the operation itself.
    layer = layers_of_name(f"{source.name_stack}/operation")[0].removeprefix(GRADIENT_OF)
    return layer.split("/") if layer else []


def _source_lines(tracebacks: Sequence[Any]) -> str:
    """Formats source lines, as in 'linears.py:45, called at my_model.py:12' or 'my_model.py:12'.

    The first line is the innermost line outside of third-party libraries. If that line is in this
    package, the line in the user's code that called it is added.
    """
    frames = _frames(tracebacks)
    selected = frames[:1]
    if selected and selected[0][0].startswith(LIBRARY_FOLDERS):
        user_frames = [frame for frame in frames[1:] if not frame[0].startswith(LIBRARY_FOLDERS)]
        selected += user_frames[:1]
    return ", called at ".join(f"{os.path.basename(file)}:{line}" for file, line in selected)


def _frames(tracebacks: Sequence[Any]) -> list[tuple[str, int]]:
    """Returns (file, line) of each call within the step, innermost first."""
    return own_frames(
        [
            (frame.file_name, frame.line_num)
            for traceback in tracebacks
            if traceback is not None
            for frame in traceback.frames
        ]
    )
