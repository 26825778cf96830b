"""The step that batches of a dataset go through."""

from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.inputs.base import TRAIN


def step_for(partitioner: Partitioner, root: str, name: str) -> Step:
    """Returns the step for batches of a dataset of a job.

    Args:
      root: the field of the job that the dataset is in: "datasets" or "decode_datasets".
      name: of the dataset; "train" is trained on, others are evaluated on.
    """
    if root == "decode_datasets":
        return partitioner.decode_step
    return partitioner.train_step if name == TRAIN else partitioner.eval_step
