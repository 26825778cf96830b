"""What train, eval and decode do with a job, once it is built, checked and on its mesh."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import fiddle as fdl

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.init_from_checkpoint import init_from_checkpoints
from praxis_lite.checkpoints.init.planning import plan_init
from praxis_lite.checkpoints.save_checks import check_names
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.config.text import config_difference, config_lines, dump_config, load_config_file
from praxis_lite.errors import ConfigError
from praxis_lite.experiment.experiment import Job
from praxis_lite.explain.layout_table import layout_table, layout_warnings
from praxis_lite.inputs import InputPipeline
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.job_lock import JobLock
from praxis_lite.job.processes.stopping import StopRequest
from praxis_lite.partitioner import Partitioner, TrainState
from praxis_lite.trainer import decoding, trainer
from praxis_lite.trainer.evaluation import Evaluator, evaluation_line
from praxis_lite.trainer.job_checks import (
    check_batches_left,
    check_first_batches,
    check_resumable,
    check_same_seed,
    nondeterministic_data,
)
from praxis_lite.trainer.job_history import check_last_step, lacks_evaluation, watched_history
from praxis_lite.trainer.loss_spikes import LossSpike, RollBacks
from praxis_lite.trainer.metrics import JsonLinesWriter, ProgressLine
from praxis_lite.trainer.metrics.records import write_records


def train(
    partitioner: Partitioner,
    job: Job,
    job_dir: JobDir,
    config: fdl.Config,
    experiment: str,
    settings: Sequence[str],
    packages: Sequence[str] = (),
) -> None:
    """Trains a job from nothing, from other checkpoints, or from where it stopped.

    Args:
      config: of the job; written to its directory, with the experiment's full name.
      settings: of the command line.
      packages: whose functions and classes the config may name, besides the library's.

    Raises:
      ConfigError: the job's checkpoint is of another model, or of other data.
      LastStepUnsound: it is trained and saved, but the last step was skipped.
    """
    run = job.run
    check_names(partitioner.layout)
    texts = dump_config(config, experiment, settings, packages=packages), config_lines(config)
    with contextlib.ExitStack() as held:
        stop = held.enter_context(
            StopRequest(run.time_limit_seconds, num_processes=processes.count())
        )
        held.enter_context(JobLock(job_dir.path, _say))
        if not job_dir.config_json.is_file():
            # Before other files: a launch that is stopped from here on leaves a job to go on with.
            job_dir.write_config(*texts)
        saved = held.enter_context(
            Checkpoints(
                job_dir.checkpoints, saving=SaveSettings.of(run), note=_say, config_json=texts[0]
            )
        )
        skipped: tuple[int, ...] = ()
        if saved.latest_step() is None:
            first_step, state = _new_state(partitioner, job, job_dir)
        else:
            data = saved.latest_data()
            accepted = check_resumable(data, job.datasets[TRAIN], run.accept_changed_data)
            for line in [*accepted, *check_same_seed(data, run)]:
                print(line)
            first_step, state, skipped = _resumed(partitioner, saved)
            _print_changes(job_dir, config, packages)
        job_dir.write_config(*texts)
        _print_layout(partitioner, job_dir)
        if reason := _nothing_to_do(job, job_dir, first_step, saved.latest_step()):
            print(reason)
            trainer.draw_loss_curve(job_dir, first_step, print)
            check_last_step(job_dir, first_step, trainer.num_skipped_in_a_row(state))
            return
        check_first_batches(job.datasets)
        for line in nondeterministic_data(job.datasets):
            print(line)
        stop.training_begins(saved.latest_step())
        print("compiling the first step", flush=True)
        _compile_together(partitioner, job.datasets, "eval")
        roll_backs = RollBacks()
        while True:
            check_batches_left(job.datasets[TRAIN], run, skipped)
            progress = ProgressLine(
                run.num_train_steps, sys.stdout, run.log_every_steps, first_step
            )
            try:
                trained = trainer.train(
                    partitioner, job.datasets, run, job_dir, saved, state, first_step, progress,
                    stop, skipped,
                )
                break
            except LossSpike as found:
                # Its frames hold the state, and another one is to be restored.
                spike = found.with_traceback(None)
            roll_backs.add(spike)
            del state
            skipped = tuple(sorted({*skipped, spike.batch}))
            first_step, state = _rolled_back(partitioner, job, job_dir, saved, spike)
            print(
                f"rolled back from the loss spike of step {spike.step} to step {first_step}; its "
                f"batch {spike.batch} is left out ({len(skipped)} left out so far)", flush=True
            )
    if trained.stopped_by:
        print(
            f"stopped by {trained.stopped_by}: step {trained.step} is saved, and the same command "
            f"goes on from there: {job_dir.path}"
        )
    else:
        print(f"trained to step {trained.step}: {job_dir.path}")
    check_last_step(job_dir, trained.step, trained.num_skipped)


def evaluate(partitioner: Partitioner, job: Job, job_dir: JobDir, step: int | str | None) -> None:
    """Evaluates a checkpoint on every dataset but `train`.

    Args:
      step: of the checkpoint, or "best"; None: the newest.
    """
    eval_sets = {name: one for name, one in job.datasets.items() if name != TRAIN}
    if not eval_sets:
        raise ConfigError(
            "The experiment has no dataset to evaluate on: 'train' is the only one. Add another to "
            'its datasets(), for instance: "heldout": fdl.Config(TextWindows, ..., shuffle=False).'
        )
    _compile_together(partitioner, eval_sets, "eval_examples")
    step, mdl_vars = restored_weights(partitioner, job_dir, step, job.run.eval_use_ema_states)
    with JsonLinesWriter(job_dir.eval_metrics_jsonl, sys.maxsize) as writer:
        evaluator = Evaluator(
            partitioner, eval_sets, job.run.max_eval_batches, writer, seed=job.run.seed
        )
        examples: dict[str, list[dict[str, Any]]] = {}
        for name, results in evaluator.run(step, mdl_vars, examples=examples).items():
            print(evaluation_line(step, name, results))
    for name, records in examples.items():
        path = job_dir.eval_jsonl(name, step)
        write_records(path, records, print)
        print(
            f"evaluated {len(records)} examples of {name} with the weights of step {step}: {path}"
        )


def decode(partitioner: Partitioner, job: Job, job_dir: JobDir, step: int | str | None) -> None:
    """Decodes every decode dataset with the weights of a checkpoint; `step` as `evaluate`."""
    if not job.decode_datasets:
        raise ConfigError(
            "The experiment has no decode datasets. Add the method decode_datasets(), for "
            'instance: return {"prompts": fdl.Config(TextPrompts, ...)}.'
        )
    _compile_together(partitioner, job.decode_datasets, "decode")
    step, mdl_vars = restored_weights(partitioner, job_dir, step, job.run.decode_use_ema_states)
    decoding.decode(
        partitioner, job.decode_datasets, mdl_vars, step, job.run.seed, job_dir, print
    )


def restored_weights(
    partitioner: Partitioner, job_dir: JobDir, step: int | str | None, use_ema: bool
) -> tuple[int, Any]:
    """Returns a checkpoint's step, and the weights to evaluate with; no slots are kept."""
    layout = partitioner.layout
    read = partitioner.task.learner.eval_opt_states(layout.shapes.opt_states, use_ema=use_ema)
    with Checkpoints(job_dir.checkpoints, note=_say) as saved:
        restored = saved.restore(layout, partitioner.mesh, step=step, opt_states_keys=tuple(read))
    averages = ", averaged over the steps before it" if read else ""
    print(f"restored the weights of step {restored.step}{averages}", flush=True)
    return restored.step, partitioner.eval_mdl_vars(restored.state, use_ema=use_ema)


