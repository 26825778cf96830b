"""The modes of the command line as Python calls: train, explain, plan, check and report.

They take what the command line takes, do the same, and raise what it prints as a paragraph.
"""

import functools
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from praxis_lite.config.python_settings import Settings, as_texts
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.experiment import registry
from praxis_lite.job.processes.interrupts import Interrupt
from praxis_lite.modes.mode import CommandLine
from praxis_lite.modes.train import begun, trained
from praxis_tools.modes.check import checked
from praxis_tools.modes.explain import explained
from praxis_tools.modes.plan import STEPS, planned
from praxis_tools.tools_of_jobs import TOOLS

if TYPE_CHECKING:
    from praxis_lite.experiment.experiment import Experiment
    from praxis_lite.trained_model.trained_model import TrainedModel
    from praxis_lite.trainer.hooks.hook import Hook
    from praxis_tools.check.certificate import Certificate
    from praxis_tools.explain.explain import Explanation
    from praxis_tools.plan.job_plan import Plan
    from praxis_tools.report.report import Report


def train(
    experiment: "str | type[Experiment]",
    job_log_dir: str | os.PathLike[str],
    *,
    settings: Settings = (),
    hooks: "Sequence[Hook]" = (),
    packages: Sequence[str] = (),
) -> "TrainedModel":
    """Returns the model that an experiment trains here, from nothing or from where its job stopped.

    It is what `load` returns, on the job's mesh; the weights are read when they are first used. A
    first Ctrl-C, or interrupt of a notebook's kernel, stops after the running step and saves it:
    `stopped_by` is then "SIGINT", and the same call goes on. Before the first step, and the second
    time, it is a KeyboardInterrupt. In a thread other than the main one no signal is heard.

    Args:
      experiment: a name, as for --exp, or a subclass of Experiment.
      job_log_dir: where the job keeps its files.
      settings: values by path, {"run.num_train_steps": 200}, or "path=value" each, as for --set.
      hooks: what is done besides while the job trains, after the hooks of the experiment. They are
        not recorded in config.json.
      packages: of your own, as for --packages.

    Raises:
      ConfigError: a setting, the data or the mesh does not fit, or the directory is of another
        job. What the code of the experiment or of a hook raises is raised as it is.
    """
    command = _command("train", experiment, settings, packages)
    command.job_log_dir = os.fspath(job_log_dir)
    if threading.current_thread() is not threading.main_thread():
        print("not in the main thread: no signal, such as Ctrl-C, stops this training", flush=True)
    launched = begun(command)
    job, ended = trained(command, launched, TOOLS, hooks=hooks, stop_request=Interrupt)

    from praxis_lite.trained_model.trained_model import TrainedModel

    return TrainedModel(
        job.partitioner, job.job, launched.config, job.files, ended.step,
        experiment=launched.experiment, stopped_by=ended.stopped_by or ended.ended_early,
    )


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
    return explained(_command("explain", experiment, settings, packages), lambda text: None)


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
    command = _command("plan", experiment, settings, packages)
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
    command = _command("check", experiment, settings, packages)
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


def _command(
    mode: str, experiment: "str | type[Experiment]", settings: Settings, packages: Sequence[str]
) -> CommandLine:
    """Returns the command line that does the same."""
    require(
        not isinstance(packages, str), f"{mode}: packages", packages,
        "a list of names, such as ['mypackage']",
    )
    texts = as_texts(settings)
    return CommandLine(mode=mode, exp=_name(experiment), settings=texts, packages=list(packages))


def _name(experiment: "str | type[Experiment]") -> str:
    """Returns the name of an experiment; a class is registered if it is not."""
    if isinstance(experiment, str):
        return experiment
    if not isinstance(experiment, type):
        raise ConfigError(
            f"The experiment is {experiment!r}; wanted is a name, such as 'lm.PyDocs', or a "
            "subclass of Experiment: the class itself, not an instance."
        )
    if "<locals>" in experiment.__qualname__:
        raise ConfigError(
            f"{callable_name(experiment)} is defined in a function, where no other process finds "
            "it. Define it at the top of a module or of a notebook."
        )
    return registry.full_name(registry.register_anew(experiment))
