"""A job that trains, once it is built, checked and on its mesh."""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.files.whole_files import write_whole
from praxis_lite.inputs.base import TRAIN
from praxis_lite.run.checkpoints.checkpoints import Checkpoints
from praxis_lite.run.checkpoints.init.frozen_base import check_frozen_base
from praxis_lite.run.checkpoints.init.init_from_checkpoint import FromCheckpoints
from praxis_lite.run.checkpoints.init.initial_state import InitialState, Source, begun
from praxis_lite.run.checkpoints.peers.newest_state import NewestState
from praxis_lite.run.checkpoints.peers.peer_saver import PeerSaver, stores_of
from praxis_lite.run.checkpoints.save_checks import check_names
from praxis_lite.run.checkpoints.steps import step_dirs
from praxis_lite.run.config.text import (
    config_difference,
    config_lines,
    dump_config,
    load_config_file,
)
from praxis_lite.run.experiment.launched_config import LaunchedConfig
from praxis_lite.run.experiment.recorded_job import keep_tokenizers
from praxis_lite.run.goodput.kinds import COMPILE, INIT, RESTORE, SAVE
from praxis_lite.run.goodput.phase_clock import PhaseClock
from praxis_lite.run.goodput.stretches import THE_END
from praxis_lite.run.goodput.timeline import Timeline
from praxis_lite.run.job import processes
from praxis_lite.run.job.elastic import order
from praxis_lite.run.job.elastic.store_messages import StoreClient
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.job.job_lock import JobLock
from praxis_lite.run.job.processes.stopping import StopRequest
from praxis_lite.run.trainer import trainer
from praxis_lite.run.trainer.checks.job_checks import (
    check_batches_left,
    check_first_batches,
    notes_on_batch_size,
)
from praxis_lite.run.trainer.checks.memory import compile_init
from praxis_lite.run.trainer.checks.resume import check_resumable, check_same_seed, notes_on_resume
from praxis_lite.run.trainer.checks.step_of_data import step_for
from praxis_lite.run.trainer.hooks.hook import check_hooks
from praxis_lite.run.trainer.hooks.skipped_steps import num_skipped_in_a_row
from praxis_lite.run.trainer.hooks.standard import MoreHooks, hooks_of
from praxis_lite.run.trainer.hooks.tracking import trackers_of
from praxis_lite.run.trainer.job_history import (
    check_last_step,
    draw_loss_curve,
    has_loss_curve,
    metrics_by_step,
    nothing_to_do,
    say_goodput,
    when_checkpoints_come,
    why_stopped_early,
)
from praxis_lite.run.trainer.job_on_mesh import JobOnMesh, compile_together
from praxis_lite.run.trainer.layout_table import (
    layout_json,
    layout_table,
    layout_warnings,
    optimizer_report,
    padding_notes,
)
from praxis_lite.run.trainer.loss_spikes import LossSpike, RollBacks
from praxis_lite.run.trainer.metrics.progress import ProgressLine
from praxis_lite.run.trainer.trainer import StartingPoint, Trained


