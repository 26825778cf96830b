"""`main.py --mode=train`: trains an experiment, from nothing or from where its job stopped."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from praxis_lite.run.goodput.kinds import IMPORT, INIT
from praxis_lite.run.goodput.phase_clock import PhaseClock
from praxis_lite.run.modes.launched import experiment_of, job_on_mesh
from praxis_lite.run.modes.mode import CommandLine, Mode

if TYPE_CHECKING:
    from praxis_lite.run.checkpoints.init.initial_state import Source
    from praxis_lite.run.trainer.hooks.standard import MoreHooks


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
        clock = PhaseClock(command.began)
        launched = experiment_of(command, trains=True)
        clock.begins(INIT)
        with job_on_mesh(command, launched, "train") as job:
            with clock.during(IMPORT):
                # Imported after the checks, so that an error need not wait for Orbax.
                from praxis_lite.run.trainer import launch

            launch.train(job, launched, self._sources, self._more_hooks, clock=clock)
