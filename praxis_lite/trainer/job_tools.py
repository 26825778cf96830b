"""What the launcher gives a job that trains, in addition to its config."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from praxis_lite.job.events import Listener
from praxis_lite.job.processes.beats import Beats

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from praxis_lite.checkpoints.checkpoints import Checkpoints, Restored
    from praxis_lite.checkpoints.init.initial_state import Note, Source
    from praxis_lite.core.partitioner.train_state import StateLayout
    from praxis_lite.experiment.experiment import Job
    from praxis_lite.experiment.launched_config import LaunchedConfig
    from praxis_lite.job.job_dir import JobDir
    from praxis_lite.trainer.hooks.hook import Hook
    from praxis_lite.trainer.job_on_mesh import JobOnMesh

__all__ = ("JobTools", "OtherSaves", "SavedState")


class SavedState(Protocol):
    """The newest state that a job can resume from, such as the newest of its `Checkpoints`."""

    def latest_step(self) -> int | None:
        """Returns its step; None: nothing is saved."""
        ...

    def latest_data(self) -> Mapping[str, Any]:
        """Returns the data that were saved with it."""
        ...

    def restore(self, layout: "StateLayout", mesh: "Mesh") -> "Restored":
        """Returns it on any mesh; it may have been saved on another."""
        ...


class OtherSaves(contextlib.AbstractContextManager):
    """Saves a job's states elsewhere than among its checkpoints; by default there are none."""

    def newest(self, checkpoints: "Checkpoints") -> SavedState:
        """Returns the newest state of all, the same on all processes."""
        return checkpoints

    def hooks(self, job: "JobOnMesh") -> "Sequence[Hook]":
        """Returns the hooks that save; they come before the one that saves checkpoints."""
        return ()

    def __exit__(self, *exc_info: object) -> None:
        """Frees its resources, however training ended."""


@dataclasses.dataclass(frozen=True)
class JobTools:
    """What a job that trains is given in addition to its config; by default nothing.

    Those of the command line and of `praxis_lite.train` are `installed_job_tools()`.

    Attributes:
      sources: of initial states besides checkpoints, by the setting of `run` that names them.
      hooks: returns hooks that come before those of every job.
      recorder: returns a context whose listener hears the job's events while it trains.
      other_saves: returns what saves the job's states elsewhere too.
      on_devices: returns the job on a mesh of the devices that there are, if they may be others
        than its own mesh has; it changes the config likewise.
      begin_elastic: begins a launch with `--elastic`: (command, argv, health_dir) to the exit
        status of a supervisor, or None in a worker. None: such launches are refused.
      beats: how each process learns that another one has died.
      summary_section: returns a further section of a job's summary, or "".
      num_lost_steps: returns how many steps of a job were recomputed, as far as the recorder knows.
    """

    sources: "Mapping[str, Source]" = dataclasses.field(default_factory=dict)
    hooks: "Callable[[JobOnMesh], Sequence[Hook]]" = lambda job: ()
    recorder: "Callable[[JobDir, Note], contextlib.AbstractContextManager[Listener]]" = (
        lambda files, note: contextlib.nullcontext(Listener())
    )
    other_saves: "Callable[[JobOnMesh, Note], OtherSaves]" = lambda job, note: OtherSaves()
    on_devices: "Callable[[Job, LaunchedConfig], Job]" = lambda job, launched: job
    begin_elastic: Callable[..., int | None] | None = None
    beats: type[Beats] = Beats
    summary_section: "Callable[[JobDir], str]" = lambda job_dir: ""
    num_lost_steps: "Callable[[JobDir], int]" = lambda job_dir: 0
