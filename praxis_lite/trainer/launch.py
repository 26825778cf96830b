"""Launches the training of a job that has been built, checked and placed on its mesh.

`launch_training` locks the job directory, initializes or restores the state, runs the training loop
(`run_training_loop`) and reports how it ended.
"""

import contextlib
import dataclasses
import logging

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.save_checks import check_names
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.job.events import COMPILE, RESTORE, SAVE, events
from praxis_lite.job.processes.logs import PhaseTimes, open_job_log, warn_once_per_job
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.trainer.checks.datasets import step_for
from praxis_lite.trainer.checks.job_checks import (
    check_batches_left,
    check_first_batches,
    notes_on_batch_size,
)
from praxis_lite.trainer.checks.resume import notes_on_resume
from praxis_lite.trainer.compilation import compile_together
from praxis_lite.trainer.hooks.hook import check_hooks
from praxis_lite.trainer.hooks.samples import sample_prompts
from praxis_lite.trainer.hooks.skipped_steps_report import num_skipped_in_a_row
from praxis_lite.trainer.hooks.standard import all_hooks
from praxis_lite.trainer.hooks.tracking import open_trackers
from praxis_lite.trainer.job_files import ConfigFiles, draw_loss_curve, write_layout
from praxis_lite.trainer.job_history import (
    checkpoint_schedule,
    metrics_by_step,
    nothing_to_do,
    unsound_end,
    why_stopped_early,
)
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.job_tools import JobTools, OtherSaves
from praxis_lite.trainer.metrics.progress import ProgressLine, live_line
from praxis_lite.trainer.spike_detector import RollBacks
from praxis_lite.trainer.starting_point import StartingPoint, StartingPoints
from praxis_lite.trainer.training_loop import TrainingResult, run_training_loop

__all__ = ("launch_training",)


def launch_training(
    job: JobOnMesh,
    launched: LaunchedConfig,
    tools: JobTools | None = None,
    *,
    stop_request: type[StopRequest] = StopRequest,
    shows_progress: bool = True,
) -> TrainingResult:
    """Trains a new job, or resumes it from its newest saved state.

    Args:
      job: The job, checked and placed on its mesh.
      launched: The config of this launch; it is written to the job's directory.
      tools: Hooks, listeners and state sources from other packages, or None.
      stop_request: Class that handles signals and the time limit while the job trains.
      shows_progress: Whether to show the progress as a live line on a terminal or in a notebook.

    Returns:
      How training ended, even if all steps were completed before this launch.

    Raises:
      ConfigError: A hook, a tracker or the initial state is incompatible with the job, or the job's
        checkpoint was saved with a different model or different training data.
    """
    run, files, tools = job.run, job.files, tools or JobTools()
    check_hooks(job.hooks, job)
    for tracker in filter(None, run.trackers.values()):
        tracker.check()
    check_names(job.partitioner.layout)
    if run.samples.every_steps is not None:
        sample_prompts(job)
    starting_points, config = StartingPoints(job, tools.sources), ConfigFiles(launched, files)
    # The contexts are exited in reverse order, so the directory stays locked and signals are
    # handled until the last save is complete.
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(
            stop_request(run.stopping.time_limit_seconds, num_processes=processes.count())
        )
        is_elastic = processes.membership() is not None
        stack.enter_context(files.locked(warn_once_per_job, is_shared=is_elastic))
        stack.enter_context(files.uploading())
        config.write_if_new()
        open_job_log(files.log_txt(processes.index()))
        if _log.isEnabledFor(logging.DEBUG):
            stack.enter_context(events.listening(PhaseTimes()))
        stack.enter_context(events.listening(stack.enter_context(tools.recorder(files, _log.info))))
        checkpoints = stack.enter_context(
            Checkpoints(
                files.checkpoints,
                saving=run.checkpoints,
                note=warn_once_per_job,
                config_json=config.json,
                evaluated=lambda: metrics_by_step(files),
                saved=stop.saved,
                before_commit=files.upload,  # The metrics of a step are stored before the step.
            )
        )
        # This runs just before `checkpoints` waits for a save in progress, so that goodput counts
        # the wait as time spent saving.
        stack.callback(events.begins, SAVE)
        other_saves = stack.enter_context(tools.other_saves(job, _log.info))
        # The newest state may be in the memory of the job's hosts instead of a checkpoint.
        with events.phase(RESTORE):
            saved = other_saves.newest(checkpoints)
            newest_step = saved.latest_step()
        stop.training_begins(newest_step)
        if newest_step is None:
            start = starting_points.new()
        else:
            start = starting_points.resumed(saved)
            for line in config.changes():
                _log.info("changed since the job was last run: %s", line)
        events.report(from_step=start.step, source=start.source)
        config.write()
        write_layout(job.partitioner, files)
        reason = nothing_to_do(run, job.eval_sets, files, start.step, is_resumed=start.is_resumed)
        if reason:
            result = _report_nothing_to_do(job, start, reason)
        else:
            result = _train_with_roll_backs(
                job,
                launched,
                tools,
                starting_points,
                start,
                checkpoints,
                other_saves,
                stop,
                shows_progress=shows_progress,
            )
    if result.stopped_by:
        _log.info(
            "stopped by %s: step %d is saved, and the same command resumes from it: %s",
            result.stopped_by,
            result.step,
            files.location,
        )
    elif not reason:
        _log.info("trained to step %d: %s", result.step, files.location)
    unsound = unsound_end(files, result.step, result.num_skipped, job.eval_sets)
    return dataclasses.replace(result, unsound=unsound)


