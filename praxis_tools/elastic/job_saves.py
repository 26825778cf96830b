"""Connects peer saves to the trainer: schedules saves and chooses the state to resume from."""

import contextlib

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.initial_state import Note
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job.events import SAVE, events
from praxis_lite.job.processes.watchdog import SAVING
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.hooks.saves import data_to_save
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.job_tools import OtherSaves, SavedState
from praxis_tools.elastic.peer_saves.newest_state import NewestState
from praxis_tools.elastic.peer_saves.peer_saver import PeerSaver, stores_of
from praxis_tools.elastic.worker_assignment import Assignment


class PeerSaves(OtherSaves):
    """Context manager that saves a job's states in host memory.

    Args:
      job: The job.
      assignment: Assignment of this worker.
      note: Function that prints a line.
    """

    def __init__(self, job: JobOnMesh, assignment: Assignment, note: Note):
        self._job, self._assignment, self._note = job, assignment, note
        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> "PeerSaves":
        self._stores = [
            self._exit_stack.enter_context(store) for store in stores_of(self._assignment)
        ]
        partitioner = self._job.partitioner
        self._saver = self._exit_stack.enter_context(
            PeerSaver(
                self._assignment,
                self._stores,
                partitioner.layout,
                partitioner.mesh,
                self._note,
                # The metrics of a step are stored before the step.
                before_put=self._job.files.upload,
            )
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        # These are the three arguments that every `__exit__` takes.
        self._exit_stack.__exit__(*exc_info)  # type: ignore[arg-type]

    def newest(self, checkpoints: Checkpoints) -> SavedState:
        return NewestState(checkpoints, self._stores, self._note)

    def hooks(self, job: JobOnMesh) -> list[Hook]:
        # Peer saves are faster than saves on disk, so a peer save usually completes before a job
        # stops.
        return [PeerSaveHook(job, self._saver)]


class PeerSaveHook(Hook):
    """Saves the state in host memory at the start, every `every` steps, and when the job stops.

    The save at the start replaces the save from the previous generation. After a host has died,
    some parts of the previous save have only one copy left, so the death of another host could make
    that save incomplete. The last step of training is only saved on disk.
    """

    def __init__(self, job: JobOnMesh, saver: PeerSaver):
        every = job.run.peer_save_every_steps
        assert every is not None
        self._job, self._saver = job, saver
        self._every = self.every = every

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop
        if self._saver.step > loop.first_step:  # Training was rolled back after a loss spike.
            self._saver.abandon_after(loop.first_step)
        if not self._is_end(loop.first_step):
            self._save(loop.first_step, state)

    def is_due(self, step: int, is_last: bool) -> bool:
        return not self._is_end(step) and (step % self._every == 0 or self._loop.stops)

    def after_step(self, dispatched: DispatchedStep) -> None:
        self._save(dispatched.step, dispatched.state)

    def after_training(self, step: int) -> None:
        loop = self._loop
        with loop.watchdog.during(SAVING), events.phase(SAVE):
            self._saver.wait()

    def _is_end(self, step: int) -> bool:
        return step >= self._job.run.num_train_steps or self._loop.reason is not None

    def _save(self, step: int, state: TrainState) -> None:
        loop = self._loop
        with loop.watchdog.during(SAVING), events.phase(SAVE, step):
            self._saver.begin(step, state, data_to_save(step, loop))
