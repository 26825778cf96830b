"""The config of a launch, from an experiment or from a job's recorded config."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError
from praxis_lite.experiment import registry
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.job_dir import JobDir

if TYPE_CHECKING:
    import fiddle as fdl

__all__ = ("LaunchedConfig", "config_of_experiment")


@dataclasses.dataclass(frozen=True)
class LaunchedConfig:
    """The config of a launch, and facts about the launch that are recorded in config.json.

    Attributes:
      config: The config, with settings applied.
      experiment: Full name of the experiment's class.
      settings: The values of --set.
      packages: Additional packages whose functions and classes the config may contain.
      mesh_for: Method `mesh_for` of the experiment, or None for a recorded config.
      recorded: The config.json from which the config was read, or None if an experiment created
        the config.
    """

    config: "fdl.Config"
    experiment: str
    settings: Sequence[str] = ()
    packages: Sequence[str] = ()
    mesh_for: "Callable[[int], fdl.Config | None] | None" = None
    recorded: AnyPath | None = None


def config_of_experiment(
    name: str, settings: Sequence[str] = (), packages: Sequence[str] = ()
) -> LaunchedConfig:
    """Creates the config of an experiment and applies settings.

    Args:
      name: Name of the experiment, as for --exp.
      settings: Settings "path=value", as for --set.
      packages: The user's packages, as for --packages.

    Raises:
      ConfigError: The experiment does not exist, or a setting is invalid.
    """
    experiment = registry.get_experiment(name, packages)

    from praxis_lite.config.experiment_overrides import experiment_and_config

    allowed = registry.allowed_packages(packages)
    instance, config = experiment_and_config(experiment, settings, allowed)
    return LaunchedConfig(
        config, callable_name(experiment), settings, allowed, mesh_for=instance.mesh_for
    )


def config_of_job(
    job_dir: JobDir,
    name: str | None = None,
    settings: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> LaunchedConfig:
    """Reads the recorded config of a job and applies settings.

    Args:
      job_dir: The job directory.
      name: Name of the experiment, as for --exp. Must be the job's experiment, or None.
      settings: Settings "path=value", as for --set.
      packages: The user's packages, as for --packages.

    Raises:
      ConfigError: The job has a different experiment, its config cannot be read, or a setting is
        invalid.
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
                f"{job_dir.location} contains a job of {loaded.experiment}, but --exp is {given}. "
                "Remove --exp, or use the directory of a job of that experiment."
            )
    with naming_settings(loaded.config, job_dir.config_json):
        apply_overrides(loaded.config, settings, allowed)
    return LaunchedConfig(
        loaded.config,
        loaded.experiment,
        settings,
        allowed,
        recorded=job_dir.shown(job_dir.config_json),
    )
