"""Names the layer that made a step's loss or gradient NaN or infinite: what run.debug_nans does."""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from praxis_lite.explain.hlo_layers import PACKAGE_FOLDER, layers_of_name
from praxis_lite.layers.stacking import pipeline_ticks
from praxis_lite.partitioner import Partitioner, TrainState, accumulation
from praxis_lite.trainer.non_finite.jaxprs import Loop, Site
from praxis_lite.trainer.non_finite.origins import Origin, OriginSearch

MAX_REPORTS = 20


class NonFiniteSteps:
    """Looks at every step of a run; one with a non-finite loss or gradient is run again.

    Such a step left weights and slots as they were, so that its state can be had again. What runs
    is the step that was compiled, one operation after the other, each looked at: another program,
    made at the first such step. It needs a step's memory besides the state, and takes several
    times as long.

    Args:
      path: of the file that the reports are added to.
      note: told each line of a report. There are at most MAX_REPORTS.
    """

    def __init__(self, partitioner: Partitioner, path: Path, note: Callable[[str], None]):
        self._partitioner, self._path, self._note = partitioner, path, note
        self._search: OriginSearch | None = None
        self._num_reports = 0

    def look(
        self, step: int, state: TrainState, batch: Any, key: jax.Array, outputs: Any
    ) -> None:
        """Waits for a step and, if its loss or gradient is not finite, reports why.

        Args:
          step: the one made.
          state: after it; not donated.
          batch, key: it was made with.
          outputs: it gave.
        """
        loss, grad_norm = map(float, jax.device_get(_watched(outputs)))
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        if self._num_reports >= MAX_REPORTS:
            return
        self._num_reports += 1
        args = (self._before(step, state, outputs), batch, key)
        lines = [
            f"step {step}: the loss is {loss}, the norm of the gradient {grad_norm}; run again, "
            "operation by operation:",
            *(f"  {line}" for line in self._reasons(args)),
        ]
        if self._num_reports == MAX_REPORTS:
            lines.append(f"  (no more steps are looked into: this was the {MAX_REPORTS}th)")
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:  # A full disk, say: no reason to end the run.
            lines.append(f"  (not written to {self._path}: {error.strerror})")
        for line in lines:
            self._note(line)

    def _before(self, step: int, state: TrainState, outputs: Any) -> TrainState:
        opt_states = dict(state.opt_states)
        if "loss_scale" in opt_states:  # What a skipped step changes besides counts.
            scale = outputs["learner"]["loss_scale"]
            opt_states["loss_scale"] = {**opt_states["loss_scale"], "scale": scale}
        before = jax.device_put(np.int32(step - 1), self._partitioner.replicated)
        return dataclasses.replace(state, step=before, opt_states=opt_states)

    def _reasons(self, args: tuple) -> list[str]:
        leaves = jax.tree_util.tree_flatten_with_path(args)[0]
        if self._search is None:
            traced = self._partitioner.train_step.trace(*args)
            structure = jax.tree.structure(traced.out_info)
            _, indices = jax.tree.unflatten(structure, range(structure.num_leaves))
            self._search = OriginSearch(
                traced.jaxpr, _watched(indices), self._partitioner.replicated
            )
        args = [x for _, x in leaves]
        loss, gradient = self._search(args, only_nan=False)
        first = loss or gradient
        if first is None:
            return [
                "all numbers were finite this time. So it depends on how XLA put operations "
                "together (digits kept between them in bfloat16 or float16), or does not come back."
            ]
        if first.site is not None and first.site.argument is not None:
            return _argument_reasons(*leaves[first.site.argument], self._partitioner.replicated)
        loss_nan, gradient_nan = self._search(args, only_nan=True)
        return _reasons(first, loss_nan if loss else gradient_nan, is_forward=loss is not None)


def _watched(outputs: Any) -> tuple[Any, Any]:
    return outputs["metrics"]["loss"][0], outputs["learner"]["grad_norm"]


