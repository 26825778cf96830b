"""A job that trains, once it is built, checked and on its mesh.

`train` initializes or restores the state, makes the steps (`trainer.train`), saves and finishes.
"""

import contextlib
import dataclasses
import sys

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.save_checks import check_names
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.job.events import COMPILE, RESTORE, SAVE, events
from praxis_lite.job.job_lock import JobLock
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.trainer import trainer
from praxis_lite.trainer.checks.datasets import step_for
from praxis_lite.trainer.checks.job_checks import (
    check_batches_left,
    check_first_batches,
    notes_on_batch_size,
)
from praxis_lite.trainer.checks.resume import notes_on_resume
from praxis_lite.trainer.compilation import compile_together
from praxis_lite.trainer.hooks.hook import check_hooks
from praxis_lite.trainer.hooks.skipped_steps_report import num_skipped_in_a_row
from praxis_lite.trainer.hooks.standard import hooks_of
from praxis_lite.trainer.hooks.tracking import trackers_of
from praxis_lite.trainer.job_files import ConfigFiles, draw_loss_curve, write_layout
from praxis_lite.trainer.job_history import (
    metrics_by_step,
    nothing_to_do,
    unsound_end,
    when_checkpoints_come,
    why_stopped_early,
)
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.job_tools import JobTools, OtherSaves, SavedState
from praxis_lite.trainer.metrics.progress import ProgressLine
from praxis_lite.trainer.spike_detector import LossSpike, RollBacks
from praxis_lite.trainer.starting_point import StartingPoint, States
from praxis_lite.trainer.trainer import Trained

__all__ = ("train",)


def train(
    job: JobOnMesh, launched: LaunchedConfig, tools: JobTools | None = None, *,
    stop_request: type[StopRequest] = StopRequest,
) -> Trained:
    """Trains a job from nothing, from an initial state, or from where it stopped.

    Args:
      launched: the config of the job, which its directory gets.
      tools: that others add to it; None: none.
      stop_request: hears who asks the job to end.

    Returns:
      How training ended; likewise if there was nothing left to train.

    Raises:
      ConfigError: the job's checkpoint is of another model, or of other data; a hook, a tracker or
        the initial state does not fit.
    """
    run, files, tools = job.run, job.files, tools or JobTools()
    check_hooks(job.hooks, job)
    for tracker in filter(None, run.trackers.values()):
        tracker.check()
    check_names(job.partitioner.layout)
    states, config = States(job, tools.sources), ConfigFiles(launched, files)
    with contextlib.ExitStack() as held:
        stop = held.enter_context(
            stop_request(run.stopping.time_limit_seconds, num_processes=processes.count())
        )
        is_shared = processes.membership() is not None
        held.enter_context(JobLock(files.path, _say, is_shared=is_shared))
        config.write_if_new()
        held.enter_context(events.told(held.enter_context(tools.recorder(files, _say))))
        checkpoints = held.enter_context(Checkpoints(
            files.checkpoints, saving=run.checkpoints, note=_say, config_json=config.json,
            evaluated=lambda: metrics_by_step(files), saved=stop.saved,
        ))
        held.callback(events.begins, SAVE)  # On the way out the save in flight is waited for.
        other_saves = held.enter_context(tools.other_saves(job, _say))
        with events.phase(RESTORE):
            saved = other_saves.newest(checkpoints)
            newest_step = saved.latest_step()
        stop.training_begins(newest_step)
        start = states.new() if newest_step is None else _resumed(states, saved, config)
        events.report(from_step=start.step, source=start.source)
        config.write()
        write_layout(job.partitioner, files)
        reason = nothing_to_do(
            run, job.eval_sets, files, start.step, is_resumed=start.is_resumed
        )
        if reason:
            trained = _finished_before(job, start, reason)
        else:
            trained = _trained(
                job, launched, tools, states, start, checkpoints, other_saves, stop
            )
    if not reason:
        print(_last_line(job, trained), flush=True)
    unsound = unsound_end(files, trained.step, trained.num_skipped, job.eval_sets)
    return dataclasses.replace(trained, unsound=unsound)


def _resumed(states: States, saved: SavedState, config: ConfigFiles) -> StartingPoint:
    start = states.resumed(saved)
    for line in config.changes():
        print(f"changed since the job was last run: {line}")
    return start


def _finished_before(job: JobOnMesh, start: StartingPoint, reason: str) -> Trained:
    """Returns the end of a job with nothing left to train, and reports why that is so."""
    print(reason)
    events.report(nothing_to_do=reason)
    if not job.files.loss_curve_png.exists():
        draw_loss_curve(job.files, start.step, print)
    ended_early = why_stopped_early(job.run, job.files, start.step)
    return Trained(start.step, num_skipped_in_a_row(start.state), ended_early=ended_early)


def _trained(
    job: JobOnMesh, launched: LaunchedConfig, tools: JobTools, states: States,
    start: StartingPoint, checkpoints: Checkpoints, other_saves: OtherSaves, stop: StopRequest,
) -> Trained:
    """Makes the job's steps, draws the loss curve and ends the trackers."""
    run, train_set = job.run, job.datasets[TRAIN]
    check_first_batches(job.datasets)
    for line in (*notes_on_batch_size(train_set), *notes_on_resume(job.datasets)):
        print(line)
    with trackers_of(job, launched, start.step, _say) as trackers:
        print(when_checkpoints_come(run, start.step))
        print("compiling the first step", flush=True)
        with events.phase(COMPILE):
            compile_together(
                (step_for(job.partitioner, "datasets", name), pipeline, f"datasets.{name}")
                for name, pipeline in job.datasets.items()
            )
        roll_backs = RollBacks()
        while True:
            check_batches_left(train_set, run, start.skipped_batches)
            progress = ProgressLine(
                run.num_train_steps, sys.stdout, run.log_every_steps, start.step
            )
            hooks = hooks_of(job, progress, tools.hooks, trackers, other_saves.hooks(job))
            ended = trainer.train(job, start, checkpoints, stop, hooks, progress.note)
            if isinstance(ended, Trained):
                break
            roll_backs.add(ended)
            skipped = tuple(sorted({*start.skipped_batches, ended.batch}))
            start = states.rolled_back(checkpoints, ended, skipped)
            _say(_roll_back_line(ended, start))
        events.report(ended_by=ended.stopped_by)
        if processes.membership() is None or not ended.stopped_by:
            draw_loss_curve(job.files, ended.step, progress.note)  # Others wait for no picture.
        trackers.ends(start.step, ended.step, stopped=ended.stopped_by is not None)
    return ended


def _roll_back_line(spike: LossSpike, start: StartingPoint) -> str:
    return (
        f"rolled back from the loss spike of step {spike.step} to step {start.step}; its batch "
        f"{spike.batch} is left out ({len(start.skipped_batches)} left out so far)"
    )


def _last_line(job: JobOnMesh, trained: Trained) -> str:
    if trained.stopped_by:
        return (
            f"stopped by {trained.stopped_by}: step {trained.step} is saved, and the same command "
            f"goes on from there: {job.files.path}"
        )
    return f"trained to step {trained.step}: {job.files.path}"


def _say(line: str) -> None:
    print(line, flush=True)
