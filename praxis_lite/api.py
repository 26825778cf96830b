"""`train` in Python: takes what the command line takes, and raises what it prints."""

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from praxis_lite.config.python_settings import Settings, as_texts
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.experiment import registry
from praxis_lite.installed_tools import installed_job_tools
from praxis_lite.job.processes.interrupts import Interrupt
from praxis_lite.modes.mode import CommandLine
from praxis_lite.modes.train import begun, trained

if TYPE_CHECKING:
    from praxis_lite.experiment.experiment import Experiment
    from praxis_lite.trained_model.trained_model import TrainedModel
    from praxis_lite.trainer.hooks.hook import Hook

__all__ = ("command_line", "train")


def train(
    experiment: "str | type[Experiment]",
    job_log_dir: str | os.PathLike[str],
    *,
    settings: Settings = (),
    hooks: "Sequence[Hook]" = (),
    packages: Sequence[str] = (),
) -> "TrainedModel":
    """Trains an experiment, or resumes its job, and returns the trained model.

    The result is the same as that of `load`, on the job's mesh; the weights are read when they are
    first used. A first Ctrl-C, or interrupt of a notebook's kernel, stops after the running step
    and saves it: `stopped_by` is then "SIGINT", and the same call resumes the job. Before the first
    step, and the second time, it raises KeyboardInterrupt. In a thread other than the main one
    signals have no effect.

    Args:
      experiment: A name, as for --exp, or a subclass of Experiment.
      job_log_dir: The job's directory.
      settings: Values by path, {"run.num_train_steps": 200}, or "path=value" each, as for --set.
      hooks: Further hooks, called after those of the experiment. They are not recorded in
        config.json.
      packages: Your packages, as for --packages.

    Raises:
      ConfigError: A setting, the data or the mesh is wrong, or the directory belongs to another
        job. Exceptions of the experiment's code or of a hook are raised unchanged.
    """
    command = command_line("train", experiment, settings, packages)
    command.job_log_dir = os.fspath(job_log_dir)
    if threading.current_thread() is not threading.main_thread():
        print("not in the main thread: no signal, such as Ctrl-C, stops this training", flush=True)
    launched = begun(command)
    job, ended = trained(
        command, launched, installed_job_tools(), hooks=hooks, stop_request=Interrupt
    )

    from praxis_lite.trained_model.trained_model import TrainedModel

    return TrainedModel(
        job.partitioner, job.job, launched.config, job.files, ended.step,
        experiment=launched.experiment, stopped_by=ended.stopped_by or ended.ended_early,
    )


def command_line(
    mode: str, experiment: "str | type[Experiment]", settings: Settings, packages: Sequence[str]
) -> CommandLine:
    """Returns the command line that does the same as a call in Python.

    Args:
      experiment, settings, packages: as for `train`.
    """
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
            f"The experiment is {experiment!r}; expected a name, such as 'lm.PyDocs', or a "
            "subclass of Experiment: the class, not an instance."
        )
    if "<locals>" in experiment.__qualname__:
        raise ConfigError(
            f"{callable_name(experiment)} is defined in a function, where no other process finds "
            "it. Define it at the top of a module or of a notebook."
        )
    name = callable_name(experiment)
    registry.registered.pop(name, None)  # A reloaded module defines its classes again.
    registry.register(experiment)
    return name
