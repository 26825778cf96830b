"""Python functions for the modes explain, plan, check and report.

They take the same options as the command line, and raise a `ConfigError` where the command line
prints an error.
"""

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from praxis_lite.api import command_line
from praxis_lite.config.python_settings import Settings
from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.modes.job_from_command import experiment_of
from praxis_tools.modes.explain import explain_experiment
from praxis_tools.modes.plan import STEPS, plan_experiment

if TYPE_CHECKING:
    from praxis_lite.experiment.experiment import Experiment
    from praxis_tools.check.certificate import Certificate
    from praxis_tools.explain.explain import Explanation
    from praxis_tools.plan.job_plan import Plan
    from praxis_tools.report.report import Report


def explain(
    experiment: "str | type[Experiment]",
    *,
    settings: Settings = (),
    packages: Sequence[str] = (),
) -> "Explanation":
    """Compiles an experiment's steps and returns their layout, memory and collectives.

    Notebooks display the result as a page with the memory and communication of each device. Nothing
    is trained.

    Args:
      experiment: Name or class of the experiment, as for `train`.
      settings: Changes to the experiment's config, as for `train`.
      packages: Names of packages with experiments, as for `train`.

    Raises:
      ConfigError: The experiment or a setting is invalid, as for `train`.
    """
    command = command_line("explain", experiment, settings, packages)
    return explain_experiment(command, lambda text: None)


def plan(
    experiment: "str | type[Experiment]",
    *,
    topology: str,
    steps: str | Sequence[str] = ("train",),
    num_slices: int = 1,
    batch_sizes: Sequence[int] = (),
    settings: Settings = (),
    packages: Sequence[str] = (),
) -> "Plan":
    """Predicts the time and memory of an experiment's steps on devices that are not attached.

    If a step exceeds the device memory, no error is raised; check the plan's `fits`.

    Args:
      experiment: Name or class of the experiment, as for `train`.
      topology: The devices to plan for, such as "v5e:16x16", "gpu:h100:4x8" or "cpu:8".
      steps: Any of "train", "eval" and "decode".
      num_slices: Number of slices with this topology.
      batch_sizes: Batch sizes, in prompts, for which to plan "decode". The default is the batch
        size of the first prompt dataset.
      settings: Changes to the experiment's config, as for `train`.
      packages: Names of packages with experiments, as for `train`.

    Raises:
      ConfigError: The experiment or a setting is invalid, as for `train`, the topology is unknown,
        or the mesh does not use all devices of the topology.
    """
    steps = [steps] if isinstance(steps, str) else list(steps)
    require(bool(steps), "plan: steps", steps, f"at least one of {', '.join(STEPS)}")
    for step in steps:
        require_choice("plan: steps", step, STEPS)
    if batch_sizes and "decode" not in steps:
        raise ConfigError(
            f"plan: batch_sizes requires the step 'decode', but steps is {steps}. Add 'decode' to "
            "steps, or remove batch_sizes."
        )
    command = command_line("plan", experiment, settings, packages)
    return plan_experiment(command, lambda text: None, topology, num_slices, steps, batch_sizes)


def check(
    experiment: "str | type[Experiment]",
    *,
    meshes: "Sequence[tuple[int, ...]] | None" = None,
    steps: int = 20,
    shrink: bool = False,
    settings: Settings = (),
    packages: Sequence[str] = (),
) -> "Certificate":
    """Compares an experiment's results on several meshes with its results on one device.

    The comparison may take minutes, and its progress is logged. The result is the `certified`
    attribute of the returned certificate.

    Args:
      experiment: Name or class of the experiment, as for `train`.
      meshes: Mesh shapes to check, such as [(1, 4, 2), (2, 2, 2)]. The defaults are the
        experiment's mesh, a mesh along each axis alone, a mesh along all axes, and a mesh with as
        many uneven splits as possible.
      steps: Number of training steps on the experiment's mesh.
      shrink: Whether to check a smaller model of the same architecture that fits on one device.
      settings: Changes to the experiment's config, as for `train`.
      packages: Names of packages with experiments, as for `train`.

    Raises:
      ConfigError: The experiment or a setting is invalid, as for `train`, or a mesh does not fit.
    """
    launched = experiment_of(command_line("check", experiment, settings, packages))

    from praxis_tools.check.on_meshes import check_launched

    return check_launched(launched, meshes=meshes, steps=steps, shrink=shrink, print_text=_log.info)


def report(*job_log_dirs: str | os.PathLike[str]) -> "Report":
    """Compares the curves, configs, samples, evaluations and times of jobs.

    Notebooks display the result as a page.

    Args:
      *job_log_dirs: Directories of one or more jobs, which may still be running.

    Raises:
      ConfigError: A directory contains no job, or its files cannot be read.
    """
    from praxis_tools.report.job_reader import named_jobs
    from praxis_tools.report.report import ReportReader

    return ReportReader(named_jobs([os.fspath(path) for path in job_log_dirs])).read()


_log = logging.getLogger(__name__)
