"""WHERE a task is computed: its layout on a mesh, and compiled init, train, eval and decode steps.

Knows shapes, specs and jit, and never what a layer computes.
"""

from praxis_lite.partitioner.partitioner import Partitioner
from praxis_lite.partitioner.shard_map_partitioner import ShardMapPartitioner
from praxis_lite.partitioner.train_state import StateLayout, TrainState

__all__ = [
    "Partitioner",
    "ShardMapPartitioner",
    "StateLayout",
    "TrainState",
]
