"""The modes of praxis_tools as Python calls: explain, plan, check and report.

They take what the command line takes, do the same, and raise what it prints as a paragraph.
"""

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from praxis_lite.api import command_line
from praxis_lite.config.python_settings import Settings
from praxis_lite.core.errors import require, require_choice
from praxis_tools.modes.check import checked
from praxis_tools.modes.explain import explained
from praxis_tools.modes.plan import STEPS, planned

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
    """Returns the layout of an experiment and its compiled steps, as --mode=explain prints them.

    A notebook draws what each device holds and sends; nothing is trained.

    Args:
      experiment, settings, packages: as for `train`.

    Raises:
      ConfigError: as `train`.
    """
    return explained(command_line("explain", experiment, settings, packages), lambda text: None)


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
    """Returns time, memory and cost of an experiment's steps on devices that need not be there.

    A step that does not fit is no error: see the plan's `fits`.

    Args:
      experiment, settings, packages: as for `train`.
      topology: the devices, as for --topology: "v5e:16x16", "gpu:h100:4x8", "cpu:8".
      steps: of "train", "eval" and "decode".
      num_slices: so many slices of that topology.
      batch_sizes: of prompts, each a plan of "decode"; empty: that of the first dataset of prompts.

    Raises:
      ConfigError: as `train`, there is no such topology, or the mesh does not fill it.
    """
    steps = [steps] if isinstance(steps, str) else list(steps)
    require(bool(steps), "plan: steps", steps, f"some of {', '.join(STEPS)}")
    for step in steps:
        require_choice("plan: steps", step, STEPS)
    require(
        "decode" in steps or not batch_sizes, "plan: steps", steps, "decode, with batch_sizes"
    )
    command = command_line("plan", experiment, settings, packages)
    return planned(command, lambda text: None, topology, num_slices, steps, batch_sizes)


def check(
    experiment: "str | type[Experiment]",
    *,
    meshes: "Sequence[tuple[int, ...]] | None" = None,
    steps: int = 20,
    shrink: bool = False,
    settings: Settings = (),
    packages: Sequence[str] = (),
) -> "Certificate":
    """Returns the comparison of an experiment on meshes with a single device.

    It prints what it does as it goes, for it may take minutes. See the certificate's `certified`.

    Args:
      experiment, settings, packages: as for `train`.
      meshes: shapes of the experiment's axes, such as [(1, 4, 2), (2, 2, 2)]; None: its own, each
        axis alone, all axes, and one that divides as little as possible.
      steps: of training on the experiment's own mesh.
      shrink: True: a smaller model of the same kind, for one device to hold.

    Raises:
      ConfigError: as `train`, or a mesh does not fit.
    """
    command = command_line("check", experiment, settings, packages)
    return checked(
        command, functools.partial(print, flush=True), meshes=meshes, steps=steps, shrink=shrink
    )


def report(*job_log_dirs: str | os.PathLike[str]) -> "Report":
    """Returns jobs beside each other, from their files, as --mode=report prints them.

    A notebook shows curves, evaluations, settings that differ, samples, and where the time went.

    Args:
      job_log_dirs: of one job or several, which may be training.

    Raises:
      ConfigError: a directory is no job's, or its files cannot be read.
    """
    from praxis_tools.report.job_reader import named_jobs
    from praxis_tools.report.report import ReportReader

    return ReportReader(named_jobs([os.fspath(path) for path in job_log_dirs])).read()
