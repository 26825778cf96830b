"""The plan of a job: an experiment's steps on a topology, as text, as JSON and as a page."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.experiment.experiment import Job
from praxis_lite.trainer.compilation import use_compilation_cache
from praxis_lite.trainer.job_on_mesh import print_compiler_options
from praxis_lite.trainer.layout_table import layout_warnings, mesh_text
from praxis_tools.explain.compiler_warnings import explained_warnings
from praxis_tools.explain.explain import explained_step
from praxis_tools.explain.explain_page import ExplainedStep, in_notebook, page
from praxis_tools.plan.job_on_topology import planned_partitioner, step_specs
from praxis_tools.plan.plan_text import decoding_table, figures, plan_text
from praxis_tools.plan.predict import plan_step
from praxis_tools.plan.residuals import corrected, read_residuals
from praxis_tools.plan.step_plan import EXPERT_LOAD, StepPlan
from praxis_tools.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predicted steps of an experiment on devices that need not exist.

    `print` shows what --mode=plan prints; a notebook draws what each device stores and sends.

    Attributes:
      experiment: its full name.
      topology: the devices.
      mesh: the mesh of these devices.
      layout: shapes, specs and bytes per device of each array of the train state.
      warnings: sentences about the layout.
      steps: the predictions, in the requested order: seconds, bytes and shares of the peak.
      drawn: the steps that compiled, as the page draws them.
      text: what --mode=plan prints.
    """

    experiment: str
    topology: Topology
    mesh: Mesh
    layout: StateLayout
    warnings: Sequence[str]
    steps: Sequence[StepPlan]
    drawn: Sequence[ExplainedStep] = dataclasses.field(repr=False)
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return in_notebook(self.page())

    @property
    def fits(self) -> bool:
        """Whether every step fits in a device's memory."""
        return all(step.fits for step in self.steps)

    def page(self) -> str:
        """Returns the page of --html, a self-contained HTML page without network requests."""
        return page(self.experiment, self.mesh, self.layout, self.warnings, self.drawn)

    def json_text(self) -> str:
        """Returns the file that --json writes."""
        first, *others = (step.to_json() for step in self.steps)
        return json.dumps(first | {"other_steps": others}, indent=1) + "\n"

    def require_fit(self) -> None:
        """Raises ConfigError if a step does not fit, which names the step and what to change."""
        for step in self.steps:
            if not step.fits:
                raise ConfigError(
                    f"{self.experiment} does not fit on {self.topology.name}: its {step.step} step "
                    f"needs {step.peak_bytes_per_device / 2**30:.2f} GiB on each device, which has "
                    f"{step.hbm_bytes_per_device / 2**30:.2f} GiB. {step.why_not}"
                )


@contextlib.contextmanager
def compiling_for(topology: Topology) -> Iterator[None]:
    """Configures JAX's compilation cache for compiling a topology's programs."""
    if topology.compiled_for != "tpu":
        use_compilation_cache()
        yield
        return
    before = jax.config.jax_enable_compilation_cache
    # JAX (0.10 to 0.12) cannot load a cached program for absent devices, and warns.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def plan_job(
    job: Job, topology: Topology, steps: Sequence[str],
    print_text: Callable[[str], None] = lambda text: None, *, experiment: str = "",
    batch_sizes: Sequence[int] = (), residuals: Path | None = None,
    expert_load: float = EXPERT_LOAD,
) -> Plan:
    """Returns the plan of a job's steps, whether they fit or not.

    Args:
      steps: "train", "eval" or "decode".
      print_text: called with each part of the text as soon as it is known, without its last line
        break.
      experiment: its full name.
      batch_sizes: numbers of prompts, for a plan of "decode" each; empty: the batch size of the
        job's first dataset.
      residuals: the file of residuals that correct the seconds; None: no correction.
      expert_load: see StepPlan.

    Raises:
      ConfigError: the mesh does not fill the topology, there is no dataset for a step, or the
        residuals file is damaged.
    """
    earlier = read_residuals(residuals) if residuals is not None else []
    texts: list[str] = []

    def add(text: str) -> None:
        texts.append(text)
        print_text(text)

    partitioner = planned_partitioner(job, topology)
    mesh, layout = partitioner.mesh, partitioner.layout
    where = f"{mesh_text(mesh.shape)} on {topology.name}"
    add(f"{where}: {mesh.size} devices, none of them needed here")
    print_compiler_options(partitioner)
    warnings = layout_warnings(layout)
    for warning in warnings:
        add(f"WARNING: {warning}")
    plans, drawn = [], []
    chosen = [partitioner.steps[step] for step in steps]
    for step, name, spec in step_specs(job, partitioner, chosen, batch_sizes):
        add(f"\n{step.name}, batches of {name}, {num_rows_of(spec)} rows")
        with compiling_for(topology), explained_warnings(add):
            plan = plan_step(partitioner, step, spec, topology)
        plan = dataclasses.replace(plan, expert_load=expert_load)
        plan = corrected(plan, topology.chip.name, mesh.shape, residuals, earlier)
        add(plan_text(plan))
        if plan.compiled is not None:
            explained = explained_step(partitioner, step, name, spec, plan.compiled)
            drawn.append(dataclasses.replace(explained, figures=figures(plan)))
        # The compiled program is large, and no longer needed.
        plans.append(dataclasses.replace(plan, compiled=None))
    if len(decoded := [plan for plan in plans if plan.step == "decode"]) > 1:
        add("\n" + decoding_table(decoded))
    return Plan(experiment, topology, mesh, layout, warnings, plans, drawn, "\n".join(texts))
