"""The hooks of every job, in their order."""

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


def hooks_of(
    job: JobOnMesh, progress: ProgressLine, more: MoreHooks, trackers: Trackers,
    other_saves: Sequence[Hook],
) -> list[Hook]:
    """Returns the hooks of a job: those of every job, of tools, and of its experiment."""
    profiler = Profiler(job)
    return [
        # A profile has neither what is done after its last step, nor before its first.
        ProfileEnds(job, profiler),
        *more(job),
        # Files come first: a step is on disk before a later hook reports it or raises.
        MetricsFiles(job), Examples(job), Tracking(trackers), Progress(job, progress),
        LossSpikes(job), SkippedSteps(job), EarlyStops(job),
        Evaluations(job), FollowedEvaluations(job, trackers),
        *job.hooks,
        # Sooner done than the disk's: at a stop they are what is left if time runs out.
        *other_saves,
        Saves(job),
        ProfileBegins(job, profiler),
    ]
