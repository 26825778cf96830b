"""`main.py --mode=plan`: an experiment's steps on a topology, as text, JSON and a page."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.devices.libtpu import mismatch
from praxis_lite.run.config.build import build
from praxis_lite.run.experiment.experiment import Job
from praxis_lite.run.experiment.launched_config import LaunchedConfig
from praxis_lite.run.trainer.job_on_mesh import print_compiler_options, use_compilation_cache
from praxis_lite.run.trainer.layout_table import layout_warnings, mesh_text
from praxis_lite.tools.explain.compiler_warnings import explained_warnings
from praxis_lite.tools.explain.explain import explained_step
from praxis_lite.tools.explain.explain_page import page
from praxis_lite.tools.plan.attached import measure
from praxis_lite.tools.plan.planned_job import planned_partitioner, step_specs
from praxis_lite.tools.plan.predict import StepPlan, plan_step
from praxis_lite.tools.plan.report import figures, plan_text
from praxis_lite.tools.plan.topology import Topology, topology_of


def plan(
    launched: LaunchedConfig, topology: Topology, steps: Sequence[str], *,
    file: Path | None = None, html: Path | None = None,
) -> None:
    """Prints the plan of each step.

    Args:
      steps: "train", "eval" or "decode".
      file, html: to write the plans into, as JSON and as a page.

    Raises:
      ConfigError: after all of them, if any does not fit.
    """
    experiment = launched.experiment
    plans = plan_job(build(launched.config), topology, steps, title=experiment, html=html)
    if file is not None:
        first, *others = (item.to_json() for item in plans)
        file.write_text(json.dumps(first | {"other_steps": others}, indent=1) + "\n", "utf-8")
    if not all(element.fits for element in plans):
        too_large = next(one for one in plans if not one.fits)
        raise ConfigError(
            f"{experiment} does not fit on {topology.name}: its {too_large.step} step needs "
            f"{too_large.peak_bytes_per_device / 2**30:.2f} GiB on each device, which has "
            f"{too_large.hbm_bytes_per_device / 2**30:.2f} GiB. {too_large.why_not}"
        )


def measured(launched: LaunchedConfig, *, file: Path | None = None) -> None:
    """Trains ten steps as `measure` does, and writes the plan and their seconds into a file."""
    result, seconds = measure(build(launched.config))
    if file is not None:
        record = result.to_json() | {"measured_seconds": seconds}
        file.write_text(json.dumps(record, indent=1), "utf-8")


def chosen_topology(name: str, num_slices: int) -> Topology:
    """Returns the topology of --topology and --num_slices, for which JAX is set to compile.

    Raises:
      ConfigError: as `topology_of`.
    """
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # No device is asked for: none need be there.
    topology = topology_of(name, num_slices)
    if topology.compiled_for == "tpu" and (message := mismatch()):
        print(f"WARNING: {message}")
    if topology.compiled_for == "tpu":
        # JAX (0.10 to 0.12) cannot read back a program for devices that are not there, and warns.
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        use_compilation_cache()
    return topology


def plan_job(
    job: Job, topology: Topology, steps: Sequence[str], *, title: str = "",
    html: Path | None = None,
) -> list[StepPlan]:
    """Returns the plans of a job's steps, printed as they are made; `html`: a page of them, too."""
    partitioner = planned_partitioner(job, topology)
    mesh, layout = partitioner.mesh, partitioner.layout
    where = f"{mesh_text(mesh.shape)} on {topology.name}"
    print(f"{where}: {mesh.size} devices, none of them needed here")
    print_compiler_options(partitioner)
    warnings = layout_warnings(layout)
    for warning in warnings:
        print(f"WARNING: {warning}")
    plans, explained = [], []
    chosen = [partitioner.steps[step] for step in steps]
    for step, name, spec in step_specs(job, partitioner, chosen):
        print(f"\n{step.name}, batches of {name}: compiling", flush=True)
        with explained_warnings(print):
            item = plan_step(partitioner, step, spec, topology)
        plans.append(item)
        print(plan_text(item), flush=True)
        if html is not None and item.compiled is not None:
            shown = explained_step(partitioner, step, name, spec, item.compiled)
            explained.append(dataclasses.replace(shown, figures=figures(item)))
        plans[-1] = dataclasses.replace(item, compiled=None)  # Large, and no longer needed.
    if html is not None:
        html.write_text(page(title, mesh, layout, warnings, explained), "utf-8")
        print(f"\nThe page to look at in a browser: {html.absolute()}")
    return plans
