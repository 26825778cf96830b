"""The hook that reports loss spikes, or requests a roll-back."""

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_history import losses_before
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.progress import metric_text
from praxis_lite.trainer.spike_detector import LossSpike, SpikeDetector


class LossSpikes(Hook):
    """Marks loss spikes in metrics.jsonl and prints them, or sets `loop.spike` to roll back."""

    every, waits = None, False

    def __init__(self, job: JobOnMesh, factor: float):
        self._job, self._factor = job, factor
        self._median: float | None = None

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop
        # The `MetricsFiles` hook runs earlier and has removed the lines for steps to be recomputed.
        self._spikes = SpikeDetector(self._factor, losses_before(self._job.files))

    def add_metrics(self, metrics: StepMetrics) -> dict[str, int]:
        self._median = self._spikes.median_below(metrics.line["loss"])
        return {
            "is_loss_spike": int(self._median is not None),
            "num_skipped_batches": len(self._loop.skipped_batches),
        }

    def after_metrics(self, metrics: StepMetrics) -> None:
        median, loss = self._median, metrics.line["loss"]
        if median is None:
            return
        self._loop.note(
            f"step {metrics.step}: loss spike: {metric_text(loss)} is {loss / median:.1f} times "
            f"{metric_text(median)}, the median of previous losses (run.loss_spikes.factor is "
            f"{self._factor})"
        )
        if self._job.run.loss_spikes.action == "roll_back":
            self._loop.spike = LossSpike(metrics.step, metrics.batch_index)
