"""Finds the fastest mesh, preset, remat policy and number of microbatches for a topology.

All candidates are ranked by formulas, and candidates that cannot fit in memory are discarded. The
best candidates are compiled and planned until the time limit is reached.
"""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

import fiddle as fdl
import jax

from praxis_lite.config.build import build
from praxis_lite.core.errors import ConfigError, Error
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.experiment.launched_config import LaunchedConfig, config_of_experiment
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.trainer.layout_table import bytes_per_device
from praxis_tools.explain.compiler_warnings import explained_warnings
from praxis_tools.plan.job_on_topology import planned_partitioner, step_specs
from praxis_tools.plan.plan_text import seconds_text
from praxis_tools.plan.predict import num_parameters, num_units, plan_step
from praxis_tools.plan.search.candidates import (
    AXES,
    Candidate,
    candidates,
    diversify,
    paths_of,
)
from praxis_tools.plan.search.formulas import Shape
from praxis_tools.plan.search.search_report import (
    experiment_source,
    plot_plans,
    seconds_or_infinity,
    table,
)
from praxis_tools.plan.step_plan import StepPlan
from praxis_tools.plan.topology import Topology

FOLDER = Path("plan_search")
# Error margins of the formulas: candidates within these factors of the limits are compiled.
_BYTES_TOLERANCE, _SECONDS_TOLERANCE = 1.5, 1.25


def search(
    launched: LaunchedConfig,
    packages: Sequence[str],
    topology: Topology,
    *,
    minutes: float,
    file: AnyPath | None = None,
) -> None:
    """Searches for the fastest layout and prints the progress and the result.

    Writes all plans, a plot and an experiment class with the best layout to `plan_search/`.

    Args:
      launched: Experiment and settings for which to search layouts.
      packages: Packages that contain the experiments, as in --packages.
      topology: Devices for which to search layouts.
      minutes: Time limit for compiling candidates.
      file: Path of a JSON file to write with the best plan.

    Raises:
      ConfigError: The experiment's mesh does not have the axes that the presets require, or none of
        the compiled candidates fits.
    """
    if minutes <= 0:
        raise ConfigError(f"--search_minutes={minutes:g}: expected a number above 0.")
    deadline = time.monotonic() + 60 * minutes
    shape = shape_of(launched.config, topology)
    # Rank all candidates by formulas, and discard those that cannot fit.
    ranked = sorted(candidates(launched.config, shape, topology), key=lambda x: x.seconds)
    max_bytes = _BYTES_TOLERANCE * topology.chip.hbm_bytes
    fitting = [candidate for candidate in ranked if candidate.bytes <= max_bytes]
    _log.info(
        "%d candidates, of which %d may fit according to estimates; compiling the best ones for "
        "%g minutes",
        len(ranked),
        len(fitting),
        minutes,
    )
    plans: list[tuple[Candidate, StepPlan]] = []
    for number, candidate in enumerate(diversify(fitting), start=1):
        best, seconds_left = fastest(plans), deadline - time.monotonic()
        if plans and seconds_left < 0:
            break
        # According to the formulas, this candidate cannot be the fastest. A later one can be: only
        # candidates with the same preset and policy are sorted by their estimates.
        if best is not None and candidate.seconds > _SECONDS_TOLERANCE * best[0].seconds:
            continue
        _log.info(
            "[%d] %s: estimated %s; compiling, %.1f minutes left",
            number,
            candidate.name,
            seconds_text(candidate.seconds),
            max(0.0, seconds_left) / 60,
        )
        plan = plan_candidate(launched, packages, candidate, topology)
        if plan is not None:
            plans.append((candidate, plan))
            text = "fits" if plan.fits else "does not fit"
            seconds = seconds_text(plan.step_seconds) if plan.step_seconds else "unknown time"
            gib = plan.peak_bytes_per_device / 2**30
            _log.info("    %s, %.2f GiB, %s", text, gib, seconds)
    best = fastest(plans)
    print(f"\n{table(plans)}")
    if best is None:
        raise ConfigError(
            f"None of the {len(plans)} candidates compiled for {topology.name} fits. Use a larger "
            "topology or a smaller batch, or search longer (--search_minutes)."
        )
    _write(launched, packages, topology, plans, best)
    if file is not None:
        write_atomically(file, f"{json.dumps(best[1].to_json(), indent=1)}\n".encode())


def fastest(plans: Sequence[tuple[Candidate, StepPlan]]) -> tuple[Candidate, StepPlan] | None:
    """Returns the fastest candidate that fits, with its plan, or None if no candidate fits."""
    fitting = [pair for pair in plans if pair[1].fits and pair[1].step_seconds is not None]
    return min(fitting, key=lambda pair: seconds_or_infinity(pair[1]), default=None)


