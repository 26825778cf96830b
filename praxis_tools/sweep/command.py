"""Implements the sweep command: checks a sweep, runs or prints its trials, and reports them."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praxis_lite.config.build import build
from praxis_lite.config.class_attributes import value_after
from praxis_lite.config.overrides import check_required
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError, printable, require
from praxis_lite.experiment import registry
from praxis_lite.experiment.launched_config import config_of_experiment
from praxis_lite.host.text_table import table_lines, unique_ends
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.job_lock import JobLock
from praxis_lite.job.local_directory import local_directory
from praxis_lite.modes.mode import CommandLine
from praxis_tools.sweep.running import (
    check_parallel,
    is_refused_by_plan,
    record_result,
    run_trials,
)
from praxis_tools.sweep.space import Space, describe, space_of
from praxis_tools.sweep.study import OpenTrial, Study
from praxis_tools.sweep.sweep_settings import NUM_TRIALS, SweepSettings, metric_of
from praxis_tools.sweep.trial_job import TrialJob


def sweep(
    command: CommandLine, directory: str, *, parallel: int, prints: bool, num_trials: int | None,
    metric: str | None, topology: str | None = None, **chosen: Any,
) -> int | None:
    """Runs the trials of a sweep, or prints their commands; returns 1 if no trial is complete.

    Args:
      command: The parsed command line.
      directory: The value of --job_log_dir. Without --exp, the sweep in it is only reported.
      parallel: Number of trials that run at a time.
      prints: Whether to print the commands of the trials instead of running them.
      num_trials: Number of trials, or None for the default.
      metric: The value of --metric, or None for the default.
      topology: Devices, as for --mode=plan. Trials that do not fit on them are not started.
      chosen: The search, better, pruner and seed of `SweepSettings`.

    Raises:
      ConfigError: A setting, a value to try or the directory is wrong, or `run_trials` raises.
    """
    path = local_directory(directory)
    journal = path / "sweep.journal"
    _check_directory(path, journal, is_new=command.exp is not None)
    if command.exp is None:
        return _report(Study(journal), path)
    # The output of --print is for a scheduler and has no other lines.
    note = _print_error if prints else _print
    settings = _settings(command, num_trials, metric, note, **chosen)
    if prints:
        require(
            settings.search != "tpe", "--search with --print", settings.search, "grid or random",
            "TPE chooses a trial by the results of those before it.",
        )
    else:
        check_parallel(parallel)
    path.mkdir(parents=True, exist_ok=True)

    def job_of(trial: OpenTrial) -> TrialJob:
        trial_settings = settings.space.settings(dict(trial.values))
        return TrialJob(path, trial.number, settings, trial_settings)

    with JobLock(path, note):
        study = Study(journal, settings)
        for trial in study.unfinished():
            if (job := job_of(trial)).is_complete():
                record_result(trial, job, status=0)
        if prints:
            if _print_commands(study, job_of, topology):
                return None
        else:
            _announce(settings, path, parallel)
            if reason := run_trials(study, job_of, parallel, topology, _print):
                _print(f"stopped by {reason}: the same command goes on with the sweep: {path}")
                return None
        return _report(study, path)


def _check_directory(path: Path, journal: Path, *, is_new: bool) -> None:
    if JobDir(path).config_json.exists():
        raise ConfigError(
            f"--job_log_dir={path} is the directory of a job; expected one for a sweep, which "
            "contains a job per trial. Choose another directory."
        )
    if journal.is_file():
        return
    files = [file.name for file in path.iterdir() if file.name[0] != "."] if path.exists() else []
    if not is_new or files:
        raise ConfigError(
            f"--job_log_dir={path} contains no sweep (sweep.journal)"
            + (f", but {', '.join(sorted(files)[:3])}" if files else "")
            + ". To start a sweep, give a new directory and --exp=NAME."
        )


def _settings(
    command: CommandLine, num_trials: int | None, metric: str | None, note: Callable[[str], None],
    *, search: str, **chosen: Any,
) -> SweepSettings:
    """Returns the settings of a sweep after checking every value in the experiment's config."""
    packages = registry.allowed_packages(command.packages)
    experiment = registry.get_experiment(command.exp, command.packages)
    space = space_of(
        command.settings,
        lambda settings, path: value_after(experiment, settings, path, packages),
    )
    if search == "grid":
        require(
            num_trials is None, "--trials", num_trials, "no value",
            "--search=grid runs every combination of the values.",
        )
        combinations = list(space.combinations())
        num_trials, to_check = len(combinations), map(space.settings, combinations)
    else:
        num_trials, to_check = num_trials or NUM_TRIALS, space.to_check()
    config = first = None
    for settings in to_check:
        config = _check_trial(command, settings, space)
        first = first or config
    run = build(first.run)
    metric = metric_of(metric, [name for name in first.datasets if name != TRAIN])
    if "/" in metric:
        require(
            not run.evaluation.by_follower, "run.evaluation.by_follower", True,
            "False if --metric is of an evaluation", "No follower evaluates the trials.",
        )
        if chosen["pruner"] != "none" and run.evaluation.every_steps is None:
            note(
                "note: no trial will be pruned, because the only evaluation is at the last step; "
                "set run.evaluation.every_steps"
            )
    return SweepSettings(
        experiment=callable_name(experiment), packages=sorted(command.packages), space=space,
        search=search, num_trials=num_trials, metric=metric, num_steps=run.num_train_steps,
        **chosen,
    )


