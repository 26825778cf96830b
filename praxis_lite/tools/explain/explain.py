"""A job's layout and each compiled step's collectives, without running it."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from praxis_lite.core.errors import format_bytes
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.inputs import batch_spec
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.run.trainer.checks.step_of_data import step_for
from praxis_lite.run.trainer.layout_table import (
    layout_table,
    layout_warnings,
    leaf_table,
    padding_notes,
    split_text,
)
from praxis_lite.tools.explain import hlo
from praxis_lite.tools.explain.explain_page import ExplainedStep, page

if TYPE_CHECKING:
    from praxis_lite.core.task import Task


# (step, shapes of a batch, the step compiled, seconds of compiling) -> (name, value) each
Figures = Callable[[Step, Any, jax.stages.Compiled, float], Sequence[tuple[str, str]]]


def explain(
    partitioner: Partitioner,
    datasets: Mapping[str, InputPipeline],
    decode_datasets: Mapping[str, InputPipeline],
    print_text: Callable[[str], None],
    *,
    title: str = "",
    html: Path | None = None,
    figures_of: Figures | None = None,
) -> None:
    """Prints the table of layout.txt, notes, warnings, and per step its batch and collectives.

    Args:
      print_text: takes a text without its last line break.
      title, html: of the page that draws what each device holds; html=None: no page is written.
      figures_of: what else is said of a compiled step (step, spec of a batch, step compiled, its
        seconds of compiling) -> (name, value) each; --mode=plan's figures of attached devices.
    """
    layout = partitioner.layout
    print_text(layout_table(layout))
    for note in (*layout.notes, *padding_notes(layout)):
        print_text(f"note: {note}")
    warnings = layout_warnings(layout)
    for warning in warnings:
        print_text(f"WARNING: {warning}")
    steps = [
        (step_for(partitioner, root, name), name, pipeline)
        for root, pipelines in (("datasets", datasets), ("decode_datasets", decode_datasets))
        for name, pipeline in pipelines.items()
    ]
    explained = []
    for step, name, pipeline in steps:
        print_text(f"\n{step.name}, batches of {name}")
        spec = pipeline.element_spec()
        start = time.monotonic()
        compiled = step.lower(spec).compile()
        seconds = time.monotonic() - start
        item = explained_step(partitioner, step, name, spec, compiled)
        if figures_of is not None:
            figures = figures_of(step, spec, compiled, seconds)
            item = dataclasses.replace(item, figures=figures)
        explained.append(item)
        for line in _step_text(explained[-1]).splitlines():
            print_text(f"  {line}".rstrip())
    if html is not None:
        html.write_text(page(title, partitioner.mesh, layout, warnings, explained), "utf-8")
        print_text(f"\nThe page to look at in a browser: {html.absolute()}")


def explained_step(
    partitioner: Partitioner, step: Step, name: str, element_spec: dict,
    compiled: jax.stages.Compiled,
) -> ExplainedStep:
    """Returns the memory and traffic of a compiled step, of batches of the dataset `name`."""
    return ExplainedStep(
        step=step.kind,
        dataset=name,
        batch=_batch_layout(partitioner.task, element_spec, partitioner.layout.axis_sizes),
        collectives=hlo.collectives(compiled),
        memory=hlo.memory_per_device(compiled),
        donated=(hlo.donated_bytes(compiled), hlo.num_donated(compiled)),
        flops=hlo.flops(compiled),
    )


def _batch_layout(task: "Task", element_spec: dict, axis_sizes: Mapping[str, int]) -> StateLayout:
    """Returns the layout that a batch has when it reaches a step: rows over the whole mesh."""
    declared_by = {}
    for path, x in leaves_with_path(element_spec):
        entry = (task.inputs_split_mapping or {}).get(f"map_{x.ndim}d")
        inside = f"; then map_{x.ndim}d {split_text(entry)}" if entry is not None else ""
        declared_by[path] = (
            f"rows over the mesh{inside}" if x.ndim else "a scalar: replicated"
        )
    return StateLayout(
        shapes=element_spec,
        specs=jax.tree.map(lambda x: batch_spec(x.ndim, tuple(axis_sizes)), element_spec),
        axis_sizes=axis_sizes,
        declared_by=declared_by,
    )


def _step_text(explained: ExplainedStep) -> str:
    lines = [leaf_table(explained.batch.leaves()), ""]
    lines += [hlo.collectives_table(explained.collectives)]
    if (memory := explained.memory) is not None:
        lines.append(
            f"memory per device: arguments {format_bytes(memory.arguments)}, outputs "
            f"{format_bytes(memory.outputs)}, temporary {format_bytes(memory.temp)}"
        )
    size, number = explained.donated
    lines.append(f"donated per device: {format_bytes(size)} in {number} buffers")
    lines.append(f"matmul flops per device: {explained.flops:,}")
    lines += [f"{name}: {value}" for name, value in explained.figures]
    return "\n".join(lines)
