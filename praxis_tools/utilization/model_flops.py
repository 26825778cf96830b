"""Counts the matmul flops of a model on one device, excluding recomputation (for MFU)."""

import dataclasses
import math
from typing import Any

import numpy as np
from jax.extend import core

from praxis_lite.core.jaxprs import RECOMPUTED, expand_high_level, open_jaxpr
from praxis_lite.core.learner.update import SCOPE
from praxis_lite.core.partitioner import accumulation
from praxis_lite.core.partitioner.gradient_strategy import GradientFunctions
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.devices.axis_types import mesh_of
from praxis_tools.explain.hlo_matmuls import window_hits


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """The matmul flops of a traced function, summed over all devices.

    Attributes:
      flops: Twice the number of multiplications in matmuls and convolutions, excluding
        rematerialization and the optimizer.
      at_least: Whether `flops` is a lower bound, because the function contains a loop of unknown
        length (`lax.while_loop`), of which only one iteration is counted.
    """

    flops: int
    at_least: bool


def flops_of_step(partitioner: Partitioner, element_spec: Any) -> ModelFlops:
    """Returns the model flops of a training step, which do not depend on the mesh.

    The step is traced for one device, on which pipelines have no bubbles and experts have no spare
    capacity.

    Args:
      partitioner: Partitioner of the task.
      element_spec: Shapes and dtypes of a training batch.
    """
    mesh = partitioner.mesh
    devices = np.array(mesh.local_devices[:1]).reshape((1,) * len(mesh.axis_names))
    one_device = mesh_of(devices, mesh.axis_names)
    gradients = GradientFunctions(_without_microbatches)
    step = Partitioner(partitioner.task, one_device, gradients=gradients).train_step
    return model_flops(step.trace(element_spec).jaxpr)


def _without_microbatches(*args: Any, accumulation_steps: int, **named: Any) -> Any:
    """Calls `value_and_grad` on the entire batch.

    On one device, batches are not padded, so the number of microbatches may not divide the batch
    size.
    """
    return accumulation.value_and_grad(*args, **named)


def model_flops(jaxpr: Any) -> ModelFlops:
    """Returns the matmul flops of a jaxpr with global shapes.

    The body of a scan is counted once per iteration. For a conditional, only the most expensive
    branch is counted. Pallas and cuDNN kernels are not counted.
    """
    flops, at_least = 0, False
    for eqn in map(expand_high_level, open_jaxpr(jaxpr).eqns):
        scopes = str(eqn.source_info.name_stack)
        if RECOMPUTED in scopes or scopes.split("/")[0] == SCOPE:
            continue
        name, params = eqn.primitive.name, eqn.params
        if name in _MATMULS:
            flops += _MATMULS[name](eqn)
        elif name != "pallas_call":
            inner = [model_flops(jaxpr) for jaxpr in core.jaxprs_in_params(params)]
            combine = max if name == "cond" else sum
            total = combine([0, *(x.flops for x in inner)])
            flops += total * _num_runs(name, params)
            at_least |= any(x.at_least for x in inner) or (name == "while" and total > 0)
    return ModelFlops(flops, at_least)


def _num_runs(name: str, params: dict[str, Any]) -> int:
    """Returns how often an equation runs its inner jaxpr (once per device for a shard_map)."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        sizes = params["mesh"].shape
        return math.prod(sizes[axis] for axis in params["newly_manual_axes"])
    return 1


def _shape(operand: Any) -> tuple[int, ...]:
    """Returns the shape of an equation's operand or result, which must be an array."""
    return operand.aval.shape


def _dot(eqn: core.JaxprEqn) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = _shape(eqn.invars[0])
    return 2 * math.prod(_shape(eqn.outvars[0])) * math.prod(lhs[dim] for dim in contracting)


def _ragged_dot(eqn: core.JaxprEqn) -> int:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    lhs, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    flops = 2 * math.prod(out) * math.prod(lhs[dim] for dim in contracting)
    if set(numbers.lhs_ragged_dimensions) & set(contracting):
        # The output has one matrix per group, which is computed only from the rows of this group.
        return flops // _shape(eqn.invars[2])[-1]
    return flops


def _convolution(eqn: core.JaxprEqn) -> int:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs = map(_shape, eqn.invars)
    out = _shape(eqn.outvars[0])
    batch, features = numbers.out_spec[:2]
    # Flops per window tap and output position. Taps on padding or gaps are not counted.
    flops = 2 * out[batch] * out[features] * rhs[numbers.rhs_spec[1]]
    for dim in range(len(params["window_strides"])):
        sizes = (shape[spec[dim + 2]] for shape, spec in zip((lhs, rhs, out), numbers, strict=True))
        flops *= window_hits(
            *sizes,
            params["window_strides"][dim],
            params["padding"][dim][0],
            params["lhs_dilation"][dim],
            params["rhs_dilation"][dim],
        )
    return flops


_MATMULS = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
