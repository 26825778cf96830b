"""Strategies for computing gradients and metrics on a mesh, by default with XLA's partitioner."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jax.sharding import Mesh

from praxis_lite.core.learner.weight_groups import WeightGroups
from praxis_lite.core.partitioner import accumulation, steps
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.task import Task

PyTree = Any


class RowsCheck(Protocol):
    """A function that raises ConfigError if a batch cannot be split into microbatches."""

    def __call__(self, element_spec: PyTree, /, accumulation_steps: int) -> object: ...


def _accept_rows(element_spec: PyTree, /, accumulation_steps: int) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class GradientFunctions:
    """The functions that compute a step's gradients and metrics; by default, XLA partitions them.

    An instance is also a GradientStrategy that uses these functions for any task and mesh.

    Attributes:
      value_and_grad: See `accumulation.value_and_grad`.
      evaluate: A pure eval step; see `steps.eval_step`.
      check_rows: Takes the shapes of a batch and the number of accumulation steps, and raises
        ConfigError if the rows cannot be split into that many microbatches.
      num_parts: Number of devices with separate rows and keys, or None if the batch is not split
        explicitly.
      num_microbatches: Takes a batch and the number of accumulation steps, and returns the number
        N of microbatches processed one after another, where row r is in microbatch r % N. If None,
        N is the number of accumulation steps.
      sums_in_a_loop: Whether gradients are summed in a loop even without accumulation.
    """

    value_and_grad: accumulation.ValueAndGrad = accumulation.value_and_grad
    evaluate: Callable[..., Any] = steps.eval_step
    check_rows: RowsCheck = _accept_rows
    num_parts: int | None = None
    num_microbatches: Callable[[PyTree, int], int] | None = None
    sums_in_a_loop: bool = False

    def on(
        self, task: Task, mesh: Mesh, layout: StateLayout, groups: WeightGroups
    ) -> "GradientFunctions":
        """Returns this object."""
        return self


class GradientStrategy(Protocol):
    """Creates `GradientFunctions` for a task on a mesh."""

    def on(
        self, task: Task, mesh: Mesh, layout: StateLayout, groups: WeightGroups
    ) -> GradientFunctions:
        """Returns the functions for a task on a mesh.

        Args:
          task: The task.
          mesh: The mesh, with Auto axes.
          layout: Layout of the weights, `{"params": ..., "non_trainable": ...}`.
          groups: The learner's groups of trained weights.

        Raises:
          ConfigError: The strategy does not support the mesh or the sharding of a weight.
        """
