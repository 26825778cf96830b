"""Experiments that reproduce published results with the hyperparameters of the source.

Each module's docstring names the source and lists all deviations from it. Hyperparameters have the
names that the source uses. `python -m benchmarks.published` trains the experiments and compares the
results with the published figures. By default, experiments run on one device;
`--set mesh.ici_mesh_shape=(1,4,2)` changes the mesh.
"""

from collections.abc import Callable
from pathlib import Path

import fiddle as fdl

from praxis_lite import EvaluationSettings, Experiment, MeshConfig, RunConfig
from praxis_lite.inputs import InMemory
from praxis_lite.layers import SHARDING_PRESETS

__all__ = ["DATA", "SPLITS", "Published", "run_config", "shuffled_arrays"]

DATA = Path(__file__).parent / "data"
_BATCH = SHARDING_PRESETS["fsdp+tensor"]["batch"]
# inputs_split_mapping that shards the batch dim of inputs with one or two dims.
SPLITS = {"map_1d": (_BATCH,), "map_2d": (_BATCH, None)}


class Published(Experiment):
    """Base class of published experiments, which run on one device by default."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 1, 1))


def run_config(num_steps: int, evaluate_every: int) -> fdl.Config:
    """Returns the config of a run with evaluations, including one of the initial weights."""
    evaluation = fdl.Config(EvaluationSettings, every_steps=evaluate_every, at_start=True)
    return fdl.Config(RunConfig, num_train_steps=num_steps, evaluation=evaluation)


def shuffled_arrays(
    arrays: Callable, *args, batch_size: int, eval_batch_size: int
) -> dict[str, fdl.Config]:
    """Returns configs of the datasets "train", shuffled every epoch, and "heldout", in order.

    Args:
      arrays: Function that returns the arrays of a split, `arrays(split, *args)`.
      *args: Further arguments of `arrays`.
      batch_size: Number of rows in a training batch.
      eval_batch_size: Number of rows in an evaluation batch.
    """
    train, heldout = (fdl.Partial(arrays, split, *args) for split in ("train", "heldout"))
    return {
        "train": fdl.Config(InMemory, train, batch_size=batch_size, shuffle=True),
        "heldout": fdl.Config(InMemory, heldout, batch_size=eval_batch_size, shuffle=False),
    }
