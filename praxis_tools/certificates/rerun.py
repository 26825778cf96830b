"""Re-runs a training step on any mesh with a few rows, and summarizes the gradients."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.errors import OutOfMemory, format_bytes
from praxis_lite.core.jaxprs import all_eqns, array_type, open_jaxpr
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
from praxis_lite.core.xla_workarounds.narrow_scans import narrow_scans
from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.host.host_memory import check_program_fits
from praxis_lite.job import processes
from praxis_tools.certificates import element_hash
from praxis_tools.certificates.placements import MeshTransfer, batch_transfer
from praxis_tools.certificates.recomputed_update import nudge_weights
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison, mesh_name
from praxis_tools.check.runs.on_mesh import Leaves

PyTree = Any
MOVED = "devices moved"
NUM_PROJECTIONS = 4
_ADVICE = "Remove run.certify_every_steps to disable certificates."


@dataclasses.dataclass(frozen=True)
class Rows:
    """A few rows from a step's batch, and all other inputs on which the gradients depend.

    Attributes:
      state: State at which the gradients are computed; it is not modified.
      batch: The rows, on the job's mesh.
      key: The run's random key.
      salt: Seed for the projections.
    """

    state: TrainState
    batch: GlobalBatch
    key: jax.Array
    salt: int


@dataclasses.dataclass(frozen=True)
class Measurements:
    """The loss of a step, and the norm, projections and digest of each gradient.

    Attributes:
      leaves: Maps "metrics/loss/value" and "metrics/loss/weight" to numbers, and each
        "gradients/PATH" to the norm of the gradient and its projections on random signs.
      digests: Maps each "gradients/PATH" to a digest of the gradient's bits.
    """

    leaves: Leaves
    digests: Leaves


@dataclasses.dataclass
class _MeasuringLearner(BoundLearner):
    """A learner that returns a summary of the gradients instead of updating weights."""

    salt: Any = dataclasses.field(kw_only=True)

    def update(self, grads: PyTree, opt_states: Any, params: PyTree, loss: jax.Array) -> tuple:
        measured, digests = {}, {}
        for number, (path, g) in enumerate(leaves_with_path(self.groups.lay_out(grads))):
            index = element_hash.indices(g.shape, g.shape)
            salt = element_hash.leaf_salt(self.salt, number)
            signs = element_hash.signs(index, salt, NUM_PROJECTIONS)
            norm = jnp.sqrt(_sum(g * g))
            projections = [_sum(g * signs[k]) for k in range(NUM_PROJECTIONS)]
            measured[path] = jnp.stack([norm, *projections])
            digests[path] = element_hash.digest(g, index)
        return params, opt_states, {"measured": measured, "digests": digests}, jnp.zeros((), bool)


def _sum(x: jax.Array) -> jax.Array:
    # Summing the last dim first loses less precision than one long sum over all elements.
    if x.ndim > 1:
        x = jax.lax.optimization_barrier(jnp.sum(x, axis=-1))
    return jnp.sum(x)


class Rerun:
    """Re-runs steps of a job on a mesh, with weights transferred from the job's mesh.

    Args:
      job_partitioner: Partitioner on the job's mesh, which stores the weights.
      partitioner: Partitioner on the mesh of the re-run; may be `job_partitioner` itself.

    Attributes:
      name: Name of the mesh, such as "data 4, mdl 2".
      is_job_mesh: Whether the step is re-run on the job's mesh.
      rounding: Machine epsilon of the narrowest float type in the step's matmuls and convolutions.
        Set by `lower`.
    """

    def __init__(self, job_partitioner: Partitioner, partitioner: Partitioner):
        self.partitioner, self.mesh = partitioner, partitioner.mesh
        self.name = mesh_name(self.mesh.shape)
        self.is_job_mesh, self._job_mesh = partitioner is job_partitioner, job_partitioner.mesh
        self._mdl_layout = partitioner.layout.select("mdl_vars")
        self._transfer_weights: MeshTransfer | None = None
        if not self.is_job_mesh:
            self._transfer_weights = MeshTransfer(
                job_partitioner.layout.select("mdl_vars"),
                job_partitioner.mesh,
                self._mdl_layout,
                self.mesh,
            )
        self._transfer_batch: MeshTransfer | None = None
        self._program: Any = None
        self.rounding = 0.0

    def function(
        self,
        mdl_vars: PyTree,
        scalars: Mapping[str, Any],
        batch: GlobalBatch,
        key: jax.Array,
        salts: jax.Array,
        nudge: jax.Array,
    ) -> dict[str, Any]:
        """Computes the loss, and the norms, projections and digests of the gradients.

        Args:
          mdl_vars: Padded model variables.
          scalars: Other values in the state, from `scalars_of`.
          batch: Batch with a few rows.
          key: The run's random key.
          salts: Seeds for the projections and for the signs of the perturbations, uint32 [2].
          nudge: Relative amount by which each weight is perturbed, up or down.

        Returns:
          A dict with "loss" (value and weight, [2]), "measured" (maps the path of each weight to
          the norm and projections of its gradient) and "digests" (maps the path of each weight to
          the digest of its gradient).
        """
        partitioner, bound_learner = self.partitioner, self.partitioner.bound_learner
        with partitioner.task_on_mesh.tracing():
            mdl_vars = self._mdl_layout.unpad(mdl_vars)
            params = nudge_weights(mdl_vars["params"], nudge, salts[1])
            state = TrainState(
                scalars["step"], {**mdl_vars, "params": params}, dict(scalars["opt_states"])
            )
            _, outputs = steps.train_step(
                partitioner.task,
                state,
                partitioner.task_on_mesh.unpadded_inputs(batch),
                key,
                bound_learner=_MeasuringLearner(
                    bound_learner.settings, bound_learner.groups, salt=salts[0]
                ),
                value_and_grad=partitioner.gradient_functions.value_and_grad,
            )
        loss = jnp.stack([jnp.asarray(x, jnp.float32) for x in outputs["metrics"]["loss"]])
        return {"loss": loss, **outputs["learner"]}

    def lower(self, element_spec: PyTree, scalars: Mapping[str, Any]) -> None:
        """Traces and lowers the step. Errors raised by the model are not caught.

        Args:
          element_spec: Shapes and types of the rows.
          scalars: Shapes and types of the values from `scalars_of`.
        """
        replicated = self.partitioner.replicated
        weight_shardings = self._mdl_layout.shardings(self.mesh)
        jitted = jax.jit(
            without_xla_errors(self.function, also=narrow_scans),
            in_shardings=(weight_shardings, replicated, None, *(replicated,) * 3),
            out_shardings=replicated,
            compiler_options=self.partitioner.compiler_options,
        )
        batch = abstract_global_batch(element_spec, self.mesh)
        replicated_args = (
            dict(scalars),
            jax.eval_shape(lambda: jax.random.key(0)),
            jax.ShapeDtypeStruct((2,), jnp.uint32),
            jax.ShapeDtypeStruct((), jnp.float32),
        )
        scalars, *others = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), replicated_args
        )
        traced = jitted.trace(self._mdl_layout.abstract(self.mesh), scalars, batch, *others)
        self.rounding = _product_epsilon(traced.jaxpr, self.mesh.devices.flat[0].platform)
        self._program = patch_matmuls(traced.lower(), self.mesh)
        if not self.is_job_mesh:
            self._transfer_batch = batch_transfer(batch, self._job_mesh, self.mesh)

    def compile(self) -> jax.stages.Compiled:
        """Returns the compiled step, which is compiled on the first call from any thread."""
        if isinstance(self._program, jax.stages.Lowered):
            self._program = self._program.compile()
            for transfer in (self._transfer_weights, self._transfer_batch):
                if transfer is not None:
                    transfer.compile()
        return self._program

    def arguments(self, rows: Rows, nudge: float = 0.0, pattern: int = 0) -> tuple:
        """Returns the arguments for `function`, transferred to this mesh."""
        mdl_vars, batch = rows.state.mdl_vars, rows.batch
        if self._transfer_weights is not None:
            assert self._transfer_batch is not None, "call lower() first"
            mdl_vars, batch = self._transfer_weights(mdl_vars), self._transfer_batch(batch)
        # `jax.device_put` to devices of other processes requires NumPy arrays.
        salts = np.array((rows.salt, (rows.salt + 1 + pattern) % 2**32), np.uint32)
        replicated_args = scalars_of(rows.state), salts, np.float32(nudge)
        replicated_args = jax.tree.map(np.asarray, replicated_args)
        scalars, salts, nudge = jax.device_put(replicated_args, self.partitioner.replicated)
        return mdl_vars, scalars, batch, replicated_key(rows.key, self.mesh), salts, nudge

    def measure(self, rows: Rows, nudge: float = 0.0, pattern: int = 0) -> Measurements:
        """Measures the gradients of rows on this mesh, blocking until the devices are done.

        Args:
          rows: Rows on the job's mesh.
          nudge: Relative amount by which each weight is perturbed, up or down.
          pattern: Seed that determines which elements are perturbed up.
        """
        outputs = jax.device_get(self.compile()(*self.arguments(rows, nudge, pattern)))
        value, weight = outputs["loss"]
        leaves = {"metrics/loss/value": value, "metrics/loss/weight": weight}
        leaves |= {f"gradients/{path}": x for path, x in outputs["measured"].items()}
        return Measurements(
            leaves, {f"gradients/{path}": x for path, x in outputs["digests"].items()}
        )


def scalars_of(state: TrainState) -> dict[str, Any]:
    """Returns the values in a state, other than weights, that gradients depend on."""
    opt_states = {k: x for k, x in state.opt_states.items() if k == "loss_scale"}
    return {"step": state.step, "opt_states": opt_states}


def _product_epsilon(jaxpr: Any, platform: str) -> float:
    """Returns the machine epsilon of the narrowest float type used for products."""
    epsilon = float(jnp.finfo(jnp.float32).eps)
    for eqn in all_eqns(open_jaxpr(jaxpr).eqns):
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            continue
        for x in eqn.invars:
            dtype = array_type(x).dtype
            if jnp.issubdtype(dtype, jnp.floating):
                epsilon = max(epsilon, float(jnp.finfo(dtype).eps))
    # By default, TPUs multiply float32 in bfloat16.
    return max(epsilon, float(jnp.finfo(jnp.bfloat16).eps)) if platform == "tpu" else epsilon


def compare_bits(expected: Measurements, actual: Measurements) -> list[Comparison]:
    """Compares two runs whose results must be bitwise equal."""
    comparisons = []
    for comparison in tolerances.exact(MOVED, "gradients", expected.leaves, actual.leaves):
        leaf, difference = comparison.leaf, comparison.difference
        # Gradients can differ in some bits even if their norms and projections are equal.
        if (
            leaf in expected.digests
            and not difference
            and not np.array_equal(expected.digests[leaf], actual.digests[leaf])
        ):
            difference = float(np.spacing(np.max(np.abs(expected.leaves[leaf]))))
        comparisons.append(
            dataclasses.replace(comparison, kind=tolerances.kind_of(leaf), difference=difference)
        )
    return comparisons


def compare_up_to_rounding(
    mesh: str, expected: Measurements, nudged: Sequence[Measurements], actual: Measurements
) -> list[Comparison]:
    """Compares two runs that round differently.

    Args:
      mesh: Name of the mesh that `actual` was measured on.
      expected: Measurements on the job's mesh.
      nudged: Measurements on the job's mesh with perturbed weights, one for each pattern. They
        determine the tolerance.
      actual: Measurements on the other mesh.
    """
    return tolerances.by_rounding(mesh, expected.leaves, [x.leaves for x in nudged], actual.leaves)


def check_device_memory(
    compiled: jax.stages.Compiled, devices: Sequence[jax.Device], program: str, copies: int = 0
) -> None:
    """Raises OutOfMemory if a compiled function does not fit in memory alongside the train state.

    Call this function between steps, when only the train state is on the devices.

    Args:
      compiled: The compiled function.
      devices: Devices of this process.
      program: Name of the function, used as the subject of the error message.
      copies: Bytes per device of arrays that are copied for the function.
    """
    check_program_fits(compiled, devices, program, _ADVICE)
    stats = compiled.memory_analysis()
    if stats is None:
        return
    needed = stats.temp_size_in_bytes + stats.output_size_in_bytes + copies
    for device in devices:
        memory = device.memory_stats() or {}
        free = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
        if needed > free:
            raise OutOfMemory(
                f"{program} needs {format_bytes(needed)} on each device in addition to the train "
                f"state, but {device} only has {format_bytes(int(free))} free. {_ADVICE}"
            )


def any_process_differs(comparisons: Iterable[Comparison]) -> bool:
    """Returns whether a comparison failed in any process."""
    return any_process(any(not x.is_equal for x in comparisons))


def any_process(condition: bool) -> bool:
    """Returns whether a condition is true in any process.

    All processes must call this function, and it returns the same result in all of them. The
    condition may differ between processes: for instance, a faulty device may return wrong values
    only to its own process.
    """
    return any(processes.exchange("certificate", "yes" if condition else ""))
