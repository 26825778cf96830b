"""Experiments that repeat results that others have published, with the source's hyperparameters.

Each module's docstring names the source and lists all deviations from it. Hyperparameters have the
source's names. `python -m benchmarks.published` trains the experiments and compares the results
with the published figures. Experiments run on one device; `--set mesh.ici_mesh_shape=(1,4,2)`
changes the mesh.
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
# Mesh axes of the dims of inputs, by rank: rows are sharded.
SPLITS = {"map_1d": (_BATCH,), "map_2d": (_BATCH, None)}


class Published(Experiment):
    """Base class: trains on one device."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 1, 1))


def run_config(num_steps: int, evaluate_every: int) -> fdl.Config:
    """Returns the config of a run that also evaluates the initial weights."""
    evaluation = fdl.Config(EvaluationSettings, every_steps=evaluate_every, at_start=True)
    return fdl.Config(RunConfig, num_train_steps=num_steps, evaluation=evaluation)


def shuffled_arrays(
    arrays: Callable, *args, batch_size: int, eval_batch_size: int
) -> dict[str, fdl.Config]:
    """Returns the configs of datasets of `arrays(split, *args)`, which are shuffled every epoch."""
    train, heldout = (fdl.Partial(arrays, split, *args) for split in ("train", "heldout"))
    return {
        "train": fdl.Config(InMemory, train, batch_size=batch_size, shuffle=True),
        "heldout": fdl.Config(InMemory, heldout, batch_size=eval_batch_size, shuffle=False),
    }
