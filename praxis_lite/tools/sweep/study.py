"""The trials of a sweep: Optuna chooses and judges them, and keeps them in a journal.

A trial that is running when the sweep is killed stays so in the journal, and goes on.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.whole_files import DISK_FULL, not_written
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.tools.sweep.settings import SweepSettings

# The first quarter of a trial is not judged: rates are warming up there.
_UNJUDGED_PART = 4


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """A trial as the journal has it.

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


def best_of(records: Sequence[TrialRecord], better: str) -> TrialRecord | None:
    """Returns the complete trial with the best value, the first of equals; None without any.

    Args:
      better: "min" or "max".
    """
    complete = [record for record in records if record.status == "complete"]
    sign = 1.0 if better == "min" else -1.0
    return min(complete, key=lambda record: (sign * record.value, record.number), default=None)


class Study:
    """The trials of a sweep.

    Args:
      journal: the file. Only the holder of the sweep's directory may write it.
      settings: of the sweep, to begin it or to go on with it; None: to read it.

    Raises:
      ConfigError: Optuna is missing, the journal is damaged, or of another sweep.
    """

    def __init__(self, journal: Path, settings: SweepSettings | None = None):
        self._optuna = optuna = optional_module("optuna", "--mode=sweep")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        backends = optional_module("optuna.storages.journal", "--mode=sweep")
        if settings is not None:
            # Left by a holder that was killed, or by a full disk.
            journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
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
                raise not_written(journal, error, "it goes on with the sweep") from error
            raise ConfigError(
                f"{journal} is damaged, or no sweep of praxis_lite wrote it ({error}). Restore the "
                "file, or name another directory."
            ) from error
        if settings is not None and before is not None:
            settings.check_goes_on(before)
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
        """Returns the best trial so far, as `best_of`."""
        return best_of(self.records(), self.settings.better)

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
        trials = self._study.get_trials(deepcopy=False)
        opened = []
        for trial in trials:
            if trial.state.name == "RUNNING":
                with self._choosing(trial.number):
                    again = self._optuna.trial.Trial(self._study, trial._trial_id)
                    opened.append(self._opened(again))
        return opened

    def _opened(self, trial: Any) -> "OpenTrial":
        values = {x.path: x.suggested(trial) for x in self.settings.space.searched}
        trial.set_user_attr("values", values)
        return OpenTrial(self._study, trial, values)

    @contextlib.contextmanager
    def _choosing(self, number: int) -> Iterator[None]:
        """Holds a sampler for a trial: its draws follow from the seed and the trial's number."""
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
    """A trial that runs: it is told the metric as it comes, and how it ended."""

    _study: Any
    _trial: Any
    values: Mapping[str, str]

    @property
    def number(self) -> int:
        """The number of the trial, from 0."""
        return self._trial.number

    def is_among_the_worst(self, step: int, value: float) -> bool:
        """Takes the metric at a step; returns True if the trial is to end there."""
        # A trial that goes on has reported its former steps.
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
        """Records why there is no result, and returns it in words.

        Args:
          status: "failed" or "refused".
        """
        self._trial.set_user_attr("status", status)
        self._trial.set_user_attr("reason", reason)
        self._study.tell(self._trial, state=_state("FAIL"))
        return f"{status}: {reason}"


def _cut_torn_line(journal: Path) -> None:
    """Cuts a last line without its end off, which Optuna would go on in."""
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
    values = attributes.get("values") or trial.system_attrs.get("fixed_params") or trial.params
    status = _STATUS[trial.state.name]
    step = attributes.get("step", max(reported, default=None))
    return TrialRecord(
        trial.number, values, attributes.get("status", status) if status == "failed" else status,
        trial.value if status == "complete" else reported.get(step), step,
        attributes.get("reason", ""),
    )
