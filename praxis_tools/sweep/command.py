"""Implements `praxis sweep`: checks a sweep, runs or prints its trials, and prints a report."""

import contextlib
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from praxis_lite.config.build import build
from praxis_lite.config.experiment_overrides import value_after
from praxis_lite.config.overrides import check_required
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, printable
from praxis_lite.experiment import registry
from praxis_lite.experiment.launched_config import config_of_experiment
from praxis_lite.host.object_stores import AnyPath, StorePath, is_store_url
from praxis_lite.host.text_table import table_lines, unique_ends
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job.job_lock import JobLock
from praxis_lite.job.local_directory import local_directory
from praxis_lite.modes.mode import CommandLine
from praxis_tools.sweep.claims import Claims
from praxis_tools.sweep.running import (
    check_parallel,
    is_refused_by_plan,
    record_result,
    run_trials,
)
from praxis_tools.sweep.space import Space, describe, space_of
from praxis_tools.sweep.stored_sweep import StoredClaims
from praxis_tools.sweep.study import OpenTrial, Study
from praxis_tools.sweep.sweep_settings import NUM_TRIALS, SweepSettings, metric_of
from praxis_tools.sweep.trial_job import TrialJob


def sweep(
    command: CommandLine,
    directory: str,
    *,
    parallel: int,
    prints: bool,
    is_worker: bool = False,
    num_trials: int | None,
    metric: str | None,
    topology: str | None = None,
    **chosen: Any,
) -> int | None:
    """Runs the trials of a sweep, or prints their commands; returns 1 if no trial is complete.

    Args:
      command: The parsed command line.
      directory: The value of --job_log_dir. Without --exp, the sweep in this directory is only
        reported.
      parallel: Maximum number of trials that run at the same time.
      prints: Whether to print the commands of the trials instead of running them.
      is_worker: Whether other processes run trials of the same sweep at the same time.
      num_trials: Number of trials, or None for the default.
      metric: The value of --metric, or None for the default.
      topology: Topology as in `praxis plan`. Trials that do not fit on its devices are not started.
      **chosen: The fields search, better, pruner and seed of `SweepSettings`.

    Raises:
      ConfigError: A setting, a value to try or the directory is invalid, or a trial cannot be run.
    """
    path: AnyPath
    if is_store_url(directory):
        path = StorePath.opened(directory, writes=True)
    else:
        path = local_directory(directory)
    journal = path / "sweep.journal"
    _check_directory(path, journal, is_new=command.exp is not None)
    if command.exp is None:
        return _report(Study(journal), path)
    # The output of --print is read by a scheduler and must not contain other lines.
    note = _print_error if prints else _log.info
    settings = _settings(command, num_trials, metric, note, **chosen)
    if prints and settings.search == "tpe":
        raise ConfigError(
            "--print cannot be combined with --search=tpe, which chooses each trial based on the "
            "results of previous trials. Use --search=grid or --search=random."
        )
    if prints and is_worker:
        raise ConfigError(
            "--print cannot be combined with --worker, which runs trials. Remove one of them."
        )
    if not prints:
        check_parallel(parallel)
    path.mkdir(parents=True, exist_ok=True)

    def job_of(trial: OpenTrial) -> TrialJob:
        trial_settings = settings.space.settings(dict(trial.values))
        return TrialJob(path, trial.number, settings, trial_settings)

    with _claims(path, note, is_worker=is_worker) as claims:
        with claims.exclusive():
            study = Study(journal, settings)
            # If a sweep or a worker was killed, trials may have ended without a recorded result.
            for trial in study.unfinished():
                if claims.claim(trial.number):
                    if (job := job_of(trial)).is_complete():
                        record_result(trial, job, status=0)
                    claims.release(trial.number)
        if prints:
            if _print_commands(study, job_of, topology):
                return None
        else:
            _announce(settings, path, parallel)
            if reason := run_trials(study, claims, job_of, parallel, topology, _log.info):
                _log.info(
                    "stopped by %s; run the same command to resume the sweep: %s", reason, path
                )
                return None
            if num_running := sum(record.status == "runs" for record in study.records()):
                _log.info("other workers are running the last %d trials: %s", num_running, path)
                return None
        return _report(study, path)


@contextlib.contextmanager
def _claims(
    path: AnyPath, note: Callable[[str], None], *, is_worker: bool
) -> Iterator[Claims | StoredClaims]:
    """Context manager with which the processes of a sweep divide the trials among themselves.

    In an object store, several processes may run a sweep also without `is_worker`.
    """
    if isinstance(path, StorePath):
        with StoredClaims(path) as stored_claims:
            yield stored_claims
        return
    with JobLock(path, note, is_shared=is_worker), Claims(path, is_shared=is_worker) as claims:
        yield claims


def _check_directory(path: AnyPath, journal: AnyPath, *, is_new: bool) -> None:
    if (path / "config.json").is_file():
        raise ConfigError(
            f"--job_log_dir={path} is a job directory, but a sweep requires a separate directory, "
            "with a job for each trial. Choose a different directory."
        )
    if journal.is_file():
        return
    files = [file.name for file in path.iterdir() if file.name[0] != "."] if path.exists() else []
    if not is_new or files:
        raise ConfigError(
            f"--job_log_dir={path} contains no sweep (sweep.journal)"
            + (f", but {', '.join(sorted(files)[:3])}" if files else "")
            + ". To start a sweep, specify the experiment, praxis sweep EXP, and a new directory."
        )


