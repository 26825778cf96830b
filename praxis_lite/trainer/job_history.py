"""Reads a job's history from its files: evaluations, losses and skipped steps."""

import math
from collections.abc import Collection

from praxis_lite.config.build import build
from praxis_lite.config.config_json import load_config_file
from praxis_lite.core.errors import is_number
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.experiment.run_settings import EarlyStopping
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.broadcast import from_first
from praxis_lite.trainer.metrics.json_lines import evaluation_lines, newest_lines
from praxis_lite.trainer.spike_detector import recent_losses

__all__ = ("evaluates", "evaluations", "is_complete")


def lacks_evaluation(run: RunConfig, eval_sets: Collection[str], job: JobDir, step: int) -> bool:
    """Returns whether a job that resumes from `step` was stopped before it evaluated that step.

    Step 0, from which an elastic job may resume, is never evaluated.
    """
    if not step or not evaluates(run, step):
        return False
    return from_first(
        "lacks evaluation",
        lambda: (
            bool(eval_sets)
            and not any(
                line["step"] == step and str(line.get("dataset")) in eval_sets
                for line in newest_lines(job.eval_metrics_jsonl)
            )
        ),
    )


def nothing_to_do(
    run: RunConfig, eval_sets: Collection[str], files: JobDir, first_step: int, *, is_resumed: bool
) -> str:
    """Returns a message if this launch has no steps left to run, else "".

    The message contains the reason and what to change to continue training.

    Args:
      run: Settings of the run.
      eval_sets: Names of the evaluation datasets.
      files: The job directory.
      first_step: Number of completed steps.
      is_resumed: Whether an earlier launch of the job saved the state of `first_step`.
    """
    if is_resumed and lacks_evaluation(run, eval_sets, files, first_step):
        return ""
    if first_step >= run.num_train_steps:
        return (
            f"The job has already completed its {run.num_train_steps} steps; to continue, raise "
            "run.num_train_steps."
        )
    if reason := why_stopped_early(run, files, first_step):
        return (
            f"The job stopped early at step {first_step}: {reason}. To continue, raise "
            "run.stopping.early.patience, or set run.stopping.early=None."
        )
    return ""


def why_stopped_early(run: RunConfig, files: JobDir, step: int) -> str | None:
    """Returns why early stopping ended the job at `step`, or None if it did not."""
    early, total = run.stopping.early, run.num_train_steps
    if early is None or step >= total:
        return None
    return early.reason_to_stop(watched_history(early, files, step))


def watched_history(early_stopping: EarlyStopping, job: JobDir, last_step: int) -> dict[int, float]:
    """Returns the values of the early-stopping metric, keyed by step, up to `last_step`."""
    values = {
        step: metrics[early_stopping.metric]
        for step, metrics in metrics_by_step(job).items()
        if step <= last_step and early_stopping.metric in metrics
    }
    return dict(from_first("watched history", lambda: list(values.items())))


def evaluations(job: JobDir) -> list[tuple[int, str, dict[str, float]]]:
    """Returns (step, dataset, metrics) for each evaluation of a job.

    If a step was evaluated several times, the first evaluation is returned. The training job's
    evaluation precedes any evaluations by `praxis eval`.
    """
    first: dict[tuple[int, str], dict[str, float]] = {}
    for line in evaluation_lines(job.eval_metrics_jsonl):
        metrics = {name: value for name, value in line.items() if name not in ("step", "dataset")}
        first.setdefault((line["step"], line["dataset"]), metrics)
    return [(step, dataset, metrics) for (step, dataset), metrics in first.items()]


def metrics_by_step(job: JobDir) -> dict[int, dict[str, float]]:
    """Returns the metrics of evaluations, keyed by step, then by names such as "heldout/loss"."""
    metrics: dict[int, dict[str, float]] = {}
    for step, dataset, values in evaluations(job):
        named = {f"{dataset}/{name}": value for name, value in values.items()}
        metrics.setdefault(step, {}).update(named)
    return metrics