def train(
    job: JobOnMesh, launched: LaunchedConfig, sources: Mapping[str, Source] | None = None,
    more_hooks: MoreHooks = lambda job: (), *, clock: PhaseClock | None = None,
    stop_request: type[StopRequest] = StopRequest,
) -> Trained:
    """Trains a job from nothing, from an initial state, or from where it stopped.

    Args:
      sources: of initial states besides checkpoints, by the setting of `run` that names them.
      more_hooks: returns hooks that come before those of every job.
      clock: of the launch; None: it begins now.
      stop_request: hears who asks the job to end.

    Returns how training ended, as it does if there was nothing left to train.

    Raises ConfigError if the job's checkpoint is of another model, or of other data; and
    LastStepUnsound if the job is trained and saved, but its last step was skipped.
    """
    run, files, clock = job.run, job.files, clock or PhaseClock(kind=INIT)
    check_hooks(job.hooks, job)
    for tracker in filter(None, run.trackers.values()):
        tracker.check()
    check_names(job.partitioner.layout)
    sources = {"init_from_checkpoint_rules": FromCheckpoints, **(sources or {})}
    if not step_dirs.committed_steps(files.checkpoints):
        initial = _initial_state(job, sources)
        check_frozen_base(
            job.partitioner.learner.groups, initial.paths if initial else (),
            may_be_new=run.frozen_may_be_new,
        )
        del initial  # It may hold files open.
    config_json = dump_config(
        launched.config, launched.experiment, launched.settings, packages=launched.packages
    )
    texts = config_json, config_lines(launched.config)
    with contextlib.ExitStack() as held:
        stop = held.enter_context(
            stop_request(run.stopping.time_limit_seconds, num_processes=processes.count())
        )
        held.enter_context(JobLock(files.path, _say, is_shared=order.current() is not None))
        if not files.config_json.is_file():
            # Before other files: a launch that is stopped from here on leaves a job to go on with.
            files.write_config(*texts)
        timeline = held.enter_context(Timeline(files.timeline_jsonl, clock, _say))
        saved = held.enter_context(
            Checkpoints(
                files.checkpoints, saving=run.checkpoints, note=_say, config_json=config_json,
                evaluated=lambda: metrics_by_step(files), saved=stop.saved,
            )
        )
        held.callback(clock.begins, SAVE)  # On the way out the save in flight is waited for.
        stores = _peer_stores(job, held)
        with clock.during(RESTORE):
            newest = NewestState(saved, stores, _say)
        stop.training_begins(newest.step)
        if newest.step is None:
            start = _new_start(job, sources, clock)
        else:
            data = newest.data()
            accepted = check_resumable(data, job.datasets[TRAIN], run.accept_changed_data)
            for line in [*accepted, *check_same_seed(data, run)]:
                print(line)
            start = _resumed(job, newest, clock)
            before = load_config_file(files.config_json, packages=launched.packages).config
            for line in config_difference(before, launched.config):
                print(f"changed since the job was last run: {line}")
        order.report(from_step=start.step, source=newest.source)
        files.write_config(*texts)
        if processes.is_first():
            keep_tokenizers(launched.config, files)
        _print_layout(job.partitioner, files)
        if reason := nothing_to_do(
            run, job.eval_sets, files, start.step, is_resumed=start.is_resumed
        ):
            print(reason)
            timeline.take_back()
            if not has_loss_curve(files):
                draw_loss_curve(files, start.step, print)
            reason = why_stopped_early(run, files, start.step)
            trained = Trained(start.step, num_skipped_in_a_row(start.state), None, reason)
            check_last_step(files, trained.step, trained.num_skipped, job.eval_sets)
            return trained
        check_first_batches(job.datasets)
        for line in (*notes_on_batch_size(job.datasets[TRAIN]), *notes_on_resume(job.datasets)):
            print(line)
        trackers = held.enter_context(trackers_of(job, launched, start.step, _say))
        print(when_checkpoints_come(run, start.step))
        print("compiling the first step", flush=True)
        with clock.during(COMPILE):
            compile_together(
                (step_for(job.partitioner, "datasets", name), pipeline, f"datasets.{name}")
                for name, pipeline in job.datasets.items()
            )
        peer_saver = _peer_saver(job, stores, held)
        roll_backs, skipped = RollBacks(), start.skipped_batches
        while True:
            check_batches_left(job.datasets[TRAIN], run, skipped)
            try:
                progress = ProgressLine(
                    run.num_train_steps, sys.stdout, run.log_every_steps, start.step
                )
                hooks = hooks_of(job, progress, more_hooks, trackers, peer_saver)
                trained = trainer.train(job, start, saved, stop, hooks, progress.note, timeline)
                break
            except LossSpike as found:
                # Its frames hold the state, and another one is to be restored.
                spike = found.with_traceback(None)
            roll_backs.add(spike)
            del start
            skipped = tuple(sorted({*skipped, spike.batch}))
            if peer_saver is not None:
                peer_saver.abandon_after(spike.step - 1)
            start = _rolled_back(job, saved, spike, skipped, sources, clock)
            print(
                f"rolled back from the loss spike of step {spike.step} to step {start.step}; its "
                f"batch {spike.batch} is left out ({len(skipped)} left out so far)", flush=True
            )
        timeline.ended_by = trained.stopped_by or THE_END
        if order.current() is None or not trained.stopped_by:
            draw_loss_curve(files, trained.step, progress.note)  # Others wait for no picture.
        trackers.ends(start.step, trained.step, stopped=trained.stopped_by is not None)
    say_goodput(files, print)
    if trained.stopped_by:
        print(
            f"stopped by {trained.stopped_by}: step {trained.step} is saved, and the same command "
            f"goes on from there: {files.path}"
        )
    else:
        print(f"trained to step {trained.step}: {files.path}")
    check_last_step(files, trained.step, trained.num_skipped, job.eval_sets)
    return trained


