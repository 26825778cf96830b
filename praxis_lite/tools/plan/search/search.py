"""The fastest way to lay an experiment out on a topology: meshes, presets, remat, micro-batches.

All candidates are ordered by formulas (`formulas`), those that cannot fit left out; then the best
are compiled, as many as there is time for, and only these are plans.
"""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.config.build import build
from praxis_lite.run.experiment.launched_config import LaunchedConfig, config_of_experiment
from praxis_lite.run.trainer.layout_table import bytes_per_device
from praxis_lite.tools.explain.compiler_warnings import explained_warnings
from praxis_lite.tools.plan.planned_job import planned_partitioner, step_specs
from praxis_lite.tools.plan.predict import num_parameters, num_units, plan_step
from praxis_lite.tools.plan.report import seconds_text
from praxis_lite.tools.plan.search.candidates import AXES, Candidate, candidates, paths_of, spread
from praxis_lite.tools.plan.search.formulas import Shape
from praxis_lite.tools.plan.search.report import picture, table, written_class
from praxis_lite.tools.plan.step_plan import StepPlan
from praxis_lite.tools.plan.topology import Topology

FOLDER = Path("plan_search")
# What formulas may be off by before a candidate is not worth compiling.
_SLACK_BYTES, _SLACK_SECONDS = 1.5, 1.25


def search(
    launched: LaunchedConfig, packages: Sequence[str], topology: Topology, *, minutes: float,
    file: Path | None = None,
) -> None:
    """Prints what was found as it is, and writes table, picture and class into `plan_search/`.

    Args:
      packages: as for --packages.
      minutes: for how long candidates are compiled.
      file: to write the best plan into.

    Raises:
      ConfigError: the experiment's mesh has other axes, or nothing that was compiled fits.
    """
    if minutes <= 0:
        raise ConfigError(f"--search_minutes={minutes:g}; wanted is a number above 0.")
    until = time.monotonic() + 60 * minutes
    shape = shape_of(launched.config, topology)
    found = sorted(candidates(launched.config, shape, topology), key=lambda one: one.seconds)
    fitting = [one for one in found if one.bytes <= _SLACK_BYTES * topology.chip.hbm_bytes]
    print(
        f"{len(found)} candidates, of which {len(fitting)} may fit by formulas; compiling the best "
        f"for {minutes:g} minutes", flush=True,
    )
    plans: list[tuple[Candidate, StepPlan]] = []
    for index, item in enumerate(spread(fitting)):
        best = fastest(plans)
        late = time.monotonic() > until
        if best is not None and (late or item.seconds > _SLACK_SECONDS * best[0].seconds):
            break
        if late and plans:
            break
        left = max(0.0, until - time.monotonic())
        print(f"[{index + 1}] {item.name}: {seconds_text(item.seconds)} by formulas; compiling, "
              f"{left / 60:.1f} minutes left", flush=True)
        result = planned(launched, packages, item, topology)
        if result is not None:
            plans.append((item, result))
            text = "fits" if result.fits else "does not fit"
            took = seconds_text(result.step_seconds) if result.step_seconds else "no time known"
            print(f"    {text}, {result.peak_bytes_per_device / 2**30:.2f} GiB, {took}", flush=True)
    best = fastest(plans)
    print(f"\n{table(plans)}")
    if best is None:
        raise ConfigError(
            f"Of {len(plans)} candidates that were compiled for {topology.name} none fits. Take a "
            "larger topology or a smaller batch, or search longer (--search_minutes)."
        )
    _write(launched, packages, topology, plans, best)
    if file is not None:
        file.write_text(json.dumps(best[1].to_json(), indent=1) + "\n", "utf-8")


def fastest(plans: Sequence[tuple[Candidate, StepPlan]]) -> tuple[Candidate, StepPlan] | None:
    """Returns the fitting plan that takes least time, or None."""
    fitting = [plan for plan in plans if plan[1].fits and plan[1].step_seconds is not None]
    return min(fitting, key=lambda item: item[1].step_seconds, default=None)


