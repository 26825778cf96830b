"""Plans the steps of a job on a topology, and renders the plan as text, JSON or HTML."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.experiment.experiment import Job
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.trainer.compilation import use_compilation_cache
from praxis_lite.trainer.job_on_mesh import log_compiler_options
from praxis_lite.trainer.layout_table import layout_warnings, mesh_text
from praxis_tools.explain.compiler_warnings import explained_warnings
from praxis_tools.explain.explain import explained_step
from praxis_tools.explain.explain_page import ExplainedStep, in_notebook, page
from praxis_tools.plan.job_on_topology import planned_partitioner, step_specs
from praxis_tools.plan.plan_text import decoding_table, figures, plan_text
from praxis_tools.plan.predict import plan_step
from praxis_tools.plan.residuals import apply_residuals, read_residuals
from praxis_tools.plan.step_plan import EXPERT_LOAD, StepPlan
from praxis_tools.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Plan:
    """Predictions for the steps of an experiment on devices that may not be attached.

    `print(plan)` shows the output of `praxis plan`. Notebooks display the HTML page, with the
    memory and communication of each device.

    Attributes:
      experiment: Full name of the experiment.
      topology: Devices for which the steps were planned.
      mesh: Mesh of these devices.
      layout: Shape, spec and bytes per device of each array in the train state.
      warnings: Warnings about the layout, such as large replicated weights.
      steps: Plan of each step, in the requested order.
      drawn: Data for the HTML page, for each step that compiled successfully.
      text: Output of `praxis plan`.
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
        """Returns the self-contained HTML page that --html writes."""
        return page(self.experiment, self.mesh, self.layout, self.warnings, self.drawn)

    def json_text(self) -> str:
        """Returns the contents of the file that --json writes."""
        first, *others = (step.to_json() for step in self.steps)
        return json.dumps(first | {"other_steps": others}, indent=1) + "\n"

    def require_fit(self) -> None:
        """Raises a ConfigError with advice if a step does not fit in a device's memory."""
        for step in self.steps:
            if not step.fits:
                raise ConfigError(
                    f"{self.experiment} does not fit on {self.topology.name}: its {step.step} step "
                    f"needs {step.peak_bytes_per_device / 2**30:.2f} GiB on each device, which has "
                    f"{step.hbm_bytes_per_device / 2**30:.2f} GiB. {step.why_not}"
                )


@contextlib.contextmanager
def compiling_for(topology: Topology) -> Iterator[None]:
    """Disables JAX's compilation cache while compiling for a TPU topology."""
    if topology.compiled_for != "tpu":
        use_compilation_cache()
        yield
        return
    # JAX defines its settings dynamically.
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    # JAX (0.10 to 0.12) warns that it cannot load cached programs for devices that are not
    # attached.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def plan_job(
    job: Job,
    topology: Topology,
    steps: Sequence[str],
    print_text: Callable[[str], None] = lambda text: None,
    *,
    experiment: str = "",
    batch_sizes: Sequence[int] = (),
    residuals: AnyPath | None = None,
    expert_load: float = EXPERT_LOAD,
) -> Plan:
    """Compiles the steps of a job for a topology and returns their plan.

    Steps that do not fit in memory are also included in the plan; see `Plan.require_fit`.

    Args:
      job: The job to plan.
      topology: Devices to plan for.
      steps: Names of the steps: "train", "eval" or "decode".
      print_text: Function called with each section of the text as soon as it is known, without a
        trailing newline.
      experiment: Full name of the experiment.
      batch_sizes: Numbers of prompts for which the "decode" step is planned. If empty, the batch
        size of the job's first decode dataset is used.
      residuals: Path of a file with residuals used to correct the step times, or None for no
        correction.
      expert_load: See `StepPlan.expert_load`.

    Raises:
      ConfigError: The mesh does not match the topology, a step has no dataset, or the residuals
        file is damaged.
    """
    previous_residuals = read_residuals(residuals) if residuals is not None else []
    texts: list[str] = []

    def add(text: str) -> None:
        texts.append(text)
        print_text(text)

    partitioner = planned_partitioner(job, topology)
    mesh, layout = partitioner.mesh, partitioner.layout
    add(f"{mesh_text(mesh.shape)} on {topology.name}: {mesh.size} devices (need not be attached)")
    log_compiler_options(partitioner)
    warnings = layout_warnings(layout)
    for warning in warnings:
        add(f"WARNING: {warning}")
    plans, drawn = [], []
    chosen = [partitioner.steps[step] for step in steps]
    for step, name, spec in step_specs(job, partitioner, chosen, batch_sizes):
        add(f"\n{step.name}, batches of {name}, {num_rows_of(spec)} rows")
        with (
            compiling_for(topology),
            explained_warnings(lambda warning: add(f"WARNING: {warning}")),
        ):
            plan = plan_step(partitioner, step, spec, topology)
        plan = dataclasses.replace(plan, expert_load=expert_load)
        plan = apply_residuals(plan, topology.chip.name, mesh.shape, residuals, previous_residuals)
        add(plan_text(plan))
        if plan.compiled is not None:
            explained = explained_step(partitioner, step, name, spec, plan.compiled)
            drawn.append(dataclasses.replace(explained, figures=figures(plan)))
        # Drop the executable to free its memory.
        plans.append(dataclasses.replace(plan, compiled=None))
    if len(decoded := [plan for plan in plans if plan.step == "decode"]) > 1:
        add("\n" + decoding_table(decoded))
    return Plan(experiment, topology, mesh, layout, warnings, plans, drawn, "\n".join(texts))