def _new_state(partitioner: Partitioner, job: Job, job_dir: JobDir) -> tuple[int, TrainState]:
    """Returns the step and state that a job begins with: drawn, or from others' checkpoints."""
    key, rules = partitioner.key(job.run.seed), job.run.init_from_checkpoint_rules
    if not rules:
        print("initialising the state", flush=True)
        return 0, partitioner.init(key)  # Not waited for: the first step compiles meanwhile.
    plan = plan_init(partitioner.layout, rules)
    job_dir.init_from_checkpoint_txt.write_text("\n".join(plan.lines()) + "\n", encoding="utf-8")
    for line in plan.summary():
        print(line)
    print("initialising the state. See init_from_checkpoint.txt.", flush=True)
    state = init_from_checkpoints(partitioner, key, plan)
    return int(state.step), state


def _resumed(
    partitioner: Partitioner, saved: Checkpoints
) -> tuple[int, TrainState, tuple[int, ...]]:
    """Returns the step, the state and the batches left out so far, of the newest checkpoint."""
    restored = saved.restore(partitioner.layout, partitioner.mesh)
    print(f"restored the checkpoint of step {restored.step}", flush=True)
    return restored.step, restored.state, tuple(restored.data.get("skipped", ()))


def _rolled_back(
    partitioner: Partitioner, job: Job, job_dir: JobDir, saved: Checkpoints, spike: LossSpike
) -> tuple[int, TrainState]:
    """Returns the step and state of the newest checkpoint, or of the start where there is none.

    A spike ends its run before the checkpoint of its step is begun; should there be one of it or
    of a later step, it is set aside.
    """
    saved.abandon_after(spike.step - 1)
    if saved.latest_step() is None:
        return _new_state(partitioner, job, job_dir)
    first_step, state, _ = _resumed(partitioner, saved)
    return first_step, state


