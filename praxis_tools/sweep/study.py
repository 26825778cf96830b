"""The trials of a sweep: Optuna chooses and prunes them, and records them in a journal.

A trial that is running when the sweep is killed stays so in the journal, and is resumed.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.host.text_table import unique_ends
from praxis_lite.host.whole_files import DISK_FULL, not_written, write_picture
from praxis_tools.sweep.space import text_of
from praxis_tools.sweep.sweep_settings import SweepSettings

# The first quarter of a trial is not judged: rates are warming up there.
_UNJUDGED_PART = 4


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """A trial as recorded in the journal.

    Attributes:
      number: from 0.
      values: the text of each value that the trial tries, by path.
      status: "waits", "runs", "complete", "pruned", "failed" or "refused".
      value: of the metric, at `step`; None if there was none.
      reason: why it failed or was refused, or "".
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
      journal: the file. Only the holder of the sweep's directory may write it.
      settings: of the sweep, to begin or to resume it; None: to read it.

    Raises:
      ConfigError: Optuna is missing, the journal is damaged, or of another sweep.
    """

    def __init__(self, journal: Path, settings: SweepSettings | None = None):
        self._optuna = optuna = optional_module("optuna", "--mode=sweep")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        backends = optional_module("optuna.storages.journal", "--mode=sweep")
        if settings is not None:
            _cut_torn_line(journal)
        try:
            storage = optuna.storages.JournalStorage(backends.JournalFileBackend(str(journal)))
            if settings is None:
                self._study = optuna.load_study(storage=storage, study_name="sweep")
            else:
                self._study = optuna.create_study(
                    storage=storage, study_name="sweep", direction=f"{settings.better}imize",
                    load_if_exists=True,
                )
            recorded = self._study.user_attrs.get("settings")
            before = None if recorded is None else SweepSettings.of_json(recorded)
        except (ValueError, LookupError, TypeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise not_written(journal, error) from error
            raise ConfigError(
                f"{journal} is damaged, or no sweep of praxis_lite wrote it ({error}). Restore the "
                "file, or name another directory."
            ) from error
        if settings is not None and before is not None:
            settings.check_continues(before)
        self.settings = settings or before
        if settings is not None and recorded != settings.as_json():
            self._study.set_user_attr("settings", settings.as_json())
        self._study.pruner = self._pruner()
        if settings is not None and settings.search == "grid":
            for values in settings.space.combinations():
                self._study.enqueue_trial(values, skip_if_exists=True)

    def records(self) -> list[TrialRecord]:
        """Returns all trials in their order."""
        return [_record(trial) for trial in self._study.get_trials(deepcopy=False)]

    def best(self) -> TrialRecord | None:
        """Returns the complete trial with the best value, the first of equals; None if none is."""
        try:
            return _record(self._study.best_trial)
        except ValueError:
            return None

    def draw(self, path: Path) -> None:
        """Draws the metric of complete trials against each setting, a panel per setting, as a PNG.

        Raises:
          ConfigError: matplotlib is missing, or the file cannot be written.
        """
        pyplot = optional_module("matplotlib.pyplot", str(path))
        plots = optional_module("optuna.visualization.matplotlib", str(path))
        with warnings.catch_warnings(), pyplot.rc_context():
            warnings.simplefilter("ignore")  # Experimental in Optuna; the axis of a single value.
            plots.plot_slice(self._study, target_name=self.settings.metric)
            figure = pyplot.gcf()
            # Optuna sorts the settings; the last axes are the color bar's.
            names = unique_ends([path.split(".") for path in sorted(self.settings.space.searched)])
            for axes, name in zip(figure.axes, names, strict=False):
                axes.set_xlabel(".".join(name))
                if axes.get_xscale() != "log":  # Its labels may be texts with dollar signs.
                    for label in axes.get_xticklabels():
                        label.set_parse_math(False)
            try:
                write_picture(path, figure, dpi=110)
            finally:
                pyplot.close(figure)

    def next(self) -> "OpenTrial | None":
        """Returns the next trial to begin, or None if all have begun."""
        trials = self._study.get_trials(deepcopy=False)
        is_waiting = any(trial.state.name == "WAITING" for trial in trials)
        if not is_waiting and len(trials) >= self.settings.num_trials:
            return None
        with self._choosing(sum(trial.state.name != "WAITING" for trial in trials)):
            return self._opened(self._study.ask())

    def begun(self) -> "list[OpenTrial]":
        """Returns the trials that were running when the sweep ended."""
        opened = []
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state.name == "RUNNING":
                with self._choosing(trial.number):
                    again = self._optuna.trial.Trial(self._study, trial._trial_id)
                    opened.append(self._opened(again))
        return opened

    def _opened(self, trial: Any) -> "OpenTrial":
        # As Study.ask does with distributions; a trial whose values are recorded keeps them.
        values = {
            path: text_of(trial._suggest(path, item))
            for path, item in self.settings.space.searched.items()
        }
        return OpenTrial(self._study, trial, values)

    @contextlib.contextmanager
    def _choosing(self, number: int) -> Iterator[None]:
        """Sets a sampler for a trial whose draws depend on the seed and the trial's number only."""
        seed, samplers = self.settings.seed + 1_000_003 * number, self._optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of what is experimental in Optuna.
            self._study.sampler = (
                samplers.TPESampler(seed=seed % 2**32) if self.settings.search == "tpe"
                else samplers.RandomSampler(seed=seed % 2**32)
            )
            yield

    def _pruner(self) -> Any:
        pruners, num_steps = self._optuna.pruners, self.settings.num_steps
        match self.settings.pruner:
            case "median":
                return pruners.MedianPruner(n_warmup_steps=num_steps // _UNJUDGED_PART)
            case "halving":
                first = max(1, num_steps // _UNJUDGED_PART)
                return pruners.SuccessiveHalvingPruner(min_resource=first)
        return pruners.NopPruner()


@dataclasses.dataclass(frozen=True)
class OpenTrial:
    """A running trial: records its metric and how it ended."""

    _study: Any
    _trial: Any
    values: Mapping[str, str]

    @property
    def number(self) -> int:
        """The number of the trial, from 0."""
        return self._trial.number

    def should_prune(self, step: int, value: float) -> bool:
        """Records the metric at a step; returns whether the trial is to end there."""
        # A resumed trial has already reported its earlier steps.
        trials = self._study.get_trials(deepcopy=False)
        if step not in trials[self.number].intermediate_values:
            self._trial.report(value, step)
        return self._trial.should_prune()

    def completed(self, step: int, value: float) -> None:
        """Records the trial's result."""
        self._trial.set_user_attr("step", step)
        self._study.tell(self._trial, value)

    def pruned(self, step: int) -> None:
        """Records that the trial was ended early, after this step."""
        self._trial.set_user_attr("step", step)
        self._study.tell(self._trial, state=_state("PRUNED"))

    def failed(self, status: str, reason: str) -> str:
        """Records why there is no result, and returns it as text.

        Args:
          status: "failed" or "refused".
        """
        self._trial.set_user_attr("status", status)
        self._trial.set_user_attr("reason", reason)
        self._study.tell(self._trial, state=_state("FAIL"))
        return f"{status}: {reason}"


def _cut_torn_line(journal: Path) -> None:
    """Removes a last line without its end, to which Optuna would append."""
    if journal.is_file():
        content = journal.read_bytes()
        os.truncate(journal, content.rfind(b"\n") + 1)


_STATUS = {
    "WAITING": "waits", "RUNNING": "runs", "COMPLETE": "complete", "PRUNED": "pruned",
    "FAIL": "failed",
}


def _state(name: str) -> Any:
    return optional_module("optuna.trial", "--mode=sweep").TrialState[name]


def _record(trial: Any) -> TrialRecord:
    attributes, reported = trial.user_attrs, trial.intermediate_values
    values = trial.params or trial.system_attrs.get("fixed_params", {})
    status = _STATUS[trial.state.name]
    step = attributes.get("step", max(reported, default=None))
    return TrialRecord(
        trial.number, {path: text_of(value) for path, value in values.items()},
        attributes.get("status", status) if status == "failed" else status,
        trial.value if status == "complete" else reported.get(step), step,
        attributes.get("reason", ""),
    )
