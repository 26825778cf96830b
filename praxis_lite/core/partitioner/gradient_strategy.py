"""How a batch's gradients and metrics are made on a mesh: by the compiler, or by a strategy."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jax.sharding import Mesh

from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.partitioner import accumulation, steps
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.task import Task

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The functions that make a step's gradients and metrics; by default XLA splits them.

    It is a strategy, too: the same functions for any task and mesh.

    Attributes:
      value_and_grad: as that of `accumulation`.
      evaluate: a pure eval step, as `steps.eval_step`.
      check_rows: called with the shapes of a batch and the number of micro-batches; raises
        ConfigError if the rows cannot be divided.
      num_parts: the number of devices that have separate rows and keys; None: the batch is one.
      num_micro_batches: called with a batch and its number of micro-batches of accumulation;
        returns into how many N it cuts the batch in all, row r into r % N. None: into those.
      sums_in_a_loop: gradients are summed in a loop, without accumulation too.
    """

    value_and_grad: accumulation.ValueAndGrad = accumulation.value_and_grad
    evaluate: Callable[..., Any] = steps.eval_step
    check_rows: Callable[[PyTree, int], None] = lambda element_spec, num_micro_batches: None
    num_parts: int | None = None
    num_micro_batches: Callable[[PyTree, int], int] | None = None
    sums_in_a_loop: bool = False

    def on(self, task: Task, mesh: Mesh, layout: StateLayout, learner: BoundLearner) -> "Gradients":
        """Returns itself."""
        return self


class GradientStrategy(Protocol):
    """Makes `Gradients` for a task on a mesh; it is made before there is a mesh."""

    def on(self, task: Task, mesh: Mesh, layout: StateLayout, learner: BoundLearner) -> Gradients:
        """Returns the functions of a task on a mesh.

        Args:
          layout: of the weights, `{"params": ..., "non_trainable": ...}`.
          learner: bound to the weights.

        Raises:
          ConfigError: the mesh, or a weight's split, is not one that the strategy can take.
        """
