"""A task on a mesh: the context that its programs are traced in, and a batch as they see it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax.core import spmd
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.models.layer_paths import naming_the_layer
from praxis_lite.core.sharding.inputs import GlobalBatch, reshard_by_rank, true_rows
from praxis_lite.core.sharding.weight_sharding import WeightSharding, check_axes
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


@contextlib.contextmanager
def flax_axis_rules(weight_sharding: WeightSharding | None) -> Iterator[None]:
    """Sets the job's logical axis rules as Flax's, for what constrains activations by names.

    `nn.with_logical_constraint` and NNX's metadata read them while a step is traced. Without rules
    nothing is set, and the caller's own context stays.

    Raises:
      ConfigError: a rule has an axis that the mesh of the context, if any, has not.
    """
    rules = weight_sharding.rules_in_use if weight_sharding is not None else ()
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        check_axes(rules, mesh.shape)
    with spmd.logical_axis_rules(rules) if rules else contextlib.nullcontext():
        yield
