"""Extension points for training jobs."""

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
    """Interface to a job's newest saved state, implemented for example by `Checkpoints`."""

    def latest_step(self) -> int | None:
        """Returns the step of the newest saved state, or None if no state is saved."""
        ...

    def latest_data(self) -> Mapping[str, Any]:
        """Returns the JSON data that was saved with the state, such as the data position."""
        ...

    def restore(self, layout: "StateLayout", mesh: "Mesh") -> "Restored":
        """Returns the state on `mesh`. The state may have been saved on a different mesh."""
        ...


class OtherSaves(contextlib.AbstractContextManager):
    """Saves the job's state in addition to its checkpoints; this base class saves nothing."""

    def newest(self, checkpoints: "Checkpoints") -> SavedState:
        """Returns the newest state from these saves or `checkpoints`; the same in all processes."""
        return checkpoints

    def hooks(self, job: "JobOnMesh") -> "Sequence[Hook]":
        """Returns hooks that save the state and run before the hook that saves checkpoints."""
        return ()

    def __exit__(self, *exc_info: object) -> None:
        """Frees resources, however training ended."""


@dataclasses.dataclass(frozen=True)
class JobTools:
    """Extensions to a training job, provided by other packages; empty by default.

    The command line and `praxis_lite.train` use `installed_job_tools()`.

    Attributes:
      sources: Sources of initial states other than checkpoints, keyed by the name of the setting in
        `run` that selects the source.
      hooks: Function that returns hooks to run before the standard hooks.
      recorder: Function that returns a context manager whose listener receives the job's events.
      other_saves: Function that returns an object for saving the job's state in other ways.
      on_devices: Function that returns the job with a mesh of the available devices and updates the
        config accordingly. It is used for elastic jobs, whose number of devices may change.
      begin_elastic: Function that handles `--elastic`. Takes (command, argv, health_dir), and
        returns the exit status in a supervisor, or None in a worker. If this is None, `--elastic`
        is rejected.
      beats: Class that each process uses to detect that other processes have died.
      summary_section: Function that returns an additional section for the job's summary, or "".
      num_lost_steps: Function that returns the number of recomputed steps according to the
        recorder.
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
