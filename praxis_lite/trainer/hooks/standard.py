"""Assembles a job's hooks, in the order in which they are called."""

from collections.abc import Callable, Sequence

from praxis_lite.trainer.hooks.evaluations import EarlyStops, Evaluations, FollowedEvaluations
from praxis_lite.trainer.hooks.examples import Examples
from praxis_lite.trainer.hooks.histograms import Histograms
from praxis_lite.trainer.hooks.hook import Hook
from praxis_lite.trainer.hooks.loss_spike_hook import LossSpikes
from praxis_lite.trainer.hooks.metrics_jsonl import MetricsFiles, Progress
from praxis_lite.trainer.hooks.profiles import ProfileBegins, ProfileEnds, Profiler
from praxis_lite.trainer.hooks.samples import Samples
from praxis_lite.trainer.hooks.saves import Saves
from praxis_lite.trainer.hooks.skipped_steps_report import SkippedSteps
from praxis_lite.trainer.hooks.tracking import Trackers, Tracking
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.progress import ProgressLine


def all_hooks(
    job: JobOnMesh,
    progress: ProgressLine,
    more: Callable[[JobOnMesh], Sequence[Hook]],
    trackers: Trackers,
    other_saves: Sequence[Hook],
) -> list[Hook]:
    """Returns all hooks of a job: standard hooks, hooks from tools, and the experiment's hooks."""
    profiler, run = Profiler(job), job.run
    factor, stopping = run.loss_spikes.factor, run.stopping.early
    return [
        # These two hooks are first and last, so that a profile contains other hooks' work only from
        # the profiled steps.
        ProfileEnds(profiler),
        *more(job),
        # Before hooks that report a step or raise errors, so that the step's metrics are already on
        # disk.
        MetricsFiles(job),
        Examples(job),
        Tracking(trackers),
        *([] if run.histograms_every_steps is None else [Histograms(job, trackers)]),
        Progress(job, progress),
        *([] if factor is None else [LossSpikes(job, factor)]),
        SkippedSteps(job),
        *([] if stopping is None else [EarlyStops(job, stopping)]),
        Evaluations(job),
        *([FollowedEvaluations(job, trackers)] if run.evaluation.by_follower else []),
        *([] if run.samples.every_steps is None else [Samples(job, trackers)]),
        *job.hooks,
        # Before the hook that saves checkpoints, because these saves are faster: if the job is
        # killed while a checkpoint is being saved, these saves are already complete.
        *other_saves,
        Saves(job),
        ProfileBegins(job, profiler),
    ]
