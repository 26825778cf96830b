"""Creates or restores the state from which training starts."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.frozen_base import check_frozen_base
from praxis_lite.checkpoints.init.init_from_checkpoint import FromCheckpoints
from praxis_lite.checkpoints.init.initial_state import InitialState, Source, begun
from praxis_lite.checkpoints.steps.step_store import steps_in
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
    """The step and state from which training starts.

    Attributes:
      step: Number of completed training steps.
      state: The TrainState after that step, or None after `take_state`.
      skipped_batches: Indices of training batches to skip because of loss spikes.
      hooks: Values that hooks saved with the state, keyed by hook name.
      source: "new" for an initial state, "disk" for the job's checkpoint, or "peers" for a state
        from the memory of the job's hosts.
    """

    step: int
    state: TrainState | None
    skipped_batches: tuple[int, ...] = ()
    hooks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "new"

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier launch of this job saved the state."""
        return self.source != "new"

    def take_state(self) -> TrainState:
        """Returns the state and drops the reference to it, because the first step donates it."""
        state, self.state = self.state, None
        assert state is not None, "The state can be taken only once."
        return state


class StartingPoints:
    """Creates or restores the state from which a job starts.

    Args:
      job: The job, placed on its mesh.
      sources: Additional sources of initial states, keyed by the name of the setting in `run` that
        selects the source.

    Raises:
      ConfigError: The job has no checkpoint yet, and its initial state does not match the task or
        does not contain a frozen weight.
    """

    def __init__(self, job: JobOnMesh, sources: Mapping[str, Source]):
        self._job = job
        self._sources = {"init_from_checkpoint_rules": FromCheckpoints, **sources}
        if not steps_in(job.files.checkpoints).committed():
            initial = self._initial()
            check_frozen_base(
                job.partitioner.bound_learner.groups,
                initial.paths if initial else (),
                may_be_new=job.run.frozen_may_be_new,
            )

    def new(self) -> StartingPoint:
        """Returns the starting point of a new job, with random weights or weights from a source."""
        partitioner = self._job.partitioner
        key, source = partitioner.key(self._job.run.seed), self._initial()
        if source is None:
            _log.info("initializing the state")
            with events.phase(COMPILE):
                compile_init(partitioner, key)
            return StartingPoint(0, partitioner.init(key))
        source.keep(self._job.files)
        return StartingPoint(source.step, begun(partitioner, key, source, _log.info))

    def resumed(self, saved: SavedState) -> StartingPoint:
        """Restores a saved state. Raises ConfigError if the job's training data has changed."""
        run, data = self._job.run, saved.latest_data()
        accepted = check_resumable(data, self._job.datasets[TRAIN], run.accept_changed_data)
        for line in [*accepted, *check_same_seed(data, run)]:
            _log.info(line)
        return self._restored(saved)

    def rolled_back(
        self, checkpoints: Checkpoints, spike: LossSpike, skipped_batches: tuple[int, ...]
    ) -> StartingPoint:
        """Restores the newest checkpoint before a loss spike; creates a new state if none exists.

        An earlier launch may have saved checkpoints for the spike's step and for later steps; these
        checkpoints are set aside.

        Args:
          checkpoints: The job's checkpoints.
          spike: The loss spike.
          skipped_batches: Indices of all training batches to skip from now on.
        """
        with events.phase(RESTORE):
            checkpoints.abandon_after(spike.step - 1)
            is_new = checkpoints.latest_step() is None
        start = self.new() if is_new else self._restored(checkpoints)
        return dataclasses.replace(start, skipped_batches=skipped_batches)

    def _initial(self) -> InitialState | None:
        """Returns the initial state selected by `run.init_from...`, or None for random weights."""
        if (setting := self._job.run.init_from) is None:
            return None
        name, value = setting
        return self._sources[name](value, self._job.partitioner.layout)

    def _restored(self, saved: SavedState) -> StartingPoint:
        with events.phase(RESTORE):
            restored = saved.restore(self._job.partitioner.layout, self._job.partitioner.mesh)
        name, source = ("peer save", "peers") if restored.from_memory else ("checkpoint", "disk")
        _log.info("restored the %s of step %d", name, restored.step)
        data, train = restored.data, self._job.datasets[TRAIN]
        state = data.get("state")
        if state is not None and data["fingerprint"] != json.loads(json.dumps(train.fingerprint())):
            state = None  # A state is not valid for changed data (run.accept_changed_data).
        train.restore(state)
        return StartingPoint(
            restored.step,
            restored.state,
            tuple(data.get("skipped", ())),
            data.get("hooks", {}),
            source,
        )


_log = logging.getLogger(__name__)
