"""The newest state from which a job can resume: on disk, or in the memory of hosts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from praxis_lite.checkpoints.checkpoints import Checkpoints, Restored
from praxis_lite.checkpoints.sharded_reading import read_state
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.job import processes
from praxis_lite.job.processes.broadcast import from_first
from praxis_tools.elastic.peer_saves.held_saves import Choice, HeldSave, newest_whole
from praxis_tools.elastic.store_messages import StoreClient


class NewestState:
    """The newest state of a job, chosen when it is made; the same on all processes.

    A complete peer save is used unless the disk has a newer step, because it is read faster.

    Attributes:
      step: the number of steps that were made; None: there is no state.
      source: "peers", "disk" or "new".

    Args:
      checkpoints: on disk.
      stores: of the members, in the order of their processes; none in a job without peer saves.
      note: prints a line, in the first process.
    """

    step: int | None = None

    def __init__(
        self, checkpoints: Checkpoints, stores: Sequence[StoreClient], note: Callable[[str], None]
    ):
        self._checkpoints, self._held = checkpoints, None
        chosen = on_disk = None
        if stores:
            told = from_first("newest state", lambda: _decided(checkpoints, stores))
            if processes.is_first():
                for line in told["lines"]:
                    note(line)
            chosen, on_disk = told["choice"] and Choice(*told["choice"]), told["on_disk"]
        # The disk's steps are verified only if one of them may be used: that reads all of it.
        if chosen is None or (on_disk is not None and on_disk > chosen.step):
            self.step = checkpoints.latest_step()
        if chosen is not None and (self.step is None or self.step <= chosen.step):
            self.step, self._held = chosen.step, HeldSave(stores, processes.index(), chosen)
        self.source = "peers" if self._held else "new" if self.step is None else "disk"

    def latest_step(self) -> int | None:
        """Returns `step`."""
        return self.step

    def latest_data(self) -> Mapping[str, Any]:
        """Returns the data that were saved with the state."""
        return self._held.manifest["data"] if self._held else self._checkpoints.latest_data()

    def restore(self, layout: StateLayout, mesh: Mesh) -> Restored:
        """Returns the state on `mesh`, saved on any mesh; raises as `Checkpoints.restore`."""
        if not self._held:
            return self._checkpoints.restore(layout, mesh)
        held = self._held
        named = Path("the memory of hosts") / str(held.step)
        state = read_state(named, held.manifest["leaves"], lambda: held.arrays, layout, mesh)
        return Restored(held.step, state, held.manifest["data"], from_memory=True)


def _decided(checkpoints: Checkpoints, stores: Sequence[StoreClient]) -> dict[str, Any]:
    """Returns the peer save to resume from, if any, and the lines to print; for JSON."""
    choice, lines = newest_whole(stores)
    if lines:
        lines = [f"the memory of hosts: {'; '.join(lines)}"]
    on_disk = max(checkpoints.all_steps(), default=None)
    return {"choice": choice, "lines": lines, "on_disk": on_disk}