def shape_of(config: "fdl.Config", topology: Topology) -> Shape:
    """Returns the sizes that formulas read from an experiment's config.

    Raises:
      ConfigError: the mesh has other axes than the presets, or the model's config has no sizes.
    """
    is_pipelined = next(paths_of(config.task, "num_microbatches", "task"), None) is not None
    if tuple(config.mesh.axis_names) != AXES and not is_pipelined:
        raise ConfigError(
            f"--search tries the sharding presets, which are for meshes of the axes {AXES}; the "
            f"experiment's mesh has {tuple(config.mesh.axis_names)}. Plan its meshes one by one."
        )
    model, names = config.task.model, ("num_layers", "model_dims", "hidden_dims")
    sizes = {name: getattr(model, name, None) for name in names}
    if not all(isinstance(size, int) for size in sizes.values()):
        raise ConfigError(
            f"--search orders its candidates by {', '.join(names)}, which task.model does not have "
            "(those of TransformerLm do). Plan its meshes one by one."
        )
    job = build(config)
    if not is_pipelined:
        mesh = dataclasses.replace(
            job.mesh, ici_mesh_shape=_whole(job, topology), allow_split_physical_axes=True
        )
        job = dataclasses.replace(job, mesh=mesh)
    partitioner = planned_partitioner(job, topology)
    ((_, _, spec),) = step_specs(job, partitioner, [partitioner.train_step])
    held = bytes_per_device(partitioner.layout)
    weights = max(held.get("weights", 0), 1)
    rows = next(iter(jax.tree.leaves(spec))).shape[0]
    return Shape(
        parameters=num_parameters(partitioner.layout), **sizes,
        vocab_size=getattr(model, "vocab_size", 0) or 0,
        slots=(sum(held.values()) - weights) / weights,
        rows=rows, tokens_per_row=num_units(spec) // rows,
    )


def _whole(job: Any, topology: Topology) -> tuple[int, ...]:
    dcn = job.mesh.dcn_mesh_shape or (1,) * len(AXES)
    return (1, len(topology.devices) // math.prod(dcn), 1)


def planned(
    launched: LaunchedConfig, packages: Sequence[str], one: Candidate, topology: Topology
) -> StepPlan | None:
    """Returns a candidate's plan, or None, said, where the experiment refuses it."""
    try:
        settings = [*launched.settings, *one.settings]
        job = build(config_of_experiment(launched.experiment, settings, packages).config)
        partitioner = planned_partitioner(job, topology)
        ((step, _, spec),) = step_specs(job, partitioner, [partitioner.train_step])
        with explained_warnings(lambda warning: None):
            result = plan_step(partitioner, step, spec, topology)
    except (ConfigError, jax.errors.JaxRuntimeError) as error:
        print(f"    refused: {str(error).splitlines()[0][:160]}", flush=True)
        return None
    return dataclasses.replace(result, compiled=None)


def _write(
    launched: LaunchedConfig, packages: Sequence[str], topology: Topology,
    plans: Sequence[tuple[Candidate, StepPlan]], best: tuple[Candidate, StepPlan],
) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "__init__.py").write_text('"""What --mode=plan --search found."""\n', "utf-8")
    settings = [*launched.settings, *best[0].settings]
    result = written_class(launched.experiment, topology, settings, best)
    (FOLDER / "best.py").write_text(result.text, "utf-8")
    drawn = f"The picture: {FOLDER / 'pareto.png'}."
    try:
        picture(plans, topology, FOLDER / "pareto.png")
    except ConfigError as error:
        drawn = f"note: {error}"
    records = [
        {"settings": list(item.settings), "seconds_by_formulas": item.seconds, **plan.to_json()}
        for item, plan in plans
    ]
    (FOLDER / "plans.json").write_text(json.dumps(records, indent=1) + "\n", "utf-8")
    lines = " \\\n    ".join(f"'{setting}'" for setting in settings)
    print(f"\nThe fastest that fits: {best[0].name}\n  --set {lines}")
    listed = ",".join([str(FOLDER), *packages])
    print(f"\nAs an experiment: --packages={listed} --exp={FOLDER}.best.{result.name}\n"
          f"{drawn} All plans: {FOLDER / 'plans.json'}")
