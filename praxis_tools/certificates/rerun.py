"""A training step re-run on a few of its rows, on any mesh, with its gradients measured."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import OutOfMemory, format_bytes
from praxis_lite.core.jaxprs import all_eqns, open_jaxpr
from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.partitioner import steps
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.batch_sharding import (
    GlobalBatch,
    abstract_global_batch,
    replicated_key,
)
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.xla_workarounds.mended_products import mended
from praxis_lite.core.xla_workarounds.narrow_scans import narrow_scans
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.host.host_memory import check_program_fits
from praxis_tools.certificates import element_hash
from praxis_tools.certificates.placements import mover_of_batches, mover_of_weights
from praxis_tools.certificates.recomputed_update import nudged
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison, mesh_name
from praxis_tools.check.runs.on_mesh import Leaves

PyTree = Any
MOVED = "devices moved"
NUM_PROJECTIONS = 4
_ADVICE = "Without run.certify_every_steps nothing is recomputed."


@dataclasses.dataclass(frozen=True)
class Rows:
    """A few rows of a step that was made, and all else that their gradients depend on.

    Attributes:
      state: from which the gradients are taken; it is read alone.
      batch: the rows, on the job's mesh.
      key: of the run.
      salt: a seed of the projections.
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


@dataclasses.dataclass
class _Measuring(BoundLearner):
    """A learner that measures gradients, and changes no weight."""

    salt: Any = dataclasses.field(kw_only=True)

    def update(self, grads: PyTree, opt_states: Any, params: PyTree, loss: jax.Array) -> tuple:
        measured, digests = {}, {}
        for number, (path, g) in enumerate(leaves_with_path(self.groups.lay_out(grads))):
            index = element_hash.indices(g.shape, g.shape)
            salt = element_hash.salted(self.salt, number)
            signs = element_hash.signs(index, salt, NUM_PROJECTIONS)
            norm = jnp.sqrt(_summed(g * g))
            projections = [_summed(g * signs[k]) for k in range(NUM_PROJECTIONS)]
            measured[path] = jnp.stack([norm, *projections])
            digests[path] = element_hash.digest(g, index)
        return params, opt_states, {"measured": measured, "digests": digests}, jnp.zeros((), bool)


def _summed(x: jax.Array) -> jax.Array:
    # Along the last dim first: the sum of all elements one after the other rounds more.
    if x.ndim > 1:
        x = jax.lax.optimization_barrier(jnp.sum(x, axis=-1))
    return jnp.sum(x)


