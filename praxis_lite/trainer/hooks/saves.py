"""The hook that saves checkpoints, including JSON data such as the position in the dataset."""

import json
import time

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job.events import SAVE, events
from praxis_lite.job.processes.watchdog import SAVING
from praxis_lite.trainer.evaluation import watched_values
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook, by_name
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_on_mesh import JobOnMesh

__all__ = ("data_to_save",)


class Saves(Hook):
    """Saves checkpoints every N steps or seconds and at the end, and retries failed saves.

    This hook runs after all hooks whose values it saves, so that the values belong to the same
    step.
    """

    def __init__(self, job: JobOnMesh):
        self._job, self.every = job, job.run.checkpoints.every_steps

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop
        if loop.results is not None and self._job.run.checkpoints.best is not None:
            # The interrupted evaluation of this step has been repeated. Save the step again,
            # because the results determine whether the checkpoint is among the best.
            loop.stop.step_ended()
            self.save(loop.first_step, state, is_last=True)
        loop.saved_at = time.monotonic()

    def is_due(self, step: int, is_last: bool) -> bool:
        return (
            super().is_due(step, is_last)
            or self._loop.consensus.save_is_due
            or self._loop.checkpoints.retry_is_due()
        )

    def after_step(self, dispatched: DispatchedStep) -> None:
        self.save(dispatched.step, dispatched.state, is_last=dispatched.is_last)

    def save(self, step: int, state: TrainState, *, is_last: bool) -> None:
        """Starts to save the state, the data position and the values from other hooks."""
        loop = self._loop
        data = data_to_save(step, loop)
        loop.saved_at = time.monotonic()
        loop.consensus.saved()
        with loop.watchdog.during(SAVING), events.phase(SAVE, step):
            loop.checkpoints.save(
                step,
                state,
                self._job.partitioner.layout,
                data,
                watched_values(loop.results or {}),
                is_last=is_last,
            )

    def after_training(self, step: int) -> None:
        loop = self._loop
        with loop.watchdog.during(SAVING), events.phase(SAVE):
            loop.checkpoints.wait()


def data_to_save(step: int, loop: LoopState) -> dict[str, object]:
    """Returns the JSON data to save with a state: data position, seed and values from hooks."""
    position = DataPosition.of_step(step, loop.skipped_batches)
    data = {**position.as_json(loop.job.datasets[TRAIN]), "run_seed": loop.job.run.seed}
    if hooks := _hook_values(loop):
        data["hooks"] = hooks
    return data


def _hook_values(loop: LoopState) -> dict[str, object]:
    """Returns the values that hooks save, keyed by hook name.

    Raises:
      ConfigError: A value is not JSON serializable.
    """
    values = {}
    for name, hook in by_name(loop.hooks).items():
        value = hook.to_save()
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(hook).__name__}.to_save returns {value!r:.200}, which is not JSON "
                f"serializable ({error}). Return numbers, strings, and lists and dicts of these."
            ) from None
        if value is not None:
            values[name] = value
    return values
