"""A job's layout and each compiled step's collectives, without running it."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import format_bytes
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.inputs import batch_spec
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.lowered.mended_products import mended
from praxis_lite.run.trainer.checks.step_of_data import step_for
from praxis_lite.run.trainer.layout_table import (
    layout_table,
    layout_warnings,
    leaf_table,
    padding_notes,
    split_text,
)
from praxis_lite.tools.explain import hlo, hlo_matmuls
from praxis_lite.tools.explain.cache_notes import cache_notes
from praxis_lite.tools.explain.explain_page import ExplainedStep, in_notebook, page

if TYPE_CHECKING:
    from praxis_lite.core.task import Task


# (step, shapes of a batch, the step compiled, seconds of compiling) -> (name, value) each
Figures = Callable[[Step, Any, jax.stages.Compiled, float], Sequence[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The layout of an experiment, and its compiled steps.

    It prints as --mode=explain does, and a notebook draws what each device holds and sends.

    Attributes:
      experiment: its full name.
      mesh: of the devices.
      layout: of the state: shapes, specs and bytes per device of each array.
      notes, warnings: on the layout, and on products that XLA may permute, in sentences.
      steps: compiled, each with its batch, collectives, memory per device and flops.
      text: all that --mode=explain prints of it.
    """

    experiment: str
    mesh: Mesh
    layout: StateLayout
    notes: Sequence[str]
    warnings: Sequence[str]
    steps: Sequence[ExplainedStep]
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return in_notebook(self.page())

    def page(self) -> str:
        """Returns the page of --html: a whole HTML page that asks nothing of the network."""
        return page(self.experiment, self.mesh, self.layout, self.warnings, self.steps)


def explain(
    partitioner: Partitioner,
    datasets: Mapping[str, InputPipeline],
    decode_datasets: Mapping[str, InputPipeline],
    print_text: Callable[[str], None] = lambda text: None,
    *,
    experiment: str = "",
    figures_of: Figures | None = None,
) -> Explanation:
    """Returns the table of layout.txt, notes, warnings, and per step its batch and collectives.

    Args:
      print_text: told each part of the text as soon as it is known, without its last line break.
      experiment: its full name.
      figures_of: what else is said of a compiled step (step, spec of a batch, step compiled, its
        seconds of compiling) -> (name, value) each; --mode=plan's figures of attached devices.
    """
    texts: list[str] = []

    def say(text: str) -> None:
        texts.append(text)
        print_text(text)

    layout = partitioner.layout
    say(layout_table(layout))
    notes = [*layout.notes, *padding_notes(layout)]
    if decode_datasets:
        notes += cache_notes(partitioner.task, partitioner.mesh)
    for note in notes:
        say(f"note: {note}")
    warnings = layout_warnings(layout)
    for warning in warnings:
        say(f"WARNING: {warning}")
    steps = [
        (step_for(partitioner, root, name), name, pipeline)
        for root, pipelines in (("datasets", datasets), ("decode_datasets", decode_datasets))
        for name, pipeline in pipelines.items()
    ]
    explained = []
    for step, name, pipeline in steps:
        say(f"\n{step.name}, batches of {name}")
        spec = pipeline.element_spec()
        start = time.monotonic()
        told: list[str] = []
        compiled = mended(step.lower(spec), partitioner.mesh, told.append).compile()
        seconds = time.monotonic() - start
        for warning in told:
            warnings.append(warning)
            say(f"  WARNING: {warning}")
        item = explained_step(partitioner, step, name, spec, compiled)
        if figures_of is not None:
            figures = figures_of(step, spec, compiled, seconds)
            item = dataclasses.replace(item, figures=figures)
        explained.append(item)
        say("\n".join(f"  {line}".rstrip() for line in _step_text(item).splitlines()))
    return Explanation(
        experiment, partitioner.mesh, layout, notes, warnings, explained, "\n".join(texts)
    )


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
        flops=hlo_matmuls.flops(compiled),
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