def _settings(
    command: CommandLine,
    num_trials: int | None,
    metric: str | None,
    note: Callable[[str], None],
    *,
    search: str,
    **chosen: Any,
) -> SweepSettings:
    """Checks every searched value in the experiment's config, and returns the sweep's settings."""
    assert command.exp is not None
    packages = registry.allowed_packages(command.packages)
    experiment = registry.get_experiment(command.exp, command.packages)
    space = space_of(
        command.settings,
        lambda settings, path: value_after(experiment, settings, path, packages),
    )
    if search == "grid":
        if num_trials is not None:
            raise ConfigError(
                "--trials cannot be combined with --search=grid, which runs all combinations of "
                "the values. Remove --trials."
            )
        combinations = list(space.combinations())
        num_trials = len(combinations)
        to_check: Iterable[list[str]] = map(space.settings, combinations)
    else:
        num_trials, to_check = num_trials or NUM_TRIALS, space.to_check()
    first: Any = None  # Config of the first trial.
    for settings in to_check:
        config = _check_trial(command, command.exp, settings, space)
        first = first or config
    run = build(first.run)
    metric = metric_of(metric, [name for name in first.datasets if name != TRAIN])
    if "/" in metric:
        if run.evaluation.by_follower:
            raise ConfigError(
                f"run.evaluation.by_follower=True cannot be combined with --metric={metric}, "
                "because no follower evaluates the trials. Set run.evaluation.by_follower=False."
            )
        if chosen["pruner"] != "none" and run.evaluation.every_steps is None:
            note(
                "note: no trial will be pruned, because the only evaluation is at the last step; "
                "set run.evaluation.every_steps"
            )
    return SweepSettings(
        experiment=callable_name(experiment),
        packages=sorted(command.packages),
        space=space,
        search=search,
        num_trials=num_trials,
        metric=metric,
        num_steps=run.num_train_steps,
        **chosen,
    )


def _check_trial(command: CommandLine, exp: str, settings: list[str], space: Space) -> Any:
    """Returns a trial's config; raises ConfigError with the trial's values if it is invalid."""
    try:
        config = config_of_experiment(exp, settings, command.packages).config
        check_required(config)
        build(config)
    except ConfigError as error:
        values = " ".join(settings[len(space.fixed) :])
        raise ConfigError(f"The trial with {values}: {error}") from error
    return config


def _print_commands(
    study: Study, job_of: Callable[[OpenTrial], TrialJob], topology: str | None
) -> bool:
    """Prints the commands of all trials without a result; returns False if there are none."""
    trials = study.unfinished()
    while (trial := study.next()) is not None:
        trials.append(trial)
    trials = [x for x in trials if not is_refused_by_plan(x, job_of(x), topology, _print_error)]
    for trial in trials:
        job = job_of(trial)
        if job.is_training():
            _print_error(f"trial {trial.number} is already running: {job.files.location}")
        else:
            print(shlex.join(job.command()))
    return bool(trials)


def _announce(settings: SweepSettings, path: AnyPath, parallel: int) -> None:
    better = "lower" if settings.better == "min" else "higher"
    pruning = "" if settings.pruner == "none" else f"; bad trials end early ({settings.pruner})"
    _log.info(
        f"sweep of {settings.experiment} in {path}: {settings.num_trials} trials "
        f"({settings.search}), {parallel} at a time, ranked by {settings.metric} ({better} is "
        f"better){pruning}"
    )
    for setting, distribution in settings.space.searched.items():
        _log.info(f"  {describe(setting, distribution)}")


def _report(study: Study, path: AnyPath) -> int | None:
    """Prints and plots the trials; returns 1 if no trial is complete."""
    print(_table(study, path))
    if study.best() is None:
        return 1
    try:
        study.draw(path / "sweep.png")
        print(f"plot: {path / 'sweep.png'}")
    except ConfigError as error:
        _log.info("note: %s", error)
    return None


def _table(study: Study, directory: AnyPath) -> str:
    """Formats a table of the trials and the --set options of the best trial, marked with '*'.

    Below the table, the reasons why trials failed or were refused are listed.
    """
    sweep, records, best = study.settings, study.records(), study.best()
    paths = list(sweep.space.searched)
    names = map(".".join, unique_ends([path.split(".") for path in paths]))
    rows = [["", "trial", *names, sweep.metric, "step", "status"]]
    for record in records:
        value = "" if record.value is None else f"{record.value:.6g}"
        rows.append(
            [
                "*" if record == best else "",
                str(record.number),
                *(_shorten(record.values.get(path, "")) for path in paths),
                value,
                "" if record.step is None else str(record.step),
                record.status,
            ]
        )
    lines = table_lines(rows, right={1, len(paths) + 2, len(paths) + 3})
    lines += [f"trial {x.number} {x.status}: {x.reason}" for x in records if x.reason]
    if best is None:
        lines.append("no trial is complete")
    else:
        settings = shlex.join(sweep.space.settings(best.values))
        lines += [
            f"best trial: {best.number}, {sweep.metric} {best.value:.6g}: "
            f"{directory / 'trials' / f'{best.number:04d}'}",
            f"    praxis train {sweep.experiment} --set {settings}",
        ]
    return printable("\n".join(lines))


def _shorten(text: str) -> str:
    """Rounds a fraction to four digits; returns any other text unchanged."""
    if text.isdecimal():
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    short = f"{number:.4g}"
    return short if len(short) < len(text) else text


def _print_error(line: str) -> None:
    print(line, file=sys.stderr)


_log = logging.getLogger(__name__)