def _initial_state(job: JobOnMesh, sources: Mapping[str, Source]) -> InitialState | None:
    """Returns the initial state that a setting of `run` names, or None: all of it is drawn."""
    if (setting := job.run.init_from) is None:
        return None
    name, value = setting
    return sources[name](value, job.partitioner.layout)


def _new_start(
    job: JobOnMesh, sources: Mapping[str, Source], clock: PhaseClock
) -> StartingPoint:
    """Returns the start of a job: a drawn state, or that of a source."""
    partitioner = job.partitioner
    key, source = partitioner.key(job.run.seed), _initial_state(job, sources)
    if source is None:
        _say("initialising the state")
        with clock.during(COMPILE):
            compile_init(partitioner, key)
        return StartingPoint(0, partitioner.init(key))
    source.keep(job.files)
    return StartingPoint(source.step, begun(partitioner, key, source, _say))


def _peer_stores(job: JobOnMesh, held: contextlib.ExitStack) -> list[StoreClient]:
    """Returns the peer stores of an elastic job with peer saves; else none."""
    if job.run.peer_save_every_steps is None:
        return []
    if order.current() is None:
        print("note: run.peer_save_every_steps has no effect without --elastic")
        return []
    return [held.enter_context(store) for store in stores_of(order.current())]


def _peer_saver(
    job: JobOnMesh, stores: Sequence[StoreClient], held: contextlib.ExitStack
) -> PeerSaver | None:
    """Returns the saver into the peer stores, if there are any."""
    if not stores:
        return None
    partitioner = job.partitioner
    saver = PeerSaver(order.current(), stores, partitioner.layout, partitioner.mesh, _say)
    return held.enter_context(saver)


def _resumed(
    job: JobOnMesh, saved: Checkpoints | NewestState, clock: PhaseClock
) -> StartingPoint:
    """Returns the start of a job from its newest state."""
    with clock.during(RESTORE):
        restored = saved.restore(job.partitioner.layout, job.partitioner.mesh)
    name = "peer save" if restored.from_memory else "checkpoint"
    print(f"restored the {name} of step {restored.step}", flush=True)
    data = restored.data
    return StartingPoint(
        restored.step, restored.state, tuple(data.get("skipped", ())), data.get("hooks", {}),
        is_resumed=True,
    )


def _rolled_back(
    job: JobOnMesh, saved: Checkpoints, spike: LossSpike, skipped: tuple[int, ...],
    sources: Mapping[str, Source], clock: PhaseClock,
) -> StartingPoint:
    """Returns the newest checkpoint, or a new start if there is none, with these batches left out.

    A spike ends its run before the checkpoint of its step is begun. One of that step, or of a later
    one, is set aside.
    """
    with clock.during(RESTORE):
        saved.abandon_after(spike.step - 1)
        is_new = saved.latest_step() is None
    start = _new_start(job, sources, clock) if is_new else _resumed(job, saved, clock)
    return dataclasses.replace(start, skipped_batches=skipped)


def _say(line: str) -> None:
    print(line, flush=True)


def _print_layout(partitioner: Partitioner, files: JobDir) -> None:
    layout, table = partitioner.layout, layout_table(partitioner.layout)
    write_whole(files.layout_json, layout_json(layout).encode())
    write_whole(files.layout_txt, "\n".join([table, *layout.notes, ""]).encode())
    for line in optimizer_report(partitioner.learner.groups):
        print(line)
    print(f"{table.splitlines()[-1]} See layout.txt.", flush=True)
    for note in (*layout.notes, *padding_notes(layout)):
        print(f"note: {note}")
    for warning in layout_warnings(layout):
        print(f"WARNING: {warning}")