def shape_of(config: "fdl.Config", topology: Topology) -> Shape:
    """Returns the sizes of an experiment's model and batch.

    Raises:
      ConfigError: The mesh does not have the axes that the presets require, or the model's config
        does not specify the model's sizes.
    """
    is_pipelined = next(paths_of(config.task, "num_microbatches", "task"), None) is not None
    if tuple(config.mesh.axis_names) != AXES and not is_pipelined:
        raise ConfigError(
            f"--search tries sharding presets that require a mesh with axes {AXES}, but the "
            f"experiment's mesh has {tuple(config.mesh.axis_names)}. Run `praxis plan` for each "
            "mesh instead."
        )
    model, names = config.task.model, ("num_layers", "model_dims", "hidden_dims")
    arguments = {name: getattr(model, name, None) for name in names}
    sizes = {name: size for name, size in arguments.items() if isinstance(size, int)}
    if len(sizes) < len(names):
        raise ConfigError(
            f"--search requires the arguments {', '.join(names)} of a model such as TransformerLm, "
            "but task.model does not have all of them. Run `praxis plan` for each mesh instead."
        )
    job = build(config)
    if not is_pipelined:
        # Any mesh that matches the topology works, because only the total state size is used.
        num_slices = math.prod(job.mesh.dcn_mesh_shape or (1,))
        ici_shape = (1, len(topology.devices) // num_slices, 1)
        mesh = dataclasses.replace(
            job.mesh, ici_mesh_shape=ici_shape, allow_split_physical_axes=True
        )
        job = dataclasses.replace(job, mesh=mesh)
    partitioner = planned_partitioner(job, topology)
    (_, _, spec), *_ = step_specs(job, partitioner, [partitioner.train_step])
    bytes_by_kind = bytes_per_device(partitioner.layout)
    weights = max(bytes_by_kind.get("weights", 0), 1)
    rows = num_rows_of(spec)
    return Shape(
        parameters=num_parameters(partitioner.layout),
        **sizes,
        vocab_size=getattr(model, "vocab_size", 0) or 0,
        slots=(sum(bytes_by_kind.values()) - weights) / weights,
        rows=rows,
        tokens_per_row=num_units(spec) // rows,
    )


def plan_candidate(
    launched: LaunchedConfig, packages: Sequence[str], candidate: Candidate, topology: Topology
) -> StepPlan | None:
    """Compiles a candidate and returns its plan.

    If the candidate is invalid, this logs the error and returns None.
    """
    try:
        settings = [*launched.settings, *candidate.settings]
        job = build(config_of_experiment(launched.experiment, settings, packages).config)
        partitioner = planned_partitioner(job, topology)
        (step, _, spec), *_ = step_specs(job, partitioner, [partitioner.train_step])
        with explained_warnings(lambda warning: None):
            plan = plan_step(partitioner, step, spec, topology)
    except (Error, jax.errors.JaxRuntimeError) as error:
        _log.info("    invalid: %s", str(error).splitlines()[0][:160])
        return None
    return dataclasses.replace(plan, compiled=None)


def _write(
    launched: LaunchedConfig,
    packages: Sequence[str],
    topology: Topology,
    plans: Sequence[tuple[Candidate, StepPlan]],
    best: tuple[Candidate, StepPlan],
) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "__init__.py").write_text('"""Results of `praxis plan` --search."""\n', "utf-8")
    settings = [*launched.settings, *best[0].settings]
    class_name, source = experiment_source(launched.experiment, topology, settings, best)
    (FOLDER / "best.py").write_text(source, "utf-8")
    note = f"Plot: {FOLDER / 'pareto.png'}."
    try:
        plot_plans(plans, topology, FOLDER / "pareto.png")
    except ConfigError as error:  # matplotlib is not installed.
        note = f"note: {error}"
    records = [
        {
            "settings": list(candidate.settings),
            "seconds_by_formulas": candidate.seconds,
            **plan.to_json(),
        }
        for candidate, plan in plans
    ]
    (FOLDER / "plans.json").write_text(json.dumps(records, indent=1) + "\n", "utf-8")
    lines = " \\\n    ".join(f"'{setting}'" for setting in settings)
    print(f"\nFastest layout that fits: {best[0].name}\n  --set {lines}")
    all_packages = ",".join([str(FOLDER), *packages])
    print(
        f"\nAs an experiment: {FOLDER}.best.{class_name} --packages={all_packages}\n"
        f"{note} All plans: {FOLDER / 'plans.json'}"
    )


_log = logging.getLogger(__name__)
