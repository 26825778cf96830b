"""Explains the layout and the compiled steps of a job without running the job."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jax.sharding import Mesh

from praxis_lite.core.errors import format_bytes
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import batch_spec
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.split_dims import num_shards_of
from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.latent import MultiHeadLatentAttention
from praxis_lite.trainer.checks.datasets import step_for
from praxis_lite.trainer.compilation import current_metadata
from praxis_lite.trainer.layout_table import (
    layout_table,
    layout_warnings,
    leaf_table,
    padding_notes,
    split_text,
)
from praxis_tools.explain import hlo, hlo_matmuls
from praxis_tools.explain.explain_page import ExplainedStep, in_notebook, page

if TYPE_CHECKING:
    from praxis_lite.core.task import Task


# Takes (step, shapes of a batch, compiled step, compilation time in seconds) and returns (name,
# value) pairs.
Figures = Callable[[Step, Any, jax.stages.Compiled, float], Sequence[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The layout and the compiled steps of an experiment.

    `print(explanation)` shows the output of `praxis explain`. Notebooks display the HTML page, with
    the memory and communication of each device.

    Attributes:
      experiment: Full name of the experiment.
      mesh: The job's mesh.
      layout: Shape, spec and bytes per device of each array in the train state.
      notes: Notes about the layout.
      warnings: Warnings about the layout and about matmuls that XLA may permute.
      steps: The compiled steps, with their batch, collectives, memory per device and flops.
      text: Output of `praxis explain`.
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
        """Returns the self-contained HTML page that --html writes."""
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
    """Compiles the steps of a job, and explains these steps and the layout of the state.

    Args:
      partitioner: The job's partitioner.
      datasets: Maps names to the datasets for training and evaluation.
      decode_datasets: Maps names to prompt datasets.
      print_text: Function called with each section of the text as soon as it is known, without a
        trailing newline.
      experiment: Full name of the experiment.
      figures_of: Function that returns additional figures for a compiled step, such as the plan's
        predictions.
    """
    texts: list[str] = []

    def add(text: str) -> None:
        texts.append(text)
        print_text(text)

    layout = partitioner.layout
    add(layout_table(layout))
    notes = [*layout.notes, *padding_notes(layout)]
    if decode_datasets:
        notes += cache_notes(partitioner.task, partitioner.mesh)
    for note in notes:
        add(f"note: {note}")
    warnings = layout_warnings(layout)
    for warning in warnings:
        add(f"WARNING: {warning}")
    steps = [
        (step_for(partitioner, root, name), name, spec)
        for root, pipelines in (("datasets", datasets), ("decode_datasets", decode_datasets))
        for name, pipeline in pipelines.items()
        for spec in pipeline.element_specs()
    ]
    explained = []
    for step, name, spec in steps:
        add(f"\n{step.name}, batches of {name}")
        start = time.monotonic()
        step_warnings: list[str] = []
        with current_metadata():
            compiled = patch_matmuls(
                step.lower(spec), partitioner.mesh, step_warnings.append
            ).compile()
        seconds = time.monotonic() - start
        for warning in step_warnings:
            add(f"  WARNING: {warning}")
        warnings += step_warnings
        explanation = explained_step(partitioner, step, name, spec, compiled)
        if figures_of is not None:
            figures = figures_of(step, spec, compiled, seconds)
            explanation = dataclasses.replace(explanation, figures=figures)
        explained.append(explanation)
        add("\n".join(f"  {line}".rstrip() for line in _step_text(explanation).splitlines()))
    return Explanation(
        experiment, partitioner.mesh, layout, notes, warnings, explained, "\n".join(texts)
    )


def cache_notes(task: "Task", mesh: Mesh) -> list[str]:
    """Returns a note for each attention layer whose KV cache is sharded along the time dim."""
    module = task.model.abstract_module()
    if not isinstance(module, nnx.Module):
        return []
    notes = []
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for path, layer in nnx.compat.iter_modules(module):
            axes = None
            if isinstance(layer, DotProductAttention):
                if layer.is_causal or layer.is_cross_attention:
                    axes = layer.split_of_time()
            elif isinstance(layer, MultiHeadLatentAttention):
                axes = layer.split_of_time()
            if axes is not None:
                notes.append(
                    f"{'/'.join(map(str, path))}: the cache is split over time along {axes!r}, "
                    f"because its heads cannot be split evenly over {num_shards_of(axes)} devices"
                )
    return notes


def explained_step(
    partitioner: Partitioner,
    step: Step,
    name: str,
    element_spec: dict,
    compiled: jax.stages.Compiled,
) -> ExplainedStep:
    """Reads the memory, collectives and flops of a compiled step.

    Args:
      partitioner: The job's partitioner.
      step: A step of the partitioner.
      name: Name of the dataset.
      element_spec: Shapes and types of a batch.
      compiled: The compiled step.
    """
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
    """Returns the layout of a step's input batch, with rows split over all mesh axes."""
    declared_by = {}
    for path, x in leaves_with_path(element_spec):
        entry = (task.inputs_split_mapping or {}).get(f"map_{x.ndim}d")
        inside = f"; then map_{x.ndim}d {split_text(entry)}" if entry is not None else ""
        declared_by[path] = f"rows over the mesh{inside}" if x.ndim else "a scalar: replicated"
    return StateLayout(
        shapes=element_spec,
        specs=jax.tree.map(lambda x: batch_spec(x.ndim, tuple(axis_sizes)), element_spec),
        axis_sizes=axis_sizes,
        declared_by=declared_by,
    )


def _step_text(explained: ExplainedStep) -> str:
    memory, (donated_bytes, num_donated) = explained.memory, explained.donated
    return "\n".join(
        [
            leaf_table(explained.batch.leaves()),
            "",
            hlo.collectives_table(explained.collectives),
            f"memory per device: arguments {format_bytes(memory.arguments)}, outputs "
            f"{format_bytes(memory.outputs)}, temporary {format_bytes(memory.temp)}",
            f"donated per device: {format_bytes(donated_bytes)} in {num_donated} buffers",
            f"matmul flops per device: {explained.flops:,}",
            *(f"{name:<10}{value}" for name, value in explained.figures),
        ]
    )
