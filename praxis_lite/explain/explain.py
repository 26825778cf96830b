"""What a job would do, without doing it: the layout, and each compiled step's collectives."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from praxis_lite.explain import hlo
from praxis_lite.explain.explain_page import ExplainedStep, page
from praxis_lite.explain.layout_table import layout_table, layout_warnings, leaf_table, split_text
from praxis_lite.inputs import InputPipeline
from praxis_lite.inputs.base import TRAIN
from praxis_lite.partitioner import Partitioner, StateLayout
from praxis_lite.sharding.inputs import batch_spec

if TYPE_CHECKING:
    from praxis_lite.task import Task


def explain(
    partitioner: Partitioner,
    datasets: Mapping[str, InputPipeline],
    decode_datasets: Mapping[str, InputPipeline],
    print_text: Callable[[str], None],
    *,
    title: str = "",
    html: Path | None = None,
) -> None:
    """Prints the table of layout.txt, notes, warnings, and per step its batch and collectives.

    Args:
      partitioner: of the job.
      datasets: by name; "train" is trained on, the others evaluated.
      decode_datasets: by name.
      print_text: takes a text without its last line break.
      title: of the page.
      html: where to write all of it as a page that draws what each device holds; None: nowhere.
    """
    layout = partitioner.layout
    print_text(layout_table(layout))
    for note in layout.notes:
        print_text(f"note: {note}")
    warnings = layout_warnings(layout)
    for warning in warnings:
        print_text(f"WARNING: {warning}")
    steps = [("train" if name == TRAIN else "eval", name, one) for name, one in datasets.items()]
    steps += [("decode", name, pipeline) for name, pipeline in decode_datasets.items()]
    explained = []
    for step, name, pipeline in steps:
        print_text(f"\n{step}_step, batches of {name}")
        explained.append(_explained_step(partitioner, step, name, pipeline))
        print_text(_indented(_step_text(explained[-1])))
    if html is not None:
        html.write_text(page(title, partitioner.mesh, layout, warnings, explained), "utf-8")
        print_text(f"\nThe page to look at in a browser: {html.absolute()}")


def _explained_step(
    partitioner: Partitioner, step: str, name: str, pipeline: InputPipeline
) -> ExplainedStep:
    element_spec = pipeline.element_spec()
    compiled = partitioner.lower(step, element_spec).compile()
    return ExplainedStep(
        step=step,
        dataset=name,
        batch=_batch_layout(partitioner.task, element_spec, partitioner.layout.axis_sizes),
        collectives=hlo.collectives(compiled),
        memory=hlo.memory_per_device(compiled),
        donated=(hlo.donated_bytes(compiled), hlo.num_donated(compiled)),
        flops=hlo.flops(compiled),
    )


def _batch_layout(task: "Task", element_spec: dict, axis_sizes: Mapping[str, int]) -> StateLayout:
    """Returns the layout that a batch has when it reaches a step: rows over the whole mesh."""

    def declared_by(x: jax.ShapeDtypeStruct) -> str:
        if not x.ndim:
            return "a scalar: replicated"
        entry = (task.inputs_split_mapping or {}).get(f"map_{x.ndim}d")
        inside = f"; then map_{x.ndim}d {split_text(entry)}" if entry is not None else ""
        return f"rows over the mesh{inside}"

    leaves = jax.tree_util.tree_flatten_with_path(element_spec)[0]
    return StateLayout(
        shapes=element_spec,
        specs=jax.tree.map(lambda x: batch_spec(x.ndim, tuple(axis_sizes)), element_spec),
        axis_sizes=axis_sizes,
        declared_by={
            jax.tree_util.keystr(path, simple=True, separator="/"): declared_by(x)
            for path, x in leaves
        },
    )


def _step_text(explained: ExplainedStep) -> str:
    lines = [leaf_table(explained.batch.leaves()), ""]
    lines += [hlo.collectives_table(explained.collectives)]
    if (memory := explained.memory) is not None:
        lines.append(
            f"memory per device: arguments {hlo.format_bytes(memory.arguments)}, outputs "
            f"{hlo.format_bytes(memory.outputs)}, temporary {hlo.format_bytes(memory.temp)}"
        )
    size, number = explained.donated
    lines.append(f"donated per device: {hlo.format_bytes(size)} in {number} buffers")
    lines.append(f"matmul flops per device: {explained.flops:,}")
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
