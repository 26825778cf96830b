"""`main.py --mode=train`: trains an experiment, from nothing or from where its job stopped."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from praxis_lite.run.goodput.kinds import IMPORT, INIT
from praxis_lite.run.goodput.phase_clock import PhaseClock
from praxis_lite.run.job.processes.stopping import StopRequest
from praxis_lite.run.modes.launched import experiment_of, job_on_mesh
from praxis_lite.run.modes.mode import CommandLine, Mode

if TYPE_CHECKING:
    from praxis_lite.run.checkpoints.init.initial_state import Source
    from praxis_lite.run.experiment.launched_config import LaunchedConfig
    from praxis_lite.run.trainer.hooks.hook import Hook
    from praxis_lite.run.trainer.hooks.standard import MoreHooks
    from praxis_lite.run.trainer.job_on_mesh import JobOnMesh
    from praxis_lite.run.trainer.trainer import Trained


class Train(Mode):
    """Trains, and goes on with a job that was stopped.

    Args:
      sources, more_hooks: of initial states, and hooks of tools, as for `launch.train`.
    """

    summary = "trains an experiment, or goes on with its job"
    goes_on = True
    is_of_many_processes = True

    def __init__(self, sources: "Mapping[str, Source]", more_hooks: "MoreHooks"):
        self._sources, self._more_hooks = sources, more_hooks

    def run(self, command: CommandLine) -> None:
        """Trains; raises ConfigError as `launch.train` does."""
        trained(command, self._sources, self._more_hooks)


def trained(
    command: CommandLine, sources: "Mapping[str, Source]", more_hooks: "MoreHooks", *,
    hooks: "Sequence[Hook]" = (), stop_request: type[StopRequest] = StopRequest,
) -> "tuple[JobOnMesh, LaunchedConfig, Trained]":
    """Trains the experiment of a command line; returns its job, its config, and how it ended.

    Args:
      sources, more_hooks, stop_request: as for `launch.train`.
      hooks: besides those of the experiment, after them.

    Raises:
      ConfigError: as `launch.train`.
    """
    clock = PhaseClock(command.began)
    launched = experiment_of(command, trains=True)
    clock.begins(INIT)
    with job_on_mesh(command, launched, "train") as job:
        with clock.during(IMPORT):
            # Imported after the checks, so that an error need not wait for Orbax.
            from praxis_lite.run.trainer import launch

        if hooks:
            with_hooks = dataclasses.replace(job.job, hooks=(*job.hooks, *hooks))
            job = dataclasses.replace(job, job=with_hooks)
        ended = launch.train(
            job, launched, sources, more_hooks, clock=clock, stop_request=stop_request
        )
    return job, launched, ended
