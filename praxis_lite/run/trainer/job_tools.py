"""What a job that trains is given besides its config, by whoever launches it."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from praxis_lite.run.events import Listener

if TYPE_CHECKING:
    from praxis_lite.run.checkpoints.init.initial_state import Note, Source
    from praxis_lite.run.experiment.experiment import Job
    from praxis_lite.run.experiment.launched_config import LaunchedConfig
    from praxis_lite.run.job.job_dir import JobDir
    from praxis_lite.run.trainer.hooks.hook import Hook
    from praxis_lite.run.trainer.job_on_mesh import JobOnMesh
    from praxis_lite.run.trainer.other_saves import OtherSaves


def _no_recorder(
    files: "JobDir", note: "Note"
) -> contextlib.AbstractContextManager[Listener]:
    return contextlib.nullcontext(Listener())


def _no_other_saves(job: "JobOnMesh", note: "Note") -> "OtherSaves":
    from praxis_lite.run.trainer.other_saves import OtherSaves

    return OtherSaves()


@dataclasses.dataclass(frozen=True)
class JobTools:
    """What a job that trains is given besides its config; by default nothing.

    `tools_of_jobs.py` has those of the command line and of `praxis_lite.train`.

    Attributes:
      sources: of initial states besides checkpoints, by the setting of `run` that names them.
      hooks: returns hooks that come before those of every job.
      recorder: returns a context whose listener hears the job's events while it trains.
      other_saves: returns what saves the job's states elsewhere too.
      on_devices: returns the job on a mesh of the devices that there are, if they may be others
        than its own mesh has; it changes the config likewise.
    """

    sources: "Mapping[str, Source]" = dataclasses.field(default_factory=dict)
    hooks: "Callable[[JobOnMesh], Sequence[Hook]]" = lambda job: ()
    recorder: "Callable[[JobDir, Note], contextlib.AbstractContextManager[Listener]]" = (
        _no_recorder
    )
    other_saves: "Callable[[JobOnMesh, Note], OtherSaves]" = _no_other_saves
    on_devices: "Callable[[Job, LaunchedConfig], Job]" = lambda job, launched: job
