"""A step made again on a few of its rows: on a mesh, with the job's own weights; compared."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.inputs import GlobalBatch, abstract_global_batch, replicated_key
from praxis_lite.lowered.mended_products import mended
from praxis_lite.tools.testing import tolerances
from praxis_lite.tools.testing.certificate import Comparison, mesh_name
from praxis_lite.tools.testing.in_flight.measured import MeasuredStep, rounding_of, scalars_of
from praxis_lite.tools.testing.in_flight.placements import mover_of_batches, mover_of_weights
from praxis_lite.tools.testing.runs.on_mesh import Leaves

PyTree = Any
MOVED = "devices moved"


@dataclasses.dataclass(frozen=True)
class Rows:
    """A few rows of a step that was made, and all else that their gradients depend on.

    Attributes:
      state: from which the gradients are taken; it is read alone.
      batch: the rows, on the job's mesh.
      key: of the run.
      salt: by which the projections are drawn.
    """

    state: TrainState
    batch: GlobalBatch
    key: jax.Array
    salt: int


@dataclasses.dataclass(frozen=True)
class Measures:
    """The measures of a step's gradients.

    Attributes:
      leaves: "metrics/loss/value", "metrics/loss/weight", and of each "gradients/PATH" its norm and
        projections.
      digests: of each gradient's bits.
    """

    leaves: Leaves
    digests: Leaves


class Placement:
    """A task on a mesh, ready to make a step again with weights of the job's own mesh.

    Args:
      own: the task on the job's mesh, whose weights come.
      partitioner: the task on a mesh of the same devices; `own` itself for the job's.

    Attributes:
      name: of the mesh, in words.
      is_own: True for the job's mesh.
      rounding: the unit of rounding of what the program computes in; known once it is lowered.
    """

    def __init__(self, own: Partitioner, partitioner: Partitioner):
        self.partitioner, self.mesh = partitioner, partitioner.mesh
        self.name = mesh_name(self.mesh.shape)
        self._step = MeasuredStep(partitioner)
        self.is_own, self._own_mesh = partitioner is own, own.mesh
        self._move_weights = None if self.is_own else mover_of_weights(own, partitioner)
        self._move_batch: Any = None
        self._run: Any = None
        self.rounding = 0.0

    def lower(self, element_spec: PyTree, scalars: Mapping[str, Any]) -> None:
        """Traces the program for rows of these shapes; raises the model's refusals."""
        batch = abstract_global_batch(element_spec, self.mesh)
        traced = self._step.trace(*self._step.abstract(scalars, batch))
        platform = self.mesh.devices.flat[0].platform
        self.rounding = rounding_of(traced.jaxpr, platform)
        self._run = mended(traced.lower(), self.mesh)
        if not self.is_own:
            self._move_batch = mover_of_batches(batch, self._own_mesh, self.mesh)

    def compile(self) -> jax.stages.Compiled:
        """Returns the program, compiled; it may be called in another thread."""
        if isinstance(self._run, jax.stages.Lowered):
            self._run = self._run.compile()
            if not self.is_own:
                self._move_weights.compile()
                self._move_batch.compile()
        return self._run

    @property
    def function(self) -> Callable[..., Any]:
        """The program before it is compiled, of arguments as of `given`."""
        return self._step.function

    def given(self, rows: Rows, nudge: float = 0.0, pattern: int = 0) -> tuple:
        """Returns the arguments of the program: the rows and the weights, on this mesh."""
        mdl_vars, batch = rows.state.mdl_vars, rows.batch
        if not self.is_own:
            mdl_vars, batch = self._move_weights(mdl_vars), self._move_batch(batch)
        # Devices of other processes take arrays of NumPy alone.
        salts = np.array((rows.salt, (rows.salt + 1 + pattern) % 2**32), np.uint32)
        numbers = scalars_of(rows.state), salts, np.float32(nudge)
        numbers = jax.tree.map(np.asarray, numbers)
        scalars, salts, nudge = jax.device_put(numbers, self.partitioner.replicated)
        return mdl_vars, scalars, batch, replicated_key(rows.key, self.mesh), salts, nudge

    def measure(self, rows: Rows, nudge: float = 0.0, pattern: int = 0) -> Measures:
        """Returns the measures of the rows' gradients on this mesh; waits for the devices.

        Args:
          nudge: the share of itself by which each weight is moved, up or down.
          pattern: by which it is drawn what moves up.
        """
        result = jax.device_get(self.compile()(*self.given(rows, nudge, pattern)))
        value, weight = result["loss"]
        leaves = {"metrics/loss/value": value, "metrics/loss/weight": weight}
        leaves |= {f"gradients/{path}": x for path, x in result["measured"].items()}
        return Measures(leaves, {f"gradients/{path}": x for path, x in result["digests"].items()})


def compare_moved(expected: Measures, actual: Measures) -> list[Comparison]:
    """Returns comparisons of the same program on the same devices in another order, bit by bit."""
    compared = tolerances.exact(MOVED, "gradients", expected.leaves, actual.leaves)
    result = []
    for item in compared:
        apart = item.difference
        if item.leaf in expected.digests and not apart:
            is_same = np.array_equal(expected.digests[item.leaf], actual.digests[item.leaf])
            # Bits differ whose sums, as floats, do not.
            unit = float(np.spacing(np.max(np.abs(expected.leaves[item.leaf]))))
            apart = 0.0 if is_same else unit
        what = tolerances.kind_of(item.leaf)
        result.append(dataclasses.replace(item, what=what, difference=apart))
    return result


def compare_meshes(
    mesh: str, expected: Measures, nudged: Sequence[Measures], actual: Measures
) -> list[Comparison]:
    """Returns comparisons of two programs, which round differently."""
    moved = [item.leaves for item in nudged]
    return tolerances.by_rounding(mesh, expected.leaves, moved, actual.leaves)
