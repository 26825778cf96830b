"""A job's files as they are now: read again and again while it trains, and never locked."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import opened
from praxis_lite.run.goodput.goodput import Goodput, goodput_of
from praxis_lite.run.goodput.stretches import THE_END
from praxis_lite.run.job.elastic.changes import START, ChangeOfHands, changes_of_hands
from praxis_lite.run.job.job_dir import JobDir, recorded_experiment
from praxis_lite.run.job.job_lock import is_training
from praxis_lite.run.trainer.layout_table import LayoutArray, read_layout
from praxis_lite.run.trainer.metrics.columns import MetricsColumns, columns_by_dataset
from praxis_lite.run.trainer.metrics.json_lines import lines_if_any
from praxis_lite.tools.report.certificates import Certificate, certificates_of
from praxis_lite.tools.report.config_differences import config_of
from praxis_lite.tools.report.profile_texts import profile_texts
from praxis_lite.tools.report.samples import Samples, SamplesReader

_MOST_SETTINGS = 16 << 20  # Bytes of config.txt.


@dataclasses.dataclass(frozen=True)
class JobState:
    """A job at a moment.

    Attributes:
      name: in the report.
      experiment: its full name.
      is_training: a process trains it.
      columns: of metrics.jsonl.
      evaluations: the columns of eval_metrics.jsonl by dataset, in the order of their steps.
      config: values by path.
      goodput: None if the job did not record where its time went.
      changes: of hands, of an elastic job, in their order.
      certificates: of steps that were made again, in the order of its lines.
      layout: the arrays of its state, and a sentence about their sum.
      profiles: the tables of its newest profiles by their first step.
      notes: sentences on what could not be read or shown.
    """

    name: str
    path: str
    experiment: str
    is_training: bool
    columns: Mapping[str, np.ndarray]
    evaluations: Mapping[str, Mapping[str, np.ndarray]]
    config: Mapping[str, str]
    samples: Samples
    goodput: Goodput | None
    changes: Sequence[ChangeOfHands]
    certificates: Sequence[Certificate]
    layout: tuple[Sequence[LayoutArray], str]
    profiles: Mapping[int, str]
    notes: Sequence[str]

    @property
    def last_step(self) -> int:
        """The newest step in metrics.jsonl; 0 if there is none."""
        steps = self.columns["step"]
        return int(steps[-1]) if len(steps) else 0

    @property
    def num_train_steps(self) -> int | None:
        """The steps that the job is to make, or None if its config does not tell."""
        text = self.config.get("run.num_train_steps", "")
        return int(text) if text.isdecimal() and len(text) < 20 else None

    @property
    def state(self) -> str:
        """ "trains", "has no steps", "was stopped" before it made all its steps, or "has ended"."""
        if self.is_training:
            return "trains"
        if not self.last_step:
            return "has no steps"
        if self.goodput and self.goodput.launches[-1].ended_by == THE_END:  # An early stop too.
            return "has ended"
        steps = self.num_train_steps
        return "was stopped" if steps is not None and self.last_step < steps else "has ended"

    @property
    def restarts(self) -> np.ndarray:
        """The steps that later launches went on from, but for changes of hands."""
        launches = self.goodput.launches[1:] if self.goodput else ()
        changed = {change.from_step for change in self.changes}
        steps = [item.first_step for item in launches if item.first_step is not None]
        return np.array([step for step in steps if step not in changed], float)

    @property
    def hands(self) -> Sequence[ChangeOfHands]:
        """The changes of hands that made steps, without the job's first start."""
        return [
            change for change in self.changes
            if change.from_step is not None and change.reached
            and (change.kind != START or change.from_step)
        ]

    def steps_where(self, column: str) -> np.ndarray:
        """Returns the steps at which a column is above 0."""
        if column not in self.columns:
            return np.empty(0)
        return self.columns["step"][self.columns[column] > 0]


class JobReader:
    """Reads a job; lines that it has read it does not read again."""

    def __init__(self, name: str, files: JobDir):
        self._name, self._files = name, files
        self._columns, self._samples = MetricsColumns(files.metrics_jsonl), SamplesReader(files)

    def read(self, most_letters: int) -> JobState:
        """Returns the job as it is.

        Args:
          most_letters: of its samples.

        Raises:
          ConfigError: metrics.jsonl cannot be read, or the directory is no job's any longer.
        """
        # Asked first: what the job wrote at its end is read once it has ended.
        trains, notes = is_training(self._files.path), []
        self._columns.read()
        if number := self._columns.num_unreadable:
            lines = "1 line is" if number == 1 else f"{number} lines are"
            notes.append(f"metrics.jsonl: {lines} left out, for want of a JSON object with a step.")
        columns = self._columns.columns()
        if not len(columns["step"]):
            notes.append("There is no step in metrics.jsonl yet.")
        if not (config := self._settings()):
            notes.append("There is no config.txt, so its settings are not compared.")
        samples, on_samples = self._samples.read(most_letters)
        notes += on_samples
        return JobState(
            self._name, str(self._files.path), recorded_experiment(self._files), trains, columns,
            self._evaluations(notes), config, samples, self._goodput(notes),
            _or_nothing(changes_of_hands, self._files.elastic_jsonl, notes),
            _or_nothing(certificates_of, self._files.certificates_jsonl, notes),
            self._layout(notes), profile_texts(self._files), notes,
        )

    def _evaluations(self, notes: list[str]) -> dict[str, dict[str, np.ndarray]]:
        try:
            return columns_by_dataset(lines_if_any(self._files.eval_metrics_jsonl))
        except ConfigError as error:
            notes.append(str(error))
            return {}

    def _goodput(self, notes: list[str]) -> Goodput | None:
        try:
            return goodput_of(self._files)
        except ConfigError as error:
            notes.append(str(error))
            return None

    def _layout(self, notes: list[str]) -> tuple[Sequence[LayoutArray], str]:
        try:
            return read_layout(self._files.layout_json)
        except ConfigError as error:
            notes.append(str(error))
            return [], ""

    def _settings(self) -> dict[str, str]:
        try:
            with opened(self._files.config_txt) as file:
                return config_of(file.read(_MOST_SETTINGS).decode("utf-8", "replace"))
        except OSError:  # A job that was begun by others may lack it.
            return {}


def _or_nothing(read: Callable[[Path], list[Any]], path: Path, notes: list[str]) -> list[Any]:
    """Returns the values that a function reads of a file; [], and a note, if it cannot be read."""
    try:
        return read(path)
    except ConfigError as error:
        notes.append(str(error))
        return []
