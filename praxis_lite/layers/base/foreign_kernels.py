"""Runs custom kernels on each device, and annotates their cost.

XLA can neither partition a custom kernel nor count its operations.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec

from praxis_lite.core.collectives.varying import varying_alike, varying_axes, varying_over
from praxis_lite.core.collectives.vmapped_axes import is_before_vmap
from praxis_lite.core.sharding.devices.axis_types import explicit_axes_of, only_axes
from praxis_lite.core.sharding.logical_axes import axes_of

__all__ = ("SHARE_OF_BLOCKS",)

PyTree = Any
SHARE_OF_BLOCKS = "share_of_blocks"  # Attribute of kernels in the HLO text.


def share_of_blocks(share: float) -> contextlib.AbstractContextManager:
    """Annotates kernels inside the `with` block with the fraction of blocks that they compute.

    `praxis plan` reads this attribute, because HLO text does not show the cost of Pallas kernels.
    """
    return set_xla_metadata(**{SHARE_OF_BLOCKS: f"{share:.6f}"})


def without_vma(
    function: Callable[..., PyTree],
    specs: tuple[PartitionSpec, ...],
    other_specs: tuple[PartitionSpec, ...],
    outs: PyTree,
    axes: set[str],
) -> Callable[..., PyTree]:
    """Maps `function` over `axes` with a `jax.shard_map` that has check_vma=False.

    Pallas does not declare the axes over which results vary. Inside a `shard_map` that checks these
    axes, JAX rejects the types of gradients through the unchecked `shard_map`. In this case, and in
    `before_vmap`, a second `shard_map` computes the gradient, and recomputes the forward pass.

    Args:
      function: A function of arrays with gradients, followed by arrays without gradients.
      specs: Specs of the arrays with gradients.
      other_specs: Specs of the arrays without gradients.
      outs: Specs of the results, which must all be sharded over the same axes.
      axes: Manual mesh axes.
    """
    split_over = {axis for entry in jax.tree.leaves(outs)[0] for axis in axes_of(entry)}

    def mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        def untyped(*args: Any) -> Any:
            # Replace the arguments with computed values, whose types lack the outer mesh's axes.
            return function(*jax.tree.map(lambda x: jnp.expand_dims(x, 0).squeeze(0), args))

        on_devices = jax.shard_map(
            untyped, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
        )
        return lambda *args: on_devices(*_typed(args, in_specs))

    def compute(*args: jax.Array) -> PyTree:
        return mapped(function, (*specs, *other_specs), outs)(*args)

    @jax.custom_vjp
    def compute_inside(*args: jax.Array) -> PyTree:
        return varying_over(compute(*args), varying_axes(args))

    def sum_over_replicas(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        replicated = split_over - {axis for entry in spec for axis in axes_of(entry)}
        return jax.lax.psum(grad, tuple(sorted(replicated))) if replicated else grad

    def backward(args: tuple[jax.Array, ...], grad: PyTree) -> tuple:
        num = len(specs)

        def grads(grad: PyTree, *args: jax.Array) -> tuple[jax.Array, ...]:
            # This recomputes the forward pass, on each device.
            _, vjp = jax.vjp(lambda *inputs: function(*inputs, *args[num:]), *args[:num])
            return tuple(map(sum_over_replicas, vjp(grad), specs))

        result = mapped(grads, (outs, *specs, *other_specs), specs)(grad, *args)
        return (*varying_over(result, varying_axes((args, grad))), *[None] * len(other_specs))

    compute_inside.defvjp(lambda *args: (compute_inside(*args), args), backward)
    is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes) or is_before_vmap()
    # The gradient of a replicated weight differs between devices. In the backward pass, the cast to
    # varying sums these gradients.
    return (lambda *args: compute_inside(*varying_alike(args))) if is_inside else compute


def _typed(trees: PyTree, specs: PyTree) -> PyTree:
    """Reshards arrays to their specs, as `jax.shard_map` requires over Explicit axes."""
    explicit = explicit_axes_of(jax.sharding.get_abstract_mesh())
    if not explicit:
        return trees
    return jax.tree.map(
        lambda spec, x: jax.sharding.reshard(x, only_axes(spec, explicit)),
        specs,
        trees,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