def is_complete(job: JobDir, step: int, packages: Collection[str] = ()) -> bool:
    """Returns whether `step` is a job's last step according to the config of the newest launch.

    Args:
      job: The job directory.
      step: A training step.
      packages: User packages to which the config may refer.
    """
    run = build(load_config_file(job.config_json, packages=packages).config.run)
    return step >= run.num_train_steps or why_stopped_early(run, job, step) is not None


def losses_before(job: JobDir) -> list[float]:
    """Returns the recent losses for spike detection."""
    return from_first("losses before", lambda: recent_losses(newest_lines(job.metrics_jsonl)))


def evaluates(run: RunConfig, step: int) -> bool:
    """Returns whether the training job runs an evaluation after `step`."""
    every = run.evaluation.every_steps
    if run.evaluation.by_follower:
        return False
    return step == run.num_train_steps or (every is not None and step % every == 0)


def checkpoint_schedule(run: RunConfig, first_step: int) -> str:
    """Returns a line that describes when a run that starts at `first_step` saves checkpoints."""
    steps, seconds = run.checkpoints.every_steps, run.checkpoints.seconds_between
    times = []
    if steps is not None:
        first = min((first_step // steps + 1) * steps, run.num_train_steps)
        times.append(f"at step {first}, and every {steps} steps")
    if seconds is not None:
        times.append(
            f"after {seconds:,} s, and every {seconds:,} s (run.checkpoints.every_seconds)"
        )
    if times:
        return f"checkpoints: the first {'; or '.join(times)}; and at the end"
    return (
        f"checkpoints: only at the end (step {run.num_train_steps}); if the process is killed "
        "before that, all its steps are lost. To save more often, set "
        "run.checkpoints.every_seconds or run.checkpoints.every_steps"
    )


def unsound_end(job: JobDir, step: int, num_skipped: int, eval_sets: Collection[str]) -> str | None:
    """Returns why a job's final weights should not be used and what to do, or None.

    Weights should not be used if the last steps were skipped, or if the loss of the last evaluation
    is not finite. Call this after all of the run's files have been written.

    Args:
      job: The job directory.
      step: The last step.
      num_skipped: Number of consecutive skipped steps up to `step`.
      eval_sets: Names of the evaluation datasets.
    """
    debug_nans = (
        f"look at {job.shown(job.non_finite_txt)}, which identifies the layer or the data"
        if job.non_finite_txt.exists()
        else "run with --set run.debug_nans=true, which identifies the layer or the data"
    )
    advice = (
        f"Look at loss, grad_norm and learning_rate in metrics.jsonl, and {debug_nans}; lower the "
        "learning rate, clip the gradient, fix the data, or use bfloat16 instead of float16. To "
        "continue from here, raise run.num_train_steps."
    )
    if num_skipped:
        return (
            f"{why_skipped(step, num_skipped)} The weights in {job.location} are those of step "
            f"{step - num_skipped}. {advice}"
        )
    losses = from_first("last losses", lambda: _losses_at(job, step, eval_sets))
    for dataset, loss in losses.items():
        if not math.isfinite(loss):
            return (
                f"{dataset}/loss is {loss} in the evaluation of step {step}: the weights saved in "
                f"{job.location} or the evaluation data are not usable. {advice}"
            )
    return None


def why_skipped(step: int, num_skipped: int) -> str:
    """Returns a sentence that explains why the last `num_skipped` steps were skipped."""
    skipped = (
        f"The last step, {step}, was skipped"
        if num_skipped == 1
        else f"The last {num_skipped} steps, up to step {step}, were skipped"
    )
    return (
        f"{skipped}, because the loss, gradient or learning rate was not finite or the gradient "
        "was too large."
    )


def _losses_at(job: JobDir, step: int, eval_sets: Collection[str]) -> dict[str, float]:
    """Returns each dataset's newest evaluation loss at `step`."""
    losses: dict[str, float] = {}
    for line in newest_lines(job.eval_metrics_jsonl):
        dataset, loss = str(line.get("dataset")), line.get("loss")
        is_match = line["step"] == step and dataset in eval_sets
        if is_match and loss is not None and is_number(loss):
            losses.setdefault(dataset, loss)
            if len(losses) == len(eval_sets):
                break
    return losses
