"""A job's position in its training data: the next batch and the batches to skip."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.pipeline_checks import checked_batches


@dataclasses.dataclass(frozen=True)
class DataPosition:
    """A position in the training data, which each checkpoint stores.

    Attributes:
      next_batch: Index of the batch that the next step trains on.
      skipped: Sorted indices of the batches that training skips.
    """

    next_batch: int = 0
    skipped: tuple[int, ...] = ()

    @classmethod
    def of_step(cls, step: int, skipped: tuple[int, ...] = ()) -> "DataPosition":
        """Returns the position after `step` steps, given the batches that training skips."""
        next_batch, skipped = step, tuple(sorted(set(skipped)))
        # Each batch that was skipped before this position moves it by one.
        for index in skipped:
            if index <= next_batch:
                next_batch += 1
        return cls(next_batch, skipped)

    def batches(
        self, pipeline: InputPipeline, rows: slice
    ) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        """Yields (index, batch) from this position on, without skipped batches.

        Args:
          pipeline: The training data.
          rows: Rows of each global batch to yield.

        Raises:
          ConfigError: A batch does not match the pipeline's spec, or the pipeline ends.
        """
        num_read = self.next_batch
        for index, batch in checked_batches(pipeline, "datasets.train", self.next_batch, rows):
            num_read = index + 1
            if index not in self.skipped:
                yield index, batch
        raise ConfigError(
            f"datasets.train ended after {num_read} batches (num_batches is "
            f"{pipeline.num_batches}), but training needs more. Make the pipeline endless, or "
            "lower run.num_train_steps."
        )

    def as_json(self, pipeline: InputPipeline) -> dict[str, Any]:
        """Returns the JSON that a checkpoint manifest stores for this position."""
        state = pipeline.state(self.next_batch)
        return {
            "next_batch": self.next_batch,
            "skipped": list(self.skipped),
            "fingerprint": pipeline.fingerprint(),
            **({} if state is None else {"state": state}),
        }


def step_of(data: Mapping[str, Any]) -> int:
    """Returns the number of training steps that precede a data position in JSON form."""
    skipped = [index for index in data.get("skipped", ()) if index < data["next_batch"]]
    return data["next_batch"] - len(skipped)
