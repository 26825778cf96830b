"""Creates and checks the config that a command line specifies, and places its job on a mesh."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.experiment.launched_config import (
    LaunchedConfig,
    config_of_experiment,
    config_of_job,
)
from praxis_lite.job import processes
from praxis_lite.job.job_dir import open_for_reading, open_for_training
from praxis_lite.job.processes.same_everywhere import check_same, versions
from praxis_lite.job.shared_job_dir import open_shared
from praxis_lite.modes.mode import CommandLine

if TYPE_CHECKING:
    from praxis_lite.experiment.experiment import Job
    from praxis_lite.trainer.decoding.user_prompts import Prompt
    from praxis_lite.trainer.job_on_mesh import JobOnMesh

__all__ = ("experiment_name", "experiment_of", "job_log_dir", "job_on_mesh", "recorded_job_of")


def experiment_of(command: CommandLine, *, trains: bool = False) -> LaunchedConfig:
    """Returns the config of the experiment with --set applied, and logs the experiment's name.

    Args:
      command: The common options.
      trains: Whether to open --job_log_dir for training and set `command.job_dir`.

    Raises:
      ConfigError: The experiment does not exist, a setting or the directory is invalid, or a
        required field or a tokenizer is missing.
    """
    name = experiment_name(command)
    launched = config_of_experiment(name, command.settings, command.packages)
    if trains:
        path = job_log_dir(command)
        command.job_dir = open_shared(path, lambda: open_for_training(path, launched.experiment))
    _announce(command, launched)
    _check(launched)
    return launched


def recorded_job_of(
    command: CommandLine, reads: str, *, has_prompts: bool = False
) -> LaunchedConfig:
    """Returns the config of a trained job with --set applied, and logs the experiment's name.

    Sets `command.job_dir`.

    Args:
      command: The common options.
      reads: "eval" or "decode". Datasets that this mode does not read are removed from the config.
      has_prompts: Whether prompts to decode are specified, so that no prompt dataset is read.

    Raises:
      ConfigError: The job does not exist, a setting is invalid, or a required field or a tokenizer
        is missing.
    """
    path = job_log_dir(command)
    job_dir = open_shared(path, lambda: open_for_reading(path))
    launched = config_of_job(job_dir, command.exp, command.settings, command.packages)
    command.job_dir = job_dir

    from praxis_lite.experiment.recorded_job import remove_unused

    _announce(command, launched)
    remove_unused(launched.config, reads, has_prompts=has_prompts)
    _check(launched)
    return launched


@contextlib.contextmanager
def job_on_mesh(
    command: CommandLine,
    launched: LaunchedConfig,
    checked_for: str,
    *,
    prompts: "Sequence[Prompt]" = (),
    same: Mapping[str, Any] | None = None,
    on_devices: "Callable[[Job, LaunchedConfig], Job] | None" = None,
) -> Iterator["JobOnMesh"]:
    """Builds and checks a job on its mesh, without compiling.

    Inside the context, errors about a file include the setting for that file, and out-of-memory
    errors list the largest arrays.

    Args:
      command: The common options.
      launched: The config.
      checked_for: The mode that selects the checks in `partitioner_of`.
      prompts: Prompts to decode instead of the experiment's prompts.
      same: Values that must be the same in all processes, in addition to the config.
      on_devices: Function that adapts the job to the available devices, as in `JobTools`.

    Yields:
      The job on its mesh.

    Raises:
      ConfigError: The mesh, the data, the task and the run are inconsistent, or the processes were
        started with different command lines.
    """
    _check_same_command(command, launched, same or {})

    from praxis_lite.config.build import build, naming_settings

    with naming_settings(launched.config, launched.recorded):
        job = build(launched.config)
        if on_devices is not None:
            job = on_devices(job, launched)
        if prompts:
            from praxis_lite.trainer.decoding.user_prompts import with_prompts

            job = with_prompts(job, prompts)

        from praxis_lite.trainer.job_on_mesh import JobOnMesh, partitioner_of

        partitioner = partitioner_of(job, checked_for)

        from praxis_lite.trainer.checks.memory import explaining_out_of_memory

        with explaining_out_of_memory(partitioner.layout):
            # Only modes without a directory pass None, and these modes do not read `files`.
            files = command.job_dir
            with contextlib.nullcontext() if files is None else files.uploading():
                yield JobOnMesh(partitioner, job, files)  # type: ignore[arg-type]  # See above.


def experiment_name(command: CommandLine) -> str:
    """Returns the name of the experiment. Raises ConfigError if it is not set."""
    if command.exp is None:
        raise ConfigError(
            f"`praxis {command.mode} EXP` requires the name of an experiment, such as lm.PyDocs "
            "(main.py: --exp=EXP). `praxis list` shows the available names."
        )
    return command.exp


def job_log_dir(command: CommandLine) -> str:
    """Returns the directory of --job_log_dir. Raises ConfigError if it is not set."""
    if command.job_log_dir is None:
        raise ConfigError(
            f"`praxis {command.mode}` requires --job_log_dir=DIR, the job's directory."
        )
    if not command.job_log_dir:
        raise ConfigError(
            "--job_log_dir is empty, perhaps because a shell variable is not set. Pass a directory."
        )
    return command.job_log_dir


def _announce(command: CommandLine, launched: LaunchedConfig) -> None:
    location = f", in {command.job_dir.location}" if command.job_dir else ""
    _log.info("%s, %s%s", launched.experiment, command.mode, location)


def _check(launched: LaunchedConfig) -> None:
    from praxis_lite.config.overrides import check_required
    from praxis_lite.experiment.recorded_job import check_tokenizers

    check_required(launched.config)
    check_tokenizers(launched.config)


def _check_same_command(
    command: CommandLine, launched: LaunchedConfig, same: Mapping[str, Any]
) -> None:
    """Checks, before devices are used, that all processes have the same command and config."""
    if processes.count() > 1:
        from praxis_lite.config.config_json import config_lines

        lines = dict(line.partition("=")[::2] for line in config_lines(launched.config))
        options = {"mode": command.mode, "experiment": launched.experiment, **same}
        package_versions = {f"version of {name}": text for name, text in versions().items()}
        check_same("The processes differ", {**package_versions, **options, **lines})


_log = logging.getLogger(__name__)
