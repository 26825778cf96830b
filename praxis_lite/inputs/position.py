"""The position of a job in its training data: the next batch, and skipped batches."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.batches import checked_batches


@dataclasses.dataclass(frozen=True)
class DataPosition:
    """The index of the next step's batch, and skipped batches.

    Attributes:
      next_batch: the index of the next step's batch.
      skipped: indices of skipped batches, in order.
    """

    next_batch: int = 0
    skipped: tuple[int, ...] = ()

    @classmethod
    def of_step(cls, step: int, skipped: tuple[int, ...] = ()) -> "DataPosition":
        """Returns the position after `step` steps."""
        index, skipped = step, tuple(sorted(set(skipped)))
        for batch in skipped:
            if batch <= index:
                index += 1
        return cls(index, skipped)

    def batches(
        self, pipeline: InputPipeline, rows: slice
    ) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        """Yields (index, these rows of the batch) of the training data from this position on.

        Raises:
          ConfigError: as `checked_batches`, or the pipeline ends.
        """
        num_made = self.next_batch
        for index, batch in checked_batches(pipeline, "datasets.train", self.next_batch, rows):
            num_made = index + 1
            if index not in self.skipped:
                yield index, batch
        raise ConfigError(
            f"datasets.train ended after {num_made} batches, but training needs more; its "
            f"num_batches is {pipeline.num_batches} (None: endless). Fix the pipeline, or train "
            "fewer steps (run.num_train_steps)."
        )

    def as_json(self, pipeline: InputPipeline) -> dict[str, Any]:
        """Returns the position for the checkpoint manifest."""
        return {
            "next_batch": self.next_batch, "skipped": list(self.skipped),
            "fingerprint": pipeline.fingerprint(),
        }


def step_of(data: Mapping[str, Any]) -> int:
    """Returns the step of a position that `as_json` returned."""
    skipped = [index for index in data.get("skipped", ()) if index < data["next_batch"]]
    return data["next_batch"] - len(skipped)
