"""JobTools: the extension points of a training job, which the launcher fills in."""

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
    """The newest saved state of a job, which it resumes from; `Checkpoints` is one."""

    def latest_step(self) -> int | None:
        """Returns the step of the newest saved state, or None if nothing is saved."""
        ...

    def latest_data(self) -> Mapping[str, Any]:
        """Returns the JSON data that was saved with the state, such as the data position."""
        ...

    def restore(self, layout: "StateLayout", mesh: "Mesh") -> "Restored":
        """Returns the state on `mesh`, which may differ from the mesh that saved it."""
        ...


class OtherSaves(contextlib.AbstractContextManager):
    """Saves the job's state in addition to its checkpoints; this base class saves nothing."""

    def newest(self, checkpoints: "Checkpoints") -> SavedState:
        """Returns the newest state, here or in `checkpoints`; the same choice in all processes."""
        return checkpoints

    def hooks(self, job: "JobOnMesh") -> "Sequence[Hook]":
        """Returns hooks that save; they run before the hook that saves checkpoints."""
        return ()

    def __exit__(self, *exc_info: object) -> None:
        """Frees resources, however training ended."""


@dataclasses.dataclass(frozen=True)
class JobTools:
    """Extensions of a training job that other packages provide; by default there are none.

    The command line and `praxis_lite.train` use `installed_job_tools()`.

    Attributes:
      sources: Sources of initial states other than checkpoints, by the setting of `run` that
        selects each.
      hooks: Returns hooks to run before those of every job.
      recorder: Returns a context manager whose listener receives the job's events.
      other_saves: Returns the additional saves of the job's state.
      on_devices: Returns the job with a mesh of the available devices, for elastic jobs, whose
        number of devices changes; updates the config accordingly.
      begin_elastic: Handles `--elastic`: takes (command, argv, health_dir), and returns the exit
        status of a supervisor, or None in a worker. None rejects `--elastic`.
      beats: Class by which each process detects that another process died.
      summary_section: Returns another section of the job's summary, or "".
      num_lost_steps: Returns how many steps of a job were recomputed, according to the recorder.
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
