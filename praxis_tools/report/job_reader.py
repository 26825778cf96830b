"""Reads job files for reports without locking them, so that reports work during training."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from praxis_lite.core.errors import ConfigError, Error
from praxis_lite.host.file_reading import content_of
from praxis_lite.host.text_table import unique_ends
from praxis_lite.job.job_dir import JobDir, open_for_reading, recorded_experiment
from praxis_lite.trainer.layout_table import LayoutArray, read_layout
from praxis_lite.trainer.metrics.columns import MetricsColumns, columns_by_dataset
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_lite.trainer.metrics.records import decoded_files
from praxis_tools.elastic.generation_log import START, GenerationRecord, read_generation_records
from praxis_tools.goodput.goodput import Goodput, goodput_of
from praxis_tools.goodput.spans import THE_END
from praxis_tools.report.step_certificates import StepCertificate, step_certificates

_NUM_PROMPTS, _MAX_SAMPLE_CHARS = 20, 2_000  # The limit applies to each prompt and continuation.
_MAX_PROFILES, _MAX_PROFILE_BYTES = 3, 20_000

# Maps a dataset and a step to (prompt, continuation) pairs.
Samples = dict[str, dict[int, list[tuple[str, str]]]]
_Read = TypeVar("_Read")


@dataclasses.dataclass(frozen=True)
class JobState:
    """A snapshot of a job.

    Attributes:
      name: Name of the job in the report.
      path: Job directory.
      experiment: Full name of the experiment.
      is_training: Whether a process is training the job.
      columns: Columns of metrics.jsonl.
      evaluations: Maps each dataset to its columns of eval_metrics.jsonl, sorted by step.
      config: Maps the path of each setting to its value.
      samples: Decoded samples, keyed by dataset and step.
      goodput: Goodput of the job, or None if the job did not record it.
      changes: Generations of an elastic job in chronological order.
      certificates: Step certificates, in the order of certificates.jsonl.
      layout: Arrays of the train state, and a description of their total size.
      profiles: Maps the first step of each recent profile to the tables of that profile.
      notes: Messages about files that could not be read or shown.
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
    changes: Sequence[GenerationRecord]
    certificates: Sequence[StepCertificate]
    layout: tuple[Sequence[LayoutArray], str]
    profiles: Mapping[int, str]
    notes: Sequence[str]

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl, or 0 if the file has no steps."""
        steps = self.columns["step"]
        return int(steps[-1]) if len(steps) else 0

    @property
    def num_train_steps(self) -> int | None:
        """The number of training steps set in the config, or None if it is unknown."""
        text = self.config.get("run.num_train_steps", "")
        return int(text) if text.isdecimal() and len(text) < 20 else None

    @property
    def state(self) -> str:
        """The job's state: "trains", "has no steps", "was stopped" (early) or "has ended"."""
        if self.is_training:
            return "trains"
        if not self.last_step:
            return "has no steps"
        # This includes jobs that ended by early stopping.
        if self.goodput and self.goodput.launches[-1].ended_by == THE_END:
            return "has ended"
        steps = self.num_train_steps
        return "was stopped" if steps is not None and self.last_step < steps else "has ended"

    @property
    def restarts(self) -> np.ndarray:
        """Steps from which later launches resumed, excluding starts of elastic generations."""
        launches = self.goodput.launches[1:] if self.goodput else ()
        changed = {change.from_step for change in self.changes}
        steps = [item.first_step for item in launches if item.first_step is not None]
        return np.array([step for step in steps if step not in changed], float)

    @property
    def regroupings(self) -> Sequence[GenerationRecord]:
        """Generations that completed steps, excluding the job's first generation."""
        return [
            change
            for change in self.changes
            if change.from_step is not None
            and change.reached
            and (change.kind != START or change.from_step)
        ]

    def steps_where(self, column: str) -> np.ndarray:
        """Returns the steps at which the column is positive."""
        if column not in self.columns:
            return np.empty(0)
        return self.columns["step"][self.columns[column] > 0]