def _compile_together(
    partitioner: Partitioner, datasets: Mapping[str, InputPipeline], step: str
) -> None:
    """Lets several processes compile, each at its pace, before they meet in a step.

    Gloo, between processes on CPU, waits 30 s for the others in its first collective, and no more.
    """
    if processes.count() > 1:
        for name, pipeline in datasets.items():
            which = "train" if (name, step) == (TRAIN, "eval") else step
            partitioner.lower(which, pipeline.element_spec()).compile()  # The call finds it.
        processes.exchange("the steps are compiled", "", 3600)


def _say(line: str) -> None:
    print(line, flush=True)


def _print_layout(partitioner: Partitioner, job_dir: JobDir) -> None:
    layout, table = partitioner.layout, layout_table(partitioner.layout)
    job_dir.layout_txt.write_text("\n".join([table, *layout.notes, ""]), encoding="utf-8")
    for line in layout.groups.report():
        print(line)
    print(f"{table.splitlines()[-1]} See layout.txt.", flush=True)
    for note in layout.notes:
        print(f"note: {note}")
    for warning in layout_warnings(layout):
        print(f"WARNING: {warning}")


def _print_changes(job_dir: JobDir, config: fdl.Config, packages: Sequence[str]) -> None:
    before = load_config_file(job_dir.config_json, packages=packages).config
    for line in config_difference(before, config):
        print(f"changed since the job was last run: {line}")


def _nothing_to_do(
    job: Job, job_dir: JobDir, first_step: int, saved_step: int | None
) -> str | None:
    """Returns why a restored job makes no more steps, and what to change; None: it makes some."""
    run, eval_sets = job.run, set(job.datasets) - {TRAIN}
    if lacks_evaluation(run, eval_sets, job_dir, saved_step, first_step):
        return None
    if first_step >= run.num_train_steps:
        return (
            f"The job has already made its {run.num_train_steps} steps; to go on, raise "
            "run.num_train_steps."
        )
    values = watched_history(run.early_stopping, job_dir, first_step)
    reason = run.early_stopping and run.early_stopping.reason_to_stop(values)
    if reason:
        return (
            f"The job stopped early at step {first_step}: {reason}. To go on, raise "
            "run.early_stopping.patience, or set run.early_stopping=None."
        )
    return None
