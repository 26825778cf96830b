"""Verifies which examples a job used, by comparing its record with the data from its config."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from praxis_lite.checkpoints.steps.step_store import steps_in
from praxis_lite.core.errors import ConfigError, first_few
from praxis_lite.experiment.launched_config import config_of_job
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.processes.row_digests import fingerprint_digest
from praxis_lite.job.examples.history import History, Segment, history_of
from praxis_lite.job.examples.lines import read_record
from praxis_lite.job.job_dir import JobDir

__all__ = ("ExamplesProof", "proof_of_examples", "train_pipeline")

EXACTLY_ONCE = "every example exactly once, in order"


@dataclasses.dataclass(frozen=True)
class ExamplesProof:
    """The result of verifying a job's examples.

    Attributes:
      history: The valid history of the job, extracted from its record.
      faults: A message for each error; empty if every example was used exactly once and in order.
      notes: Messages about differences that are not errors, such as changed data settings.
      num_lost_steps: Number of steps that were recomputed.
      is_recomputed: Whether the data was read again and compared with the record.
    """

    history: History
    faults: Sequence[str]
    notes: Sequence[str]
    num_lost_steps: int
    is_recomputed: bool

    @property
    def num_rollbacks(self) -> int:
        """Number of roll-backs after loss spikes."""
        return self.history.num_starts - self.history.num_launches

    def lines(self) -> list[str]:
        """Formats the result as lines."""
        history = self.history
        lines = [_segment_line(segment) for segment in history.segments]
        if history.segments:
            skipped = history.skipped
            left_out = (
                f", without {first_few([str(index) for index in skipped], 8)}" if skipped else ""
            )
            first = history.segments[0].batch_of(history.first_step)
            last = history.segments[-1].batch_of(history.last_step)
            lines += [
                f"steps {history.first_step} to {history.last_step}: batches {first} to {last}"
                f"{left_out}; relaunches: {history.num_launches - 1}, "
                f"roll-backs: {self.num_rollbacks}, recomputed steps: {self.num_lost_steps}",
                f"digest {history.digest}",
            ]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"WRONG: {fault}" for fault in self.faults]
        if not self.faults:
            lines.append(
                f"{EXACTLY_ONCE}: the record is complete, and it matches the data"
                if self.is_recomputed
                else f"{EXACTLY_ONCE}: the record is complete; it was not compared with the data"
            )
        return lines


def proof_of_examples(
    job_dir: JobDir,
    *,
    packages: Sequence[str] = (),
    settings: Sequence[str] = (),
    recorded_only: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
    last_step: int | None = None,
    num_lost_steps: int = 0,
) -> ExamplesProof:
    """Verifies which examples a job used.

    Args:
      job_dir: The job directory.
      packages: The user's packages, as for --packages.
      settings: Settings "path=value", as for --set, such as the current location of the data.
      recorded_only: Whether to only check the record, without recomputing the data.
      progress: Called with (number of compared steps, total number of steps).
      last_step: The last step to check, or None for the step of the latest checkpoint.
      num_lost_steps: Number of recomputed steps, including unrecorded steps between two saves.

    Raises:
      ConfigError: There is no record, or the data cannot be read.
    """
    record = read_record(job_dir.examples)
    if not record.starts and not record.spans:
        raise ConfigError(
            f"{job_dir.location} has no record of its examples ({job_dir.examples.name}/*.jsonl). "
            "A job writes this record while it trains, and cannot be verified without it."
        )
    if last_step is None:
        last_step = max(steps_in(job_dir.checkpoints).committed(), default=None)
    history = history_of(record, last_step)
    faults, notes = [*history.faults], [*history.notes]
    notes += [
        f"the data settings of start {segment.number} differ from those of the previous start"
        for previous, segment in itertools.pairwise(history.segments)
        if segment.starts[0].data != previous.starts[0].data
    ]
    if not history.segments:
        faults.append("no steps are on record")
    elif not recorded_only:
        from praxis_lite.job.examples.proof import faults_of_data

        pipeline = train_pipeline(job_dir, packages, settings)
        faults += faults_of_data(history, pipeline, progress)
        if fingerprint_digest(pipeline) != history.segments[-1].starts[0].data:
            notes.append("the data settings in the config have changed since the last start")
    return ExamplesProof(
        history,
        faults,
        notes,
        max(history.num_lost_steps, num_lost_steps),
        not recorded_only,
    )


def train_pipeline(
    job_dir: JobDir, packages: Sequence[str] = (), settings: Sequence[str] = ()
) -> InputPipeline:
    """Builds the training data in a job's config. Raises ConfigError if the config has no data."""
    config = config_of_job(job_dir, None, settings, packages).config

    from praxis_lite.config.build import build, naming_settings

    if TRAIN not in config.datasets:
        raise ConfigError(f"The config of {job_dir.location} has no dataset {TRAIN!r}.")
    with naming_settings(config):
        return build(config.datasets[TRAIN])


def _segment_line(segment: Segment) -> str:
    """Formats the steps, processes and mesh of a start as a line."""
    first = segment.starts[0]
    mesh = ", ".join(f"{axis} {size}" for axis, size in first.mesh.items())
    generation = "" if first.generation is None else f", generation {first.generation}"
    count = first.num_processes
    return (
        f"steps {segment.first_step} to {segment.last_step}: start {segment.number}{generation}, "
        f"{count} process{'es' * (count > 1)}, mesh ({mesh})"
    )
