"""The hook that sends histograms of weights and gradients to the trackers."""

import jax

from praxis_lite.inputs.base import TRAIN
from praxis_lite.trackers.tracker import Histogram
from praxis_lite.trainer.compilation import compile_step
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.hooks.tracking import Trackers
from praxis_lite.trainer.job_on_mesh import JobOnMesh


class Histograms(Hook):
    """Computes histograms in a separate program, so that the training step is unchanged.

    The gradients are recomputed for the weights after the step, on the step's batch.
    """

    def __init__(self, job: JobOnMesh, trackers: Trackers):
        self._job, self._trackers, self.every = job, trackers, job.run.histograms_every_steps

    def before_training(self, loop: LoopState, state: object) -> None:
        self._loop = loop

    def is_due(self, step: int, is_last: bool) -> bool:
        return self.every is not None and step % self.every == 0

    def after_step(self, dispatched: DispatchedStep) -> None:
        with self._loop.watchdog.during(f"computing histograms of step {dispatched.step}"):
            step = self._job.partitioner.histogram_step
            compile_step(step, self._job.datasets[TRAIN], f"datasets.{TRAIN}")
            histograms = jax.device_get(step(dispatched.state, dispatched.batch, dispatched.key))
        self._trackers.log_histograms(
            dispatched.step,
            {
                name: Histogram(
                    edges=x["edges"],
                    counts=x["counts"],
                    mean=float(x["mean"]),
                    std=float(x["std"]),
                    num_not_finite=float(x["num_not_finite"]),
                )
                for name, x in histograms.items()
            },
        )
