"""Where training begins: a new state, that of a source, or the newest one that the job saved."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.frozen_base import check_frozen_base
from praxis_lite.checkpoints.init.init_from_checkpoint import FromCheckpoints
from praxis_lite.checkpoints.init.initial_state import InitialState, Source, begun
from praxis_lite.checkpoints.steps import step_dirs
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job.events import COMPILE, RESTORE, events
from praxis_lite.trainer.checks.resume import check_resumable, check_same_seed
from praxis_lite.trainer.compilation import compile_init
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.job_tools import SavedState
from praxis_lite.trainer.spike_detector import LossSpike


@dataclasses.dataclass
class StartingPoint:
    """Where training begins.

    Attributes:
      step: the number of steps that were made before.
      state: of that step; None once it was taken.
      skipped_batches: indices of the training batches that are left out.
      hooks: what hooks saved with the state, by their names.
      source: "new"; or where the job itself saved the state: "disk", or "peers", the memory of
        hosts.
    """

    step: int
    state: TrainState | None
    skipped_batches: tuple[int, ...] = ()
    hooks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "new"

    @property
    def is_resumed(self) -> bool:
        """True if the job itself saved the state."""
        return self.source != "new"

    def take_state(self) -> TrainState:
        """Returns the state and keeps no reference: the first step donates it."""
        state, self.state = self.state, None
        return state


class States:
    """The states that a job can begin with.

    Args:
      sources: of initial states besides checkpoints, by the setting of `run` that names them.

    Raises:
      ConfigError: the job is new, and its initial state does not fit, or has not all frozen
        weights.
    """

    def __init__(self, job: JobOnMesh, sources: Mapping[str, Source]):
        self._job = job
        self._sources = {"init_from_checkpoint_rules": FromCheckpoints, **sources}
        if not step_dirs.committed_steps(job.files.checkpoints):
            initial = self._initial()
            check_frozen_base(
                job.partitioner.learner.groups, initial.paths if initial else (),
                may_be_new=job.run.frozen_may_be_new,
            )

    def new(self) -> StartingPoint:
        """Returns the start of a new job: a drawn state, or that of a source."""
        partitioner = self._job.partitioner
        key, source = partitioner.key(self._job.run.seed), self._initial()
        if source is None:
            _say("initialising the state")
            with events.phase(COMPILE):
                compile_init(partitioner, key)
            return StartingPoint(0, partitioner.init(key))
        source.keep(self._job.files)
        return StartingPoint(source.step, begun(partitioner, key, source, _say))

    def resumed(self, saved: SavedState) -> StartingPoint:
        """Returns the start of a job from a saved state; raises ConfigError if the data differ."""
        run, data = self._job.run, saved.latest_data()
        accepted = check_resumable(data, self._job.datasets[TRAIN], run.accept_changed_data)
        for line in [*accepted, *check_same_seed(data, run)]:
            print(line)
        return self._restored(saved)

    def rolled_back(
        self, checkpoints: Checkpoints, spike: LossSpike, skipped_batches: tuple[int, ...]
    ) -> StartingPoint:
        """Returns the newest checkpoint from before a spike, or a new start if there is none.

        A spike ends its run before the checkpoint of its step is begun. One of that step, or of a
        later one, is set aside.

        Args:
          skipped_batches: that are left out from now on.
        """
        with events.phase(RESTORE):
            checkpoints.abandon_after(spike.step - 1)
            is_new = checkpoints.latest_step() is None
        start = self.new() if is_new else self._restored(checkpoints)
        return dataclasses.replace(start, skipped_batches=skipped_batches)

    def _initial(self) -> InitialState | None:
        """Returns the initial state that a setting of `run` names; None: all of it is drawn."""
        if (setting := self._job.run.init_from) is None:
            return None
        name, value = setting
        return self._sources[name](value, self._job.partitioner.layout)

    def _restored(self, saved: SavedState) -> StartingPoint:
        with events.phase(RESTORE):
            restored = saved.restore(self._job.partitioner.layout, self._job.partitioner.mesh)
        name, source = ("peer save", "peers") if restored.from_memory else ("checkpoint", "disk")
        print(f"restored the {name} of step {restored.step}", flush=True)
        data = restored.data
        return StartingPoint(
            restored.step, restored.state, tuple(data.get("skipped", ())), data.get("hooks", {}),
            source,
        )


def _say(line: str) -> None:
    print(line, flush=True)
