"""The config that a command line names: of an experiment, or of a trained job."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError
from praxis_lite.experiment import registry
from praxis_lite.job.job_dir import JobDir

if TYPE_CHECKING:
    import fiddle as fdl

__all__ = ("LaunchedConfig", "config_of_experiment")


@dataclasses.dataclass(frozen=True)
class LaunchedConfig:
    """The config of a command line, and the facts about it that config.json records.

    Attributes:
      experiment: The full name of its class.
      settings: The values of --set.
      packages: Packages whose functions and classes the config may name, besides the library's.
      mesh_for: The method of the experiment; None: the config is a recorded one.
      recorded: The config.json that the config was read from; None: the class made it.
    """

    config: "fdl.Config"
    experiment: str
    settings: Sequence[str] = ()
    packages: Sequence[str] = ()
    mesh_for: "Callable[[int], fdl.Config | None] | None" = None
    recorded: Path | None = None


def config_of_experiment(
    name: str, settings: Sequence[str] = (), packages: Sequence[str] = ()
) -> LaunchedConfig:
    """Returns the config of an experiment with settings applied.

    Args:
      name: As for --exp.
      settings, packages: As for --set and --packages.

    Raises:
      ConfigError: As `get_experiment` and `configured`.
    """
    experiment = registry.get_experiment(name, packages)

    from praxis_lite.config.class_attributes import experiment_and_config

    allowed = registry.allowed_packages(packages)
    made, config = experiment_and_config(experiment, settings, allowed)
    return LaunchedConfig(
        config, callable_name(experiment), settings, allowed, mesh_for=made.mesh_for
    )


def config_of_job(
    job_dir: JobDir, name: str | None = None, settings: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> LaunchedConfig:
    """Returns the recorded config of a job with settings applied.

    Args:
      name: Of the experiment, as for --exp; None: the job's experiment.
      settings, packages: As for --set and --packages.

    Raises:
      ConfigError: The job is of another experiment; or as `recorded_config` and `apply_overrides`.
    """
    from praxis_lite.config.build import naming_settings
    from praxis_lite.config.overrides import apply_overrides
    from praxis_lite.experiment.recorded_job import recorded_config

    allowed = registry.allowed_packages(packages)
    loaded = recorded_config(job_dir, allowed)
    if name is not None:
        given = callable_name(registry.get_experiment(name, packages))
        if given != loaded.experiment:
            raise ConfigError(
                f"{job_dir.path} belongs to {loaded.experiment}, but --exp names {given}. Leave "
                "--exp out, or name that experiment's directory."
            )
    with naming_settings(loaded.config, job_dir.config_json):
        apply_overrides(loaded.config, settings, allowed)
    return LaunchedConfig(
        loaded.config, loaded.experiment, settings, allowed, recorded=job_dir.config_json
    )
