"""Looks for a NaN's origin after each step of a job (run.debug_nans)."""

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.run.trainer.hooks.hook import Hook, StepMade
from praxis_lite.run.trainer.hooks.loop import Loop
from praxis_lite.run.trainer.job_on_mesh import JobOnMesh
from praxis_lite.tools.non_finite.reports import NonFiniteReports


class NonFinite(Hook):
    """Runs a step whose loss or gradient is not finite again, and names the layer."""

    waits = False  # It waits for each step, which is then the step's time.

    def __init__(self, job: JobOnMesh):
        self._job = job

    def before_training(self, loop: Loop, state: TrainState) -> None:
        self._watchdog = loop.watchdog
        self._reports = NonFiniteReports(
            self._job.partitioner, self._job.files.non_finite_txt, loop.note
        )

    def after_step(self, made: StepMade) -> None:
        with self._watchdog.during(f"looking for a NaN in step {made.step}"):
            self._reports.look(made.step, made.state, made.batch, made.key, made.outputs)
