"""`praxis_lite.train`, the Python counterpart of `praxis train`."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from praxis_lite.config.python_settings import Settings, as_texts
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.experiment import registry
from praxis_lite.installed_tools import installed_job_tools
from praxis_lite.job.processes.interrupts import Interrupt
from praxis_lite.job.processes.logs import is_on_terminal, job_log, lines_of
from praxis_lite.modes.mode import CommandLine
from praxis_lite.modes.train import begin_launch, train_from_command

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
    progress: bool = True,
) -> "TrainedModel":
    """Trains an experiment, or resumes its job, and returns the trained model.

    Ctrl-C (or a notebook kernel interrupt) and SIGTERM raise KeyboardInterrupt after the current
    step has finished and its checkpoint is saved; the same call then resumes the job. A second
    signal raises KeyboardInterrupt immediately. Signals have no effect if this function is called
    outside the main thread. Exceptions from the experiment's code or from hooks are raised
    unchanged.

    Args:
      experiment: Name of an experiment, as for --exp, or a subclass of Experiment.
      job_log_dir: The job's directory.
      settings: Values keyed by path, such as {"run.num_train_steps": 200}, or strings
        "path=value", as for --set.
      hooks: Hooks to call after the experiment's hooks. These additional hooks are not recorded in
        config.json.
      packages: User packages to import, as for --packages.
      progress: Whether to show the progress: a line that is updated on a terminal or in a notebook,
        otherwise about twenty lines. All other messages go to `logging.getLogger("praxis_lite")`
        and to log.txt in the job's directory.

    Returns:
      The trained model on the job's mesh, as from `load`; its weights are read on first use.

    Raises:
      ConfigError: A setting, the data or the mesh is invalid, or the directory contains a different
        job.
      KeyboardInterrupt: A signal stopped training.
    """
    command = command_line("train", experiment, settings, packages)
    from praxis_lite.trainer.metrics import progress as progress_line

    command.job_log_dir = os.fspath(job_log_dir)
    command.quiet = not progress or is_on_terminal()
    lines = lines_of(progress_line.__name__) if progress else contextlib.nullcontext()
    with lines, job_log():
        if threading.current_thread() is not threading.main_thread():
            _log.info("not in the main thread: signals such as Ctrl-C do not stop training")
        launched = begin_launch(command)
        job, result = train_from_command(
            command, launched, installed_job_tools(), hooks=hooks, stop_request=Interrupt
        )
    if result.stopped_by in signal.Signals.__members__:  # The time limit is not a signal.
        raise KeyboardInterrupt(
            f"{result.stopped_by}: step {result.step} is saved, and the same call resumes from it"
        )

    from praxis_lite.trained_model.trained_model import TrainedModel

    return TrainedModel(
        job.partitioner,
        job.job,
        launched.config,
        job.files,
        result.step,
        experiment=launched.experiment,
        stopped_by=result.stopped_by or result.ended_early,
    )


def command_line(
    mode: str, experiment: "str | type[Experiment]", settings: Settings, packages: Sequence[str]
) -> CommandLine:
    """Returns the command line that is equivalent to a Python call.

    Args:
      mode: Name of the mode.
      experiment: Name of an experiment, or a subclass of Experiment.
      settings: Values keyed by path, or strings "path=value".
      packages: User packages to import.
    """
    require(
        not isinstance(packages, str),
        f"{mode}: packages",
        packages,
        "a list of names, such as ['mypackage']",
    )
    texts = as_texts(settings)
    return CommandLine(mode=mode, exp=_name(experiment), settings=texts, packages=list(packages))


def _name(experiment: "str | type[Experiment]") -> str:
    """Returns an experiment's name; an experiment that is given as a class is registered first."""
    if isinstance(experiment, str):
        return experiment
    if not isinstance(experiment, type):
        raise ConfigError(
            f"The experiment is {experiment!r}; expected a name such as 'lm.PyDocs', or a subclass "
            "of Experiment (the class, not an instance)."
        )
    if "<locals>" in experiment.__qualname__:
        raise ConfigError(
            f"{callable_name(experiment)} is defined inside a function, where other processes "
            "cannot import it. Define it at the top level of a module or notebook."
        )
    name = callable_name(experiment)
    registry.registered.pop(name, None)  # The module may have been reloaded.
    registry.register(experiment)
    return name


_log = logging.getLogger(__name__)
