"""A job's history by its files: evaluations, losses, skipped steps."""

import math
from collections.abc import Collection

from praxis_lite.config.build import build
from praxis_lite.config.config_json import load_config_file
from praxis_lite.core.errors import is_number
from praxis_lite.experiment.early_stopping import EarlyStopping
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.broadcast import from_first
from praxis_lite.trainer.metrics.json_lines import evaluation_lines, newest_lines
from praxis_lite.trainer.spike_detector import losses_of_newest

__all__ = ("evaluates", "evaluations", "is_complete")


def lacks_evaluation(
    run: RunConfig, eval_sets: Collection[str], job: JobDir, step: int
) -> bool:
    """Returns True if a job that resumes from a step has yet to evaluate it.

    The state before the first step, which hosts may hold in memory, is never evaluated.
    """
    if not step or not evaluates(run, step):
        return False
    return from_first(
        "lacks evaluation",
        lambda: bool(eval_sets) and not any(
            line["step"] == step and str(line.get("dataset")) in eval_sets
            for line in newest_lines(job.eval_metrics_jsonl)
        ),
    )


def nothing_to_do(
    run: RunConfig, eval_sets: Collection[str], files: JobDir, first_step: int, *, is_resumed: bool
) -> str:
    """Returns why a job makes no more steps and what to change, or "" if it makes some.

    Args:
      is_resumed: True if `first_step` is the job's own, and not of an initial state.
    """
    if is_resumed and lacks_evaluation(run, eval_sets, files, first_step):
        return ""
    if first_step >= run.num_train_steps:
        return (
            f"The job has already made its {run.num_train_steps} steps; to go on, raise "
            "run.num_train_steps."
        )
    if reason := why_stopped_early(run, files, first_step):
        return (
            f"The job stopped early at step {first_step}: {reason}. To go on, raise "
            "run.stopping.early.patience, or set run.stopping.early=None."
        )
    return ""


def why_stopped_early(run: RunConfig, files: JobDir, step: int) -> str | None:
    """Returns why early stopping ends the job after a step, by its evaluations, or None."""
    early, total = run.stopping.early, run.num_train_steps
    if early is None or step >= total:
        return None
    return early.reason_to_stop(watched_history(early, files, step))


def watched_history(
    early_stopping: EarlyStopping | None, job: JobDir, last_step: int
) -> dict[int, float]:
    """Returns the metric that may stop training, by step, of the evaluations to `last_step`."""
    if early_stopping is None:
        return {}
    values = {
        step: metrics[early_stopping.metric] for step, metrics in metrics_by_step(job).items()
        if step <= last_step and early_stopping.metric in metrics
    }
    return dict(from_first("watched history", lambda: list(values.items())))


def evaluations(job: JobDir) -> list[tuple[int, str, dict[str, float]]]:
    """Returns the evaluations of a job: step, dataset and metrics of each, the first that was made.

    Training's own comes first; --mode=eval adds others.
    """
    first: dict[tuple[int, str], dict[str, float]] = {}
    for line in evaluation_lines(job.eval_metrics_jsonl):
        metrics = {name: value for name, value in line.items() if name not in ("step", "dataset")}
        first.setdefault((line["step"], line["dataset"]), metrics)
    return [(step, dataset, metrics) for (step, dataset), metrics in first.items()]


def metrics_by_step(job: JobDir) -> dict[int, dict[str, float]]:
    """Returns the metrics of all evaluations of a job by step, by the names of settings."""
    metrics: dict[int, dict[str, float]] = {}
    for step, dataset, values in evaluations(job):
        named = {f"{dataset}/{name}": value for name, value in values.items()}
        metrics.setdefault(step, {}).update(named)
    return metrics


def is_complete(job: JobDir, step: int, packages: Collection[str] = ()) -> bool:
    """Returns True if a job, as it was last launched, makes no step after this.

    Args:
      packages: of the user, that its config may name.
    """
    run = build(load_config_file(job.config_json, packages=packages).config.run)
    return step >= run.num_train_steps or why_stopped_early(run, job, step) is not None


def losses_before(run: RunConfig, job: JobDir) -> list[float]:
    """Returns the losses on disk that the next loss is compared with, to find a spike."""
    if run.loss_spikes.factor is None:
        return []
    return from_first("losses before", lambda: losses_of_newest(newest_lines(job.metrics_jsonl)))


def evaluates(run: RunConfig, step: int) -> bool:
    """Returns True if a run evaluates after this step."""
    every = run.evaluation.every_steps
    if run.evaluation.by_follower:
        return False
    return step == run.num_train_steps or (every is not None and step % every == 0)


def when_checkpoints_come(run: RunConfig, first_step: int) -> str:
    """Returns a line on when a run that begins at `first_step` saves checkpoints."""
    steps, seconds = run.checkpoints.every_steps, run.checkpoints.seconds_between
    due = []
    if steps is not None:
        first = min((first_step // steps + 1) * steps, run.num_train_steps)
        due.append(f"at step {first}, and every {steps} steps")
    if seconds is not None:
        due.append(f"after {seconds:,} s, and every {seconds:,} s (run.checkpoints.every_seconds)")
    if due:
        return f"checkpoints: the first {'; or '.join(due)}; and at the end"
    return (
        f"checkpoints: one, at the end (step {run.num_train_steps}): if this process is killed "
        "before, all its steps are lost (run.checkpoints.every_seconds, "
        "run.checkpoints.every_steps)"
    )


def unsound_end(
    job: JobDir, step: int, num_skipped: int, eval_sets: Collection[str]
) -> str | None:
    """Returns why a job's last step is not sound, and what to do; None if it is.

    It was skipped, or its evaluation is not finite. Called once all of the run is on disk.

    Args:
      num_skipped: number of steps in a row, up to the last, that were skipped.
      eval_sets: the datasets of the evaluations, of which the newest counts.
    """
    where = (
        f"look at {job.non_finite_txt}, which names the layer or the data"
        if job.non_finite_txt.exists()
        else "run with --set run.debug_nans=true, which names the layer or the data"
    )
    advice = (
        f"Look at loss, grad_norm and learning_rate in metrics.jsonl, and {where}; lower the "
        "learning rate, clip the gradient, fix the data, or take bfloat16 in place of float16. To "
        "go on from here, raise run.num_train_steps."
    )
    if num_skipped:
        which = (
            f"The last step, {step}, was skipped"
            if num_skipped == 1
            else f"The last {num_skipped} steps, to step {step}, were skipped"
        )
        return (
            f"{which}: not kept, for the loss, gradient or learning rate was not finite, or the "
            f"gradient too large. The weights in {job.path} are those of step "
            f"{step - num_skipped}. {advice}"
        )
    losses = from_first("last losses", lambda: _losses_at(job, step, eval_sets))
    for dataset, loss in losses.items():
        if not math.isfinite(loss):
            return (
                f"The evaluation of step {step} has {dataset}/loss {loss}, so its weights, which "
                f"are kept in {job.path}, or the data are not sound. {advice}"
            )
    return None


def _losses_at(job: JobDir, step: int, eval_sets: Collection[str]) -> dict[str, float]:
    losses: dict[str, float] = {}
    for line in newest_lines(job.eval_metrics_jsonl):
        dataset, loss = str(line.get("dataset")), line.get("loss")
        if line["step"] == step and dataset in eval_sets and is_number(loss):
            losses.setdefault(dataset, loss)
            if len(losses) == len(eval_sets):
                break
    return losses