def _argument_reasons(path: tuple, x: jax.Array, replicated: NamedSharding) -> list[str]:
    """Returns what is said of a weight, or a leaf of the batch, that was not finite before."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for prefix, kind in (
        ("0/mdl_vars/params/", "the weight"), ("0/mdl_vars/non_trainable/", "the variable"),
        ("0/", "the state's"), ("1/inputs/", "the batch's"),
    ):
        if name.startswith(prefix):
            name = f"{kind} {name.removeprefix(prefix)}"
            break
    is_nan, rows = jax.device_get(jax.jit(_non_finite_rows, out_shardings=replicated)(x))
    where = ""
    if x.ndim:
        first = [int(row) for row in np.flatnonzero(rows)[:5]]
        where = f", in {int(rows.sum())} of its {len(rows)} rows (first dim), the first {first}"
    kind = "NaN" if is_nan else "infinite"
    return [f"{name} was {kind} before the step{where}; no operation is to blame"]


def _non_finite_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    bad = ~jnp.isfinite(x)
    return jnp.any(jnp.isnan(x)), jnp.any(bad, axis=tuple(range(1, x.ndim)))


def _reasons(first: Origin, first_nan: Origin | None, is_forward: bool) -> list[str]:
    where = "the forward pass" if is_forward else "the backward pass (the loss is finite)"
    if first.site is None:
        # A mask of -inf is meant, and what the code made a NaN of it is what is wrong.
        if first_nan is None or first_nan.site is None:
            what = "infinity" if first_nan is None else "NaN"
            return [f"in {where}, from a constant {what} of the model's code"]
        return [f"the first NaN, in {where}, of an infinite constant: {_place(first_nan)}"]
    if first_nan == first:
        return [f"the first NaN, in {where}: {_place(first)}"]
    lines = [f"the first infinity, in {where}: {_place(first)}"]
    if first_nan is not None:
        lines.append(f"the first NaN, made of it: {_place(first_nan)}")
    return lines


def _place(origin: Origin) -> str:
    """Returns 'in the layer encoder/blocks[3]/ffn, made by log, at block.py:12'."""
    site, before, turns = origin.site, 0, []
    scopes = _scopes(site)
    for loop, turn in zip(site.loops, origin.turns, strict=True):
        before = max(before, len(_scopes(loop)))
        file = next((file for file, _ in _own_frames(loop.tracebacks)), "")
        name = {accumulation.__file__: "micro-batch", pipeline_ticks.__file__: "tick"}.get(file)
        if turn is None:
            continue
        if name is None and before < len(scopes) and "[" not in scopes[before]:
            scopes[before] += f"[{turn}]"
        else:
            turns.append(f"{name or 'turn'} {turn}")
    layer = "/".join(scopes)
    hint = " (an index out of range gives NaN)" if site.operation == "gather" else ""
    parts = [f"in the layer {layer}" if layer else "", f"made by {site.operation}{hint}"]
    lines = _source_lines(site.tracebacks)
    parts += [f"at {lines}" if lines else "", *turns]
    return ", ".join(part for part in parts if part)


def _scopes(named: Site | Loop) -> list[str]:
    # The last part would be the operation.
    layer = layers_of_name(f"{named.name_stack}/operation")[0].removeprefix("gradient of ")
    return layer.split("/") if layer else []


def _source_lines(tracebacks: Sequence[Any]) -> str:
    """Returns 'linears.py:45, called at my_model.py:12': in a layer of this package, and outside.

    The innermost line that is neither of JAX nor of another library.
    """
    frames = _own_frames(tracebacks)
    outer = itertools.islice(frames, 1, None)
    users = [one for one in outer if not one[0].startswith(PACKAGE_FOLDER)]
    names = [f"{os.path.basename(file)}:{line}" for file, line in (*frames[:1], *users[:1])]
    is_ours = frames and frames[0][0].startswith(PACKAGE_FOLDER)
    return ", called at ".join(names if is_ours else names[:1])


def _own_frames(tracebacks: Sequence[Any]) -> list[tuple[str, int]]:
    """Returns (file, line) of the calls from the step inwards, innermost first."""
    frames = [
        (one.file_name, one.line_num) for traceback in tracebacks if traceback is not None
        for one in traceback.frames
    ]
    frames = [one for one in frames if not re.search(r"lib/python3|(site|dist)-packages", one[0])]
    ours = [place for place, (file, _) in enumerate(frames) if file.startswith(PACKAGE_FOLDER)]
    # What launched the step is none of the model's.
    return frames[: ours[-1] + 1] if ours else frames