def _report_nothing_to_do(job: JobOnMesh, start: StartingPoint, reason: str) -> TrainingResult:
    """Logs and reports why the job runs no steps, and returns how its training ended."""
    _log.info(reason)
    events.report(nothing_to_do=reason)
    if not job.files.loss_curve_png.exists():
        draw_loss_curve(job.files, start.step)
    ended_early = why_stopped_early(job.run, job.files, start.step)
    assert start.state is not None, "No step has taken the state."
    num_skipped = num_skipped_in_a_row(start.state)
    return TrainingResult(start.step, num_skipped, ended_early=ended_early)


def _train_with_roll_backs(
    job: JobOnMesh,
    launched: LaunchedConfig,
    tools: JobTools,
    starting_points: StartingPoints,
    start: StartingPoint,
    checkpoints: Checkpoints,
    other_saves: OtherSaves,
    stop: StopRequest,
    *,
    shows_progress: bool,
) -> TrainingResult:
    """Runs the training loop, repeats it after each roll-back, and then draws the loss curve."""
    run, train_set = job.run, job.datasets[TRAIN]
    check_first_batches(job.datasets)
    for line in notes_on_batch_size(train_set):
        warn_once_per_job(line)
    for line in notes_on_resume(job.datasets):
        _log.info(line)
    with open_trackers(job, launched, start.step) as trackers:
        _log.info(checkpoint_schedule(run, start.step))
        _log.info("compiling the first step")
        with events.phase(COMPILE):
            steps = [
                (step_for(job.partitioner, "datasets", name), pipeline, f"datasets.{name}")
                for name, pipeline in job.datasets.items()
            ]
            if run.histograms_every_steps is not None:
                steps.append((job.partitioner.histogram_step, train_set, f"datasets.{TRAIN}"))
            if run.samples.every_steps is not None:
                prompts = sample_prompts(job)
                steps.append((job.partitioner.decode_step, prompts, "run.samples.prompts"))
            compile_together(steps)
        roll_backs = RollBacks()
        # Each iteration trains until the end of training, or until a loss spike.
        while True:
            check_batches_left(train_set, run, start.skipped_batches)
            is_shown = shows_progress and _log.isEnabledFor(logging.INFO) and processes.is_first()
            live = live_line() if is_shown else None
            progress = ProgressLine(run.num_train_steps, live, run.log_every_steps, start.step)
            hooks = all_hooks(job, progress, tools.hooks, trackers, other_saves.hooks(job))
            ended = run_training_loop(job, start, checkpoints, stop, hooks)
            if isinstance(ended, TrainingResult):
                break
            roll_backs.add(ended)
            # From now on, also skip the batch of the loss spike.
            skipped = tuple(sorted({*start.skipped_batches, ended.batch_index}))
            start = starting_points.rolled_back(checkpoints, ended, skipped)
            warn_once_per_job(
                f"rolled back from the loss spike of step {ended.step} to step {start.step}; batch "
                f"{ended.batch_index} will be skipped (batches skipped so far: {len(skipped)})"
            )
        events.report(ended_by=ended.stopped_by)
        # If an elastic job was stopped, its supervisor is waiting, so skip the loss curve.
        if processes.membership() is None or not ended.stopped_by:
            draw_loss_curve(job.files, ended.step)
        trackers.finish(start.step, ended.step, stopped=ended.stopped_by is not None)
    return ended


_log = logging.getLogger(__name__)
