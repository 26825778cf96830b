"""A step's loss and gradients on a few rows, measured so that meshes can be compared."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.jaxprs import opened, with_inner
from praxis_lite.core.learner.bound_learner import BoundLearner
from praxis_lite.core.partitioner import steps
from praxis_lite.core.partitioner.narrow_scans import narrow_scans
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.devices.xla_errors import without_xla_errors
from praxis_lite.core.sharding.inputs import GlobalBatch
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.tools.testing.in_flight import bits
from praxis_lite.tools.testing.in_flight.recomputed_update import nudged

PyTree = Any
NUM_PROJECTIONS = 4


@dataclasses.dataclass
class _Measuring(BoundLearner):
    """A learner that measures gradients, and changes no weight."""

    salt: Any = dataclasses.field(kw_only=True)

    def update(self, grads: PyTree, opt_states: Any, params: PyTree, loss: jax.Array) -> tuple:
        measured, digests = {}, {}
        for number, (path, g) in enumerate(leaves_with_path(self.groups.lay_out(grads))):
            index = bits.indices(g.shape, g.shape)
            signs = bits.signs(index, bits.salted(self.salt, number), NUM_PROJECTIONS)
            # Along the last dim first: the sum of all elements one after the other rounds more.
            norm = jnp.sqrt(_summed(g * g))
            projections = [_summed(g * signs[k]) for k in range(NUM_PROJECTIONS)]
            measured[path] = jnp.stack([norm, *projections])
            digests[path] = bits.digest(g, index)
        return params, opt_states, {"measured": measured, "digests": digests}, jnp.zeros((), bool)


def _summed(x: jax.Array) -> jax.Array:
    if x.ndim > 1:
        x = jax.lax.optimization_barrier(jnp.sum(x, axis=-1))
    return jnp.sum(x)


class MeasuredStep:
    """The gradients of a task on a mesh, measured: a program that is compiled once.

    Args:
      partitioner: of the task on the mesh.

    Attributes:
      mesh: its mesh.
    """

    def __init__(self, partitioner: Partitioner):
        self.partitioner, self.mesh = partitioner, partitioner.mesh
        mdl_layout = partitioner.layout.select("mdl_vars")
        self._mdl_layout = mdl_layout
        whole = partitioner.replicated
        self._jitted = jax.jit(
            without_xla_errors(self.function, also=narrow_scans),
            in_shardings=(mdl_layout.shardings(self.mesh), whole, None, whole, whole, whole),
            out_shardings=whole, compiler_options=partitioner.compiler_options,
        )

    def function(
        self, mdl_vars: PyTree, scalars: Mapping[str, Any], batch: GlobalBatch, key: jax.Array,
        salt: jax.Array, nudge: jax.Array,
    ) -> dict[str, Any]:
        """Returns the loss [2] (value, weight), and by path measures and digests of gradients.

        Args:
          mdl_vars: padded.
          scalars: as `scalars_of` returns them.
          batch: a few rows.
          key: of the run.
          salt: uint32 [2], by which projections, and the signs of nudges, are drawn.
          nudge: each weight is moved by this share of it, up or down; 0.0: none is moved.
        """
        partitioner, bound = self.partitioner, self.partitioner.learner
        with partitioner.where.tracing():
            mdl_vars = self._mdl_layout.unpad(mdl_vars)
            params = nudged(mdl_vars["params"], nudge, salt[1])
            state = TrainState(
                scalars["step"], {**mdl_vars, "params": params}, dict(scalars["opt_states"])
            )
            _, outputs = steps.train_step(
                partitioner.task, state, partitioner.where.inputs(batch), key,
                learner=_Measuring(bound.learner, bound.groups, salt=salt[0]),
                value_and_grad=partitioner.gradients.value_and_grad,
            )
        loss = jnp.stack([jnp.asarray(x, jnp.float32) for x in outputs["metrics"]["loss"]])
        return {"loss": loss, **outputs["learner"]}

    def trace(self, *given: Any) -> jax.stages.Traced:
        """Returns the program traced for arguments of these shapes."""
        return self._jitted.trace(*given)

    def abstract(self, scalars: Mapping[str, Any], batch: GlobalBatch) -> tuple:
        """Returns the shapes of a call's arguments.

        Args:
          scalars: arrays, or their shapes.
          batch: the shapes of a few rows.
        """
        whole = self.partitioner.replicated
        at = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)  # noqa: E731
        key = at(jax.eval_shape(lambda: jax.random.key(0)))
        number = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole)
        nudge = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        mdl_vars = self._mdl_layout.abstract(self.mesh)
        return mdl_vars, jax.tree.map(at, dict(scalars)), batch, key, number, nudge


def scalars_of(state: TrainState) -> dict[str, Any]:
    """Returns the numbers of a state, besides the weights, that a step's gradients depend on."""
    opt_states = {k: x for k, x in state.opt_states.items() if k == "loss_scale"}
    return {"step": state.step, "opt_states": opt_states}


def rounding_of(jaxpr: Any, platform: str) -> float:
    """Returns the unit of rounding of the narrowest float that a program computes products in."""
    narrowest = float(jnp.finfo(jnp.float32).eps)
    for eqn in with_inner(opened(jaxpr).eqns):
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            continue
        for x in eqn.invars:
            if jnp.issubdtype(x.aval.dtype, jnp.floating):
                narrowest = max(narrowest, float(jnp.finfo(x.aval.dtype).eps))
    # A TPU multiplies float32 as bfloat16, unless it is asked for more.
    return max(narrowest, float(jnp.finfo(jnp.bfloat16).eps)) if platform == "tpu" else narrowest
