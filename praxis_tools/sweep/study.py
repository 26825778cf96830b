"""Manages the trials of a sweep, which Optuna chooses, prunes and records in a journal.

Trials that were running when a sweep was killed remain marked as running and are resumed later.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.atomic_files import DISK_FULL, not_written, write_picture
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.host.text_table import unique_ends
from praxis_tools.sweep.space import text_of
from praxis_tools.sweep.stored_sweep import StoredJournal
from praxis_tools.sweep.sweep_settings import SweepSettings

# Trials are never pruned in the first quarter of their steps, while the learning rate warms up.
_WARMUP_PART = 4


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """A trial as recorded in the journal.

    Attributes:
      number: Number of the trial, from 0.
      values: Maps each searched path to the trial's value, as a string.
      status: "waits", "runs", "complete", "pruned", "failed" or "refused".
      value: The metric at `step`, or None if it is not known yet.
      step: The step of `value`, or None.
      reason: The reason that the trial failed or was refused, or "".
    """

    number: int
    values: Mapping[str, str]
    status: str
    value: float | None
    step: int | None
    reason: str


class Study:
    """The trials of a sweep.

    Args:
      journal: Path of the journal. If `settings` are given, no other process may create the sweep
        at the same time.
      settings: Settings to start or resume the sweep, or None to only read the sweep.

    Raises:
      ConfigError: Optuna is missing, or the journal is damaged or belongs to a different sweep.
    """

    def __init__(self, journal: AnyPath, settings: SweepSettings | None = None):
        self._optuna = optuna = optional_module("optuna", "praxis sweep")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        backends = optional_module("optuna.storages.journal", "praxis sweep")
        # Without settings, the sweep is only read.
        if settings is not None and isinstance(journal, Path):
            _remove_incomplete_line(journal, backends.JournalFileSymlinkLock(str(journal)))
        try:
            storage = optuna.storages.JournalStorage(
                backends.JournalFileBackend(str(journal))
                if isinstance(journal, Path)
                else StoredJournal(journal)
            )
            if settings is None:
                self._study = optuna.load_study(storage=storage, study_name="sweep")
            else:
                self._study = optuna.create_study(
                    storage=storage,
                    study_name="sweep",
                    direction=f"{settings.better}imize",
                    load_if_exists=True,
                )
            recorded = self._study.user_attrs.get("settings")
            before = None if recorded is None else SweepSettings.from_json(recorded)
        except (ValueError, LookupError, TypeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise not_written(str(journal), error) from error
            raise ConfigError(
                f"{journal} is damaged, or was not written by a sweep of praxis_lite ({error}). "
                "Restore the file, or choose a different directory."
            ) from error
        if settings is not None and before is not None:
            settings.check_continues(before)
        chosen = settings or before
        if chosen is None:
            raise ConfigError(
                f"{journal} contains no settings, because the sweep was killed while starting. "
                "Start the sweep again with `praxis sweep EXP`."
            )
        self.settings: SweepSettings = chosen
        if settings is not None and recorded != settings.as_json():
            self._study.set_user_attr("settings", settings.as_json())
        self._study.pruner = self._pruner()
        # A grid is a queue of all combinations. Combinations that are in the journal are skipped.
        if settings is not None and settings.search == "grid":
            for values in settings.space.combinations():
                self._study.enqueue_trial(values, skip_if_exists=True)

    def records(self) -> list[TrialRecord]:
        """Returns all trials in the order of their numbers."""
        return [_record(trial) for trial in self._study.get_trials(deepcopy=False)]

    def best(self) -> TrialRecord | None:
        """Returns the first complete trial with the best value, or None if no trial is complete."""
        try:
            return _record(self._study.best_trial)
        except ValueError:
            return None

    def draw(self, path: AnyPath) -> None:
        """Writes a PNG plot of the complete trials' metric, with a panel for each searched setting.

        Raises:
          ConfigError: matplotlib is missing, or the file cannot be written.
        """
        pyplot = optional_module("matplotlib.pyplot", str(path))
        plots = optional_module("optuna.visualization.matplotlib", str(path))
        with warnings.catch_warnings(), pyplot.rc_context():
            warnings.simplefilter("ignore")  # Optuna's plots are experimental.
            plots.plot_slice(self._study, target_name=self.settings.metric)
            figure = pyplot.gcf()
            # Optuna sorts the settings. The last axes belong to the color bar.
            names = unique_ends([path.split(".") for path in sorted(self.settings.space.searched)])
            for axes, name in zip(figure.axes, names, strict=False):
                axes.set_xlabel(".".join(name))
                if axes.get_xscale() != "log":  # Do not parse dollar signs in labels as math.
                    for label in axes.get_xticklabels():
                        label.set_parse_math(False)
            try:
                write_picture(path, figure, dpi=110)
            finally:
                pyplot.close(figure)

    def next(self) -> "OpenTrial | None":
        """Returns the next trial to start, or None if all trials have started."""
        trials = self._study.get_trials(deepcopy=False)
        is_waiting = any(trial.state.name == "WAITING" for trial in trials)
        if not is_waiting and len(trials) >= self.settings.num_trials:
            return None
        with self._sampler_for(sum(trial.state.name != "WAITING" for trial in trials)):
            return self._open(self._study.ask())

    def unfinished(self) -> "list[OpenTrial]":
        """Returns the trials that have started and have no result."""
        opened = []
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state.name == "RUNNING":
                with self._sampler_for(trial.number):
                    resumed = self._optuna.trial.Trial(self._study, trial._trial_id)
                    opened.append(self._open(resumed))
        return opened

    def _open(self, trial: Any) -> "OpenTrial":
        # Study.ask suggests values in the same way. Resumed trials keep their recorded values.
        values = {
            path: text_of(trial._suggest(path, distribution))
            for path, distribution in self.settings.space.searched.items()
        }
        return OpenTrial(self._study, trial, values)

    @contextlib.contextmanager
    def _sampler_for(self, number: int) -> Iterator[None]:
        """Context manager that sets a sampler that depends only on the seed and trial number."""
        seed, samplers = self.settings.seed + 1_000_003 * number, self._optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns about experimental features.
            self._study.sampler = (
                samplers.TPESampler(seed=seed % 2**32)
                if self.settings.search == "tpe"
                else samplers.RandomSampler(seed=seed % 2**32)
            )
            yield

    def _pruner(self) -> Any:
        pruners, num_steps = self._optuna.pruners, self.settings.num_steps
        match self.settings.pruner:
            case "median":
                return pruners.MedianPruner(n_warmup_steps=num_steps // _WARMUP_PART)
            case "halving":
                first = max(1, num_steps // _WARMUP_PART)
                return pruners.SuccessiveHalvingPruner(min_resource=first)
        return pruners.NopPruner()


@dataclasses.dataclass(frozen=True)
class OpenTrial:
    """A trial without a result, with methods that record its metric and result."""

    _study: Any
    _trial: Any
    values: Mapping[str, str]

    @property
    def number(self) -> int:
        """Number of the trial, from 0."""
        return self._trial.number

    def should_prune(self, step: int, value: float) -> bool:
        """Records the metric at a step and returns whether to prune the trial at this step."""
        # A resumed trial has already reported its earlier steps.
        trials = self._study.get_trials(deepcopy=False)
        if step not in trials[self.number].intermediate_values:
            self._trial.report(value, step)
        return self._trial.should_prune()

    def completed(self, step: int, value: float) -> None:
        """Records the result of the trial."""
        self._trial.set_user_attr("step", step)
        self._study.tell(self._trial, value)

    def pruned(self, step: int) -> None:
        """Records that the trial was pruned after a step."""
        self._trial.set_user_attr("step", step)
        self._study.tell(self._trial, state=_state("PRUNED"))

    def failed(self, status: str, reason: str) -> str:
        """Records why the trial has no result and returns a description.

        Args:
          status: "failed" or "refused".
          reason: The reason that the trial failed or was refused.
        """
        self._trial.set_user_attr("status", status)
        self._trial.set_user_attr("reason", reason)
        self._study.tell(self._trial, state=_state("FAIL"))
        return f"{status}: {reason}"


def _remove_incomplete_line(journal: Path, lock: Any) -> None:
    """Removes an incomplete last line, because Optuna would append the next entry to it.

    Args:
      journal: Path of the journal.
      lock: Optuna's lock on the journal, because another worker may be appending to it.
    """
    if journal.is_file():
        lock.acquire()
        try:
            content = journal.read_bytes()
            os.truncate(journal, content.rfind(b"\n") + 1)
        finally:
            lock.release()


_STATUS = {
    "WAITING": "waits",
    "RUNNING": "runs",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


def _state(name: str) -> Any:
    return optional_module("optuna.trial", "praxis sweep").TrialState[name]


def _record(trial: Any) -> TrialRecord:
    attributes, reported = trial.user_attrs, trial.intermediate_values
    values = trial.params or trial.system_attrs.get("fixed_params", {})
    status = _STATUS[trial.state.name]
    step = attributes.get("step", max(reported, default=None))
    return TrialRecord(
        trial.number,
        {path: text_of(value) for path, value in values.items()},
        attributes.get("status", status) if status == "failed" else status,
        trial.value if status == "complete" else reported.get(step),
        step,
        attributes.get("reason", ""),
    )