class Rerun:
    """A task on a mesh, ready to re-run a step with weights of the job's own mesh.

    Args:
      own: the task on the job's mesh, whose weights come.
      partitioner: the task on a mesh of the same devices; `own` itself for the job's.

    Attributes:
      name: of the mesh, such as "data 4, mdl 2".
      is_own: True for the job's mesh.
      rounding: the unit of rounding of what the program computes in; known once it is lowered.
    """

    def __init__(self, own: Partitioner, partitioner: Partitioner):
        self.partitioner, self.mesh = partitioner, partitioner.mesh
        self.name = mesh_name(self.mesh.shape)
        self.is_own, self._own_mesh = partitioner is own, own.mesh
        self._mdl_layout = partitioner.layout.select("mdl_vars")
        self._move_weights = None if self.is_own else mover_of_weights(own, partitioner)
        self._move_batch: Any = None
        self._run: Any = None
        self.rounding = 0.0

    def function(
        self, mdl_vars: PyTree, scalars: Mapping[str, Any], batch: GlobalBatch, key: jax.Array,
        salts: jax.Array, nudge: jax.Array,
    ) -> dict[str, Any]:
        """Returns the loss [2] (value, weight), and by path measures and digests of gradients.

        Args:
          mdl_vars: padded.
          scalars: as `scalars_of` returns them.
          batch: a few rows.
          key: of the run.
          salts: uint32 [2], seeds of the projections and of the signs of nudges.
          nudge: the relative amount by which each weight is moved, up or down.
        """
        partitioner, bound = self.partitioner, self.partitioner.learner
        with partitioner.where.tracing():
            mdl_vars = self._mdl_layout.unpad(mdl_vars)
            params = nudged(mdl_vars["params"], nudge, salts[1])
            state = TrainState(
                scalars["step"], {**mdl_vars, "params": params}, dict(scalars["opt_states"])
            )
            _, outputs = steps.train_step(
                partitioner.task, state, partitioner.where.inputs(batch), key,
                learner=_Measuring(bound.learner, bound.groups, salt=salts[0]),
                value_and_grad=partitioner.gradients.value_and_grad,
            )
        loss = jnp.stack([jnp.asarray(x, jnp.float32) for x in outputs["metrics"]["loss"]])
        return {"loss": loss, **outputs["learner"]}

    def lower(self, element_spec: PyTree, scalars: Mapping[str, Any]) -> None:
        """Traces the program for rows of these shapes; raises the model's refusals."""
        replicated = self.partitioner.replicated
        weights = self._mdl_layout.shardings(self.mesh)
        jitted = jax.jit(
            without_xla_errors(self.function, also=narrow_scans),
            in_shardings=(weights, replicated, None, *(replicated,) * 3),
            out_shardings=replicated, compiler_options=self.partitioner.compiler_options,
        )
        batch = abstract_global_batch(element_spec, self.mesh)
        numbers = (
            dict(scalars), jax.eval_shape(lambda: jax.random.key(0)),
            jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32),
        )
        scalars, *others = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), numbers
        )
        traced = jitted.trace(self._mdl_layout.abstract(self.mesh), scalars, batch, *others)
        self.rounding = _rounding_of(traced.jaxpr, self.mesh.devices.flat[0].platform)
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

    def arguments(self, rows: Rows, nudge: float = 0.0, pattern: int = 0) -> tuple:
        """Returns the arguments of `function`: the rows and the weights, on this mesh."""
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
          nudge: the relative amount by which each weight is moved, up or down.
          pattern: a seed that decides which elements move up.
        """
        result = jax.device_get(self.compile()(*self.arguments(rows, nudge, pattern)))
        value, weight = result["loss"]
        leaves = {"metrics/loss/value": value, "metrics/loss/weight": weight}
        leaves |= {f"gradients/{path}": x for path, x in result["measured"].items()}
        return Measures(leaves, {f"gradients/{path}": x for path, x in result["digests"].items()})


def scalars_of(state: TrainState) -> dict[str, Any]:
    """Returns the values of a state, other than weights, that a step's gradients depend on."""
    opt_states = {k: x for k, x in state.opt_states.items() if k == "loss_scale"}
    return {"step": state.step, "opt_states": opt_states}


def _rounding_of(jaxpr: Any, platform: str) -> float:
    """Returns the unit of rounding of the narrowest float that a program computes products in."""
    narrowest = float(jnp.finfo(jnp.float32).eps)
    for eqn in all_eqns(open_jaxpr(jaxpr).eqns):
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            continue
        for x in eqn.invars:
            if jnp.issubdtype(x.aval.dtype, jnp.floating):
                narrowest = max(narrowest, float(jnp.finfo(x.aval.dtype).eps))
    # A TPU multiplies float32 as bfloat16, unless it is asked for more.
    return max(narrowest, float(jnp.finfo(jnp.bfloat16).eps)) if platform == "tpu" else narrowest


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
    mesh: str, expected: Measures, moved: Sequence[Measures], actual: Measures
) -> list[Comparison]:
    """Returns comparisons of two programs, which round differently.

    Args:
      moved: as `expected`, each time with weights moved by rounding.
    """
    by_nudges = [item.leaves for item in moved]
    return tolerances.by_rounding(mesh, expected.leaves, by_nudges, actual.leaves)


def check_room(
    compiled: jax.stages.Compiled, devices: Sequence[jax.Device], program: str, copies: int = 0
) -> None:
    """Raises OutOfMemory if devices of this process cannot hold a certificate's arrays.

    These are the program's temporaries and outputs, and `copies`, next to the training state. Call
    it between steps, when nothing else is on the devices.

    Args:
      program: as the subject of a sentence.
      copies: bytes on each device of arrays that are made for it.
    """
    check_program_fits(compiled, devices, program, _ADVICE)
    stats = compiled.memory_analysis()
    if stats is None:
        return
    needed = stats.temp_size_in_bytes + stats.output_size_in_bytes + copies
    for device in devices:
        memory = device.memory_stats() or {}
        left = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
        if needed > left:
            raise OutOfMemory(
                f"{program} takes {format_bytes(needed)} on each device beside the state of "
                f"training, and {format_bytes(int(left))} are free on {device}. {_ADVICE}"
            )
