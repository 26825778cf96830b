"""Explains a job without running it: its layout, and the collectives of each compiled step."""

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
from praxis_lite.core.xla_workarounds.mended_products import mended
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.latent import MultiHeadLatentAttention
from praxis_lite.trainer.checks.datasets import step_for
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


# (step, shapes of a batch, the compiled step, seconds of compilation) -> (name, value) lines
Figures = Callable[[Step, Any, jax.stages.Compiled, float], Sequence[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The layout of an experiment, and its compiled steps.

    `print` shows what --mode=explain prints; a notebook draws what each device stores and sends.

    Attributes:
      experiment: its full name.
      mesh: the devices.
      layout: shapes, specs and bytes per device of each array of the train state.
      notes, warnings: sentences about the layout, and about matmuls that XLA may permute.
      steps: the compiled steps, each with its batch, collectives, memory per device and flops.
      text: what --mode=explain prints.
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
        """Returns the page of --html, a self-contained HTML page without network requests."""
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
    """Compiles a job's steps and explains them and the layout of the job's state.

    Args:
      print_text: called with each part of the text as soon as it is known, without its last line
        break.
      experiment: its full name.
      figures_of: returns further lines for a compiled step, such as a plan's predictions.
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
        (step_for(partitioner, root, name), name, pipeline)
        for root, pipelines in (("datasets", datasets), ("decode_datasets", decode_datasets))
        for name, pipeline in pipelines.items()
    ]
    explained = []
    for step, name, pipeline in steps:
        add(f"\n{step.name}, batches of {name}")
        spec = pipeline.element_spec()
        start = time.monotonic()
        step_warnings: list[str] = []
        compiled = mended(step.lower(spec), partitioner.mesh, step_warnings.append).compile()
        seconds = time.monotonic() - start
        for warning in step_warnings:
            add(f"  WARNING: {warning}")
        warnings += step_warnings
        item = explained_step(partitioner, step, name, spec, compiled)
        if figures_of is not None:
            figures = figures_of(step, spec, compiled, seconds)
            item = dataclasses.replace(item, figures=figures)
        explained.append(item)
        add("\n".join(f"  {line}".rstrip() for line in _step_text(item).splitlines()))
    return Explanation(
        experiment, partitioner.mesh, layout, notes, warnings, explained, "\n".join(texts)
    )


def cache_notes(task: "Task", mesh: Mesh) -> list[str]:
    """Returns a note for each attention layer whose KV cache is split over time on this mesh."""
    module = task.model.abstract_module()
    if not isinstance(module, nnx.Module):
        return []
    notes = []
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for path, layer in nnx.compat.iter_modules(module):
            if isinstance(layer, DotProductAttention):
                has_cache = layer.is_causal or layer.is_cross_attention
            else:
                has_cache = isinstance(layer, MultiHeadLatentAttention)
            axes = layer.split_of_time() if has_cache else None
            if axes is not None:
                notes.append(
                    f"{'/'.join(map(str, path))}: the cache splits over time along {axes!r}, for "
                    f"it has no heads that divide over {num_shards_of(axes)} devices"
                )
    return notes


def explained_step(
    partitioner: Partitioner, step: Step, name: str, element_spec: dict,
    compiled: jax.stages.Compiled,
) -> ExplainedStep:
    """Returns the memory and collectives of a compiled step for batches of the dataset `name`."""
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
    """Returns the layout of a batch as it enters a step: rows split over the complete mesh."""
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
    memory, (donated_bytes, num_donated) = explained.memory, explained.donated
    return "\n".join([
        leaf_table(explained.batch.leaves()), "",
        hlo.collectives_table(explained.collectives),
        f"memory per device: arguments {format_bytes(memory.arguments)}, outputs "
        f"{format_bytes(memory.outputs)}, temporary {format_bytes(memory.temp)}",
        f"donated per device: {format_bytes(donated_bytes)} in {num_donated} buffers",
        f"matmul flops per device: {explained.flops:,}",
        *(f"{name}: {value}" for name, value in explained.figures),
    ])
