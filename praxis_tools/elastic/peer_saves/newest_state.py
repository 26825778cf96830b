"""Chooses the newest state from which a job can resume, on disk or in host memory."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from praxis_lite.checkpoints.checkpoints import Checkpoints, Restored
from praxis_lite.checkpoints.sharded_reading import read_state
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.job import processes
from praxis_lite.job.processes.broadcast import from_first
from praxis_tools.elastic.peer_saves.stored_saves import (
    SaveChoice,
    StoredSave,
    newest_complete_save,
)
from praxis_tools.elastic.store_messages import StoreClient


class NewestState:
    """The newest saved state of a job, which is the same in all processes.

    The state is chosen in the constructor. Unless a newer step is on disk, a complete peer save is
    preferred, because a peer save is faster to read than a checkpoint.

    Args:
      checkpoints: Checkpoints on disk.
      stores: Stores of the members, in the order of their processes; empty if there are no peer
        saves.
      note: Function that prints a line in the first process.

    Attributes:
      step: Step of the state, or None if there is no saved state.
      source: "peers", "disk" or "new".
    """

    step: int | None = None

    def __init__(
        self, checkpoints: Checkpoints, stores: Sequence[StoreClient], note: Callable[[str], None]
    ):
        self._checkpoints = checkpoints
        self._peer_save: StoredSave | None = None
        choice = step_on_disk = None
        if stores:
            decision = from_first("newest state", lambda: _decide(checkpoints, stores))
            if processes.is_first():
                for line in decision["lines"]:
                    note(line)
            choice = decision["choice"] and SaveChoice(*decision["choice"])
            step_on_disk = decision["on_disk"]
        # Verifying a step on disk requires reading all of its files, so only do this if needed.
        if choice is None or (step_on_disk is not None and step_on_disk > choice.step):
            self.step = checkpoints.latest_step()
        if choice is not None and (self.step is None or self.step <= choice.step):
            self.step, self._peer_save = choice.step, StoredSave(stores, processes.index(), choice)
        self.source = "peers" if self._peer_save else "new" if self.step is None else "disk"

    def latest_step(self) -> int | None:
        """Returns `step`."""
        return self.step

    def latest_data(self) -> Mapping[str, Any]:
        """Returns the data saved with the state."""
        if self._peer_save:
            return self._peer_save.manifest["data"]
        return self._checkpoints.latest_data()

    def restore(self, layout: StateLayout, mesh: Mesh) -> Restored:
        """Restores the state on a mesh, which may differ from the mesh used by the save.

        This raises the same errors as `Checkpoints.restore`.
        """
        save = self._peer_save
        if not save:
            return self._checkpoints.restore(layout, mesh)
        name = Path("the memory of hosts") / str(save.step)
        state = read_state(name, save.manifest["leaves"], lambda: save.arrays, layout, mesh)
        return Restored(save.step, state, save.manifest["data"], from_memory=True)


def _decide(checkpoints: Checkpoints, stores: Sequence[StoreClient]) -> dict[str, Any]:
    """Returns the newest peer save, the lines to print and the step on disk, as JSON values."""
    choice, lines = newest_complete_save(stores)
    if lines:
        lines = [f"peer saves: {'; '.join(lines)}"]
    on_disk = max(checkpoints.all_steps(), default=None)
    return {"choice": choice, "lines": lines, "on_disk": on_disk}
