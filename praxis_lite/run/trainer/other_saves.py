"""States of a job that are saved elsewhere than among its checkpoints."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax.sharding import Mesh

from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.run.checkpoints.checkpoints import Checkpoints, Restored
from praxis_lite.run.trainer.hooks.hook import Hook
from praxis_lite.run.trainer.job_on_mesh import JobOnMesh


class SavedState(Protocol):
    """The newest state that a job can resume from, such as the newest of its `Checkpoints`."""

    def latest_step(self) -> int | None:
        """Returns its step; None: nothing is saved."""
        ...

    def latest_data(self) -> Mapping[str, Any]:
        """Returns the data that were saved with it."""
        ...

    def restore(self, layout: StateLayout, mesh: Mesh) -> Restored:
        """Returns it on a mesh, whatever mesh saved it."""
        ...


class OtherSaves(contextlib.AbstractContextManager):
    """Saves a job's states elsewhere too, while it is entered; by default there are none."""

    def newest(self, checkpoints: Checkpoints) -> SavedState:
        """Returns the newest state of all, the same on all processes."""
        return checkpoints

    def hooks(self, job: JobOnMesh) -> Sequence[Hook]:
        """Returns the hooks that save; they come before the one that saves checkpoints."""
        return ()

    def __exit__(self, *exc_info: object) -> None:
        """Frees its resources, however training ended."""
