"""Compares the digests in a record with the digests of the data, which is read again."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.pipeline_checks import checked_batches
from praxis_lite.inputs.processes.row_digests import row_digests, total
from praxis_lite.job.examples.history import History

__all__ = ("faults_of_data",)


def faults_of_data(
    history: History, pipeline: InputPipeline, progress: Callable[[int, int], None]
) -> list[str]:
    """Checks that the recorded rows match the pipeline's rows.

    Args:
      history: The valid history of the record.
      pipeline: The training data, rebuilt from the job's config.
      progress: Called with (number of compared steps, total number of steps).

    Returns:
      A message for each difference.

    Raises:
      ConfigError: A batch of the pipeline is invalid.
    """
    faults, done = [], 0
    num_steps = sum(segment.last_step - segment.first_step + 1 for segment in history.segments)
    batches = _digests(history, pipeline)
    for segment in history.segments:
        if segment.batch_size != pipeline.batch_size:
            faults.append(
                f"steps {segment.first_step} to {segment.last_step} had batches of "
                f"{segment.batch_size} rows, but the config has batch_size {pipeline.batch_size}"
            )
            return faults
        # Each process has an active span, so a step may have several active spans.
        spans_by_first_step: dict[int, list[int]] = {}
        for number, span in enumerate(segment.spans):
            spans_by_first_step.setdefault(span.steps[0], []).append(number)
        # `sums` has the digest of each span's rows so far. `active` are the spans of the step.
        sums, active = [0] * len(segment.spans), []
        for step in range(segment.first_step, segment.last_step + 1):
            digests = next(batches, None)
            if digests is None:
                faults.append(
                    f"the data ends before batch {segment.batch_of(step)}, which belongs to step "
                    f"{step}"
                )
                return faults
            active += spans_by_first_step.get(step, [])
            for number in active:
                for first, last in segment.rows_of(segment.spans[number].process):
                    # Ranges are in units of batch_size, of which a batch may have a multiple.
                    multiple = len(digests) // segment.batch_size
                    sums[number] += total(digests[first * multiple : last * multiple])
            active = [number for number in active if segment.spans[number].steps[1] > step]
            done += 1
            progress(done, num_steps)
        faults += [
            f"steps {span.steps[0]} to {span.steps[1]} (start {segment.number}, process "
            f"{span.process}): the recorded digest is {span.digest}, but the data has the digest "
            f"{digest}"
            for span, value in zip(segment.spans, sums, strict=True)
            if span.digest != (digest := f"{value % 2**64:016x}")
        ]
    return faults


def _digests(history: History, pipeline: InputPipeline) -> Iterator[np.ndarray]:
    """Yields the digests of all rows in each step's batch, in step order."""
    indices = [
        segment.batch_of(step)
        for segment in history.segments
        for step in range(segment.first_step, segment.last_step + 1)
    ]
    batches: Iterator[tuple[int, Any]] = iter(())
    next_index = -1  # Index of the next batch in `batches`.
    for index in indices:
        # Skipping ahead is cheaper than a new iterator only for pipelines that replay their data.
        if next_index < 0 or index < next_index or not pipeline.replays and index > next_index:
            batches = checked_batches(pipeline, f"datasets.{TRAIN}", index)
        for next_index, batch in batches:
            if next_index == index:
                yield row_digests(batch, index)
                break
        next_index += 1