class JobReader:
    """Reads a job repeatedly; after the first read, only new lines of metrics.jsonl are parsed."""

    def __init__(self, name: str, files: JobDir):
        self._name, self._files = name, files
        self._columns = MetricsColumns(files.metrics_jsonl)

    def read(self, max_chars: int) -> JobState:
        """Returns the current state of the job.

        Args:
          max_chars: Maximum total number of characters in the samples.

        Raises:
          ConfigError: metrics.jsonl cannot be read, or the directory does not contain a job.
        """
        files, notes = self._files, list[str]()

        def read_or_note(read: Callable[[], _Read], default: _Read) -> _Read:
            try:
                return read()
            except Error as error:
                notes.append(str(error))
                return default

        # Check this before reading: if training has ended, the files below are complete.
        training = files.is_training()
        files.refresh()
        self._columns.read()
        if number := self._columns.num_unreadable:
            lines = "1 line that is not" if number == 1 else f"{number} lines that are not"
            notes.append(f"metrics.jsonl: skipped {lines} a JSON object with a step.")
        columns = self._columns.columns()
        if not len(columns["step"]):
            notes.append("metrics.jsonl has no steps yet.")
        if not (config := _config(files)):
            notes.append("The job's settings are not compared, because config.txt is missing.")
        samples, notes_on_samples = read_samples(files, max_chars)
        notes += notes_on_samples
        eval_file, elastic_file = files.eval_metrics_jsonl, files.elastic_jsonl
        no_layout: tuple[list[LayoutArray], str] = ([], "")
        return JobState(
            name=self._name,
            path=str(files.location),
            experiment=recorded_experiment(files),
            is_training=training,
            columns=columns,
            evaluations=read_or_note(lambda: columns_by_dataset(read_json_lines(eval_file)), {}),
            config=config,
            samples=samples,
            goodput=read_or_note(lambda: goodput_of(files), None),
            changes=read_or_note(lambda: read_generation_records(elastic_file), []),
            certificates=read_or_note(lambda: step_certificates(files.certificates_jsonl), []),
            layout=read_or_note(lambda: read_layout(files.layout_json), no_layout),
            profiles=_profiles(files),
            notes=notes,
        )


def named_jobs(paths: Sequence[str]) -> dict[str, JobDir]:
    """Opens the jobs of a report, and names each job by the shortest unique suffix of its path.

    A job that is listed several times is returned once.

    Raises:
      ConfigError: There are no paths, or a path is not a job directory.
    """
    if not paths:
        raise ConfigError(
            "A report requires at least one job directory: `praxis report JOB [JOB ...]`."
        )
    jobs: dict[str, JobDir] = {}
    for path in paths:
        job = open_for_reading(path, writes=False)
        is_local = job.location == job.path
        jobs.setdefault(os.path.realpath(job.path) if is_local else str(job.location), job)
    names = unique_ends([Path(str(job.location)).parts for job in jobs.values()])
    return {str(Path(*name)): job for name, job in zip(names, jobs.values(), strict=True)}


def read_samples(files: JobDir, max_chars: int) -> tuple[Samples, list[str]]:
    """Returns decoded samples, latest first, and notes about omitted samples.

    Args:
      files: The job.
      max_chars: Maximum total number of characters in the samples.
    """
    samples: Samples = {}
    num_left_out = num_unreadable = 0
    for file in sorted(decoded_files(files), key=lambda file: (-file.step, file.dataset)):
        try:
            decoded = file.read(_NUM_PROMPTS)
        except OSError:  # The file was removed after it was listed, or is not a regular file.
            continue
        num_unreadable += decoded.num_unreadable
        pairs = [
            (truncated(prompt, _MAX_SAMPLE_CHARS), truncated(text, _MAX_SAMPLE_CHARS))
            for prompt, text in decoded.pairs
        ]
        size = sum(len(prompt) + len(text) for prompt, text in pairs)
        if size > max_chars:
            num_left_out += 1
        elif pairs:
            samples.setdefault(file.dataset, {})[file.step] = pairs
            max_chars -= size
    notes = []
    if num_left_out:
        number = "a file" if num_left_out == 1 else f"{num_left_out} files"
        notes.append(f"The samples of {number} in decode are omitted to limit the page's size.")
    if num_unreadable:
        lines = "1 line that is not a JSON object"
        if num_unreadable > 1:
            lines = f"{num_unreadable} lines that are not JSON objects"
        notes.append(f"decode: skipped {lines}.")
    return samples, notes


def truncated(text: str, max_chars: int) -> str:
    """Truncates text longer than `max_chars` characters and appends "..."."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def _config(files: JobDir) -> dict[str, str]:
    """Returns a dict that maps the paths in config.txt to values; {} if it cannot be read."""
    try:
        text = content_of(files.config_txt).decode("utf-8", "replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {path: value for path, _, value in pairs}


def _profiles(files: JobDir) -> dict[int, str]:
    """Returns a dict that maps the first step of each recent profile to the profile's tables."""
    found = [
        (int(file.parent.name), file)
        for file in files.profiles.glob("*/profile.txt")
        if file.parent.name.isdecimal()
    ]
    texts = {}
    for step, file in sorted(found)[-_MAX_PROFILES:]:
        try:
            texts[step] = content_of(file)[:_MAX_PROFILE_BYTES].decode("utf-8", "replace")
        except OSError:  # The file was removed after it was listed, or is not a regular file.
            continue
    return texts
