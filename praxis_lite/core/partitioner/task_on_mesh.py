"""A task on a mesh: the context that its programs are traced in, and a batch as they see it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.models.axis_rules import flax_axis_rules
from praxis_lite.core.models.layer_paths import naming_the_layer
from praxis_lite.core.sharding.inputs import GlobalBatch, reshard_by_rank, true_rows
from praxis_lite.core.task import Task

PyTree = Any


@dataclasses.dataclass(frozen=True)
class TaskOnMesh:
    """A task and the mesh that its programs are compiled for."""

    task: Task
    mesh: Mesh

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Sets the mesh while a program is traced, so that no caller has to and no call pays."""
        with (
            naming_the_layer(),
            jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
            flax_axis_rules(self.task.weight_sharding),
        ):
            yield

    def inputs(self, batch: GlobalBatch) -> PyTree:
        """Returns a batch's true rows, resharded by rank, in a program."""
        axis_names = self.mesh.axis_names
        inputs = true_rows(batch, axis_names)
        return reshard_by_rank(inputs, self.task.inputs_split_mapping, axis_names)
