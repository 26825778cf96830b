"""Assembles the hooks of a job, in the order in which they are called."""

from collections.abc import Callable, Sequence

from praxis_lite.trainer.hooks.evaluations import EarlyStops, Evaluations
from praxis_lite.trainer.hooks.examples import Examples
from praxis_lite.trainer.hooks.followed import FollowedEvaluations
from praxis_lite.trainer.hooks.hook import Hook
from praxis_lite.trainer.hooks.loss_spike_hook import LossSpikes
from praxis_lite.trainer.hooks.metrics_jsonl import MetricsFiles, Progress
from praxis_lite.trainer.hooks.profiler import Profiler
from praxis_lite.trainer.hooks.profiles import ProfileBegins, ProfileEnds
from praxis_lite.trainer.hooks.saves import Saves
from praxis_lite.trainer.hooks.skipped_steps_report import SkippedSteps
from praxis_lite.trainer.hooks.tracking import Trackers, Tracking
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.progress import ProgressLine

# Returns the hooks that `JobTools` add to a job.
MoreHooks = Callable[[JobOnMesh], Sequence[Hook]]


def all_hooks(
    job: JobOnMesh, progress: ProgressLine, more: MoreHooks, trackers: Trackers,
    other_saves: Sequence[Hook],
) -> list[Hook]:
    """Returns all hooks of a job: the standard hooks, and those of tools and the experiment."""
    profiler = Profiler(job)
    return [
        # First and last, so that a profile contains no other hook's work outside its steps.
        ProfileEnds(job, profiler),
        *more(job),
        # Before hooks that report a step or raise: its metrics are then on disk.
        MetricsFiles(job), Examples(job), Tracking(trackers), Progress(job, progress),
        LossSpikes(job), SkippedSteps(job), EarlyStops(job),
        Evaluations(job), FollowedEvaluations(job, trackers),
        *job.hooks,
        # Before the checkpoint, because they are faster: a job that is killed while it saves the
        # checkpoint has at least these.
        *other_saves,
        Saves(job),
        ProfileBegins(job, profiler),
    ]
