"""The digests of a record, compared with those of the recomputed data."""

from collections.abc import Callable, Iterator

import numpy as np

from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.batches import checked_batches
from praxis_lite.inputs.processes.row_digests import row_digests, total
from praxis_lite.job.examples.history import History

__all__ = ("faults_of_data",)


def faults_of_data(
    history: History, pipeline: InputPipeline, progress: Callable[[int, int], None]
) -> list[str]:
    """Returns sentences on the stretches whose rows are not those that the pipeline makes.

    Args:
      progress: called with the number of steps that have been compared, and of all.

    Raises:
      ConfigError: the pipeline is wrong, or ends before.
    """
    faults, done = [], 0
    num_steps = sum(part.last_step - part.first_step + 1 for part in history.parts)
    batches = _digests(history, pipeline)
    for part in history.parts:
        if part.batch_size != pipeline.batch_size:
            faults.append(
                f"steps {part.first_step} to {part.last_step} had batches of {part.batch_size} "
                f"rows; those of the config have {pipeline.batch_size}"
            )
            return faults
        beginning: dict[int, list[int]] = {}
        for number, stretch in enumerate(part.stretches):
            beginning.setdefault(stretch.steps[0], []).append(number)
        sums, fed = [0] * len(part.stretches), []
        for step in range(part.first_step, part.last_step + 1):
            digests = next(batches, None)
            if digests is None:
                faults.append(f"the data end before batch {part.batch_of(step)}, of step {step}")
                return faults
            fed += beginning.get(step, [])
            for number in fed:
                for first, last in part.rows_of(part.stretches[number].process):
                    sums[number] += total(digests[first:last])
            fed = [number for number in fed if part.stretches[number].steps[1] > step]
            done += 1
            progress(done, num_steps)
        faults += [
            f"steps {item.steps[0]} to {item.steps[1]} (start {part.number}, process "
            f"{item.process}): the recorded digest is {item.digest}, that of the data is {digest}"
            for item, value in zip(part.stretches, sums, strict=True)
            if item.digest != (digest := f"{value % 2**64:016x}")
        ]
    return faults


def _digests(history: History, pipeline: InputPipeline) -> Iterator[np.ndarray]:
    """Yields the digests of all rows of each step's batch, in order."""
    wanted = [
        part.batch_of(step) for part in history.parts
        for step in range(part.first_step, part.last_step + 1)
    ]
    made, following = iter(()), -1  # The index of the batch that `made` gives next.
    for index in wanted:
        if following < 0 or index < following or not pipeline.replays and index > following:
            made = checked_batches(pipeline, f"datasets.{TRAIN}", index)
        for following, batch in made:
            if following == index:
                yield row_digests(batch, index)
                break
        following += 1