def _check_trial(command: CommandLine, settings: list[str], space: Space) -> Any:
    """Returns the config of a trial; raises ConfigError with the trial's values if it is wrong."""
    try:
        config = config_of_experiment(command.exp, settings, command.packages).config
        check_required(config)
        build(config)
    except ConfigError as error:
        values = " ".join(settings[len(space.fixed):])
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
            _print_error(f"trial {trial.number} is already running: {job.files.path}")
        else:
            print(shlex.join(job.command()))
    return bool(trials)


def _announce(settings: SweepSettings, path: Path, parallel: int) -> None:
    better = "lower" if settings.better == "min" else "higher"
    pruning = "" if settings.pruner == "none" else f"; bad trials end early ({settings.pruner})"
    _print(
        f"sweep of {settings.experiment} in {path}: {settings.num_trials} trials "
        f"({settings.search}), {parallel} at a time, ranked by {settings.metric} ({better} is "
        f"better){pruning}"
    )
    for setting, distribution in settings.space.searched.items():
        _print(f"  {describe(setting, distribution)}")


def _report(study: Study, path: Path) -> int | None:
    """Prints the trials and draws them; returns 1 if no trial is complete."""
    _print(_table(study, path))
    if study.best() is None:
        return 1
    try:
        study.draw(path / "sweep.png")
        _print(f"drawn: {path / 'sweep.png'}")
    except ConfigError as error:
        _print(f"note: {error}")
    return None


def _table(study: Study, directory: Path) -> str:
    """Returns a table of the trials, with '*' before the best, and the --set options of the best.

    The table also has the reasons of trials that failed or were refused.
    """
    sweep, records, best = study.settings, study.records(), study.best()
    paths = list(sweep.space.searched)
    names = map(".".join, unique_ends([path.split(".") for path in paths]))
    rows = [["", "trial", *names, sweep.metric, "step", "status"]]
    for record in records:
        value = "" if record.value is None else f"{record.value:.6g}"
        rows.append([
            "*" if record == best else "", str(record.number),
            *(_shorten(record.values.get(path, "")) for path in paths), value,
            "" if record.step is None else str(record.step), record.status,
        ])
    lines = table_lines(rows, right={1, len(paths) + 2, len(paths) + 3})
    lines += [f"trial {x.number} {x.status}: {x.reason}" for x in records if x.reason]
    if best is None:
        lines.append("no trial is complete")
    else:
        settings = shlex.join(sweep.space.settings(best.values))
        lines += [
            f"the best is trial {best.number}, {sweep.metric} {best.value:.6g}: "
            f"{directory / 'trials' / f'{best.number:04d}'}",
            f"    --exp={sweep.experiment} --set {settings}",
        ]
    return printable("\n".join(lines))


def _shorten(text: str) -> str:
    """Rounds the text of a fraction to four digits, and returns any other text unchanged."""
    if text.isdecimal():
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    short = f"{number:.4g}"
    return short if len(short) < len(text) else text


def _print(line: str) -> None:
    print(line, flush=True)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr)
