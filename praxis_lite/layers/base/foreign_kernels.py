"""Maps custom kernels over devices, and annotates their cost.

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
SHARE_OF_BLOCKS = "share_of_blocks"  # Attribute of kernels in a program's text.


def share_of_blocks(share: float) -> contextlib.AbstractContextManager:
    """Annotates kernels in the body with the fraction of blocks that they compute.

    `--mode=plan` reads the attribute, because the text of a program does not show the work of
    Pallas kernels.
    """
    return set_xla_metadata(**{SHARE_OF_BLOCKS: f"{share:.6f}"})


def without_vma(
    function: Callable[..., PyTree], specs: tuple[PartitionSpec, ...],
    other_specs: tuple[PartitionSpec, ...], outs: PyTree, axes: set[str],
) -> Callable[..., PyTree]:
    """Returns `function` mapped over `axes` by a `jax.shard_map` with check_vma=False.

    Pallas does not provide the axes over which results vary. Inside a `shard_map` that checks them,
    JAX rejects the types of a gradient through the unchecked one. There, and in `before_vmap`, the
    gradient is a separate mapped program, which recomputes the forward pass.

    Args:
      function: Function of arrays with gradients, followed by arrays without.
      specs: Specs of the arrays with gradients.
      other_specs: Specs of the other arrays.
      outs: Specs of the results, which all must be split over the same axes.
      axes: Manual mesh axes.
    """
    split_over = {axis for entry in jax.tree.leaves(outs)[0] for axis in axes_of(entry)}

    def mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        def untyped(*args: Any) -> Any:
            # Replaces the arguments by computed values, whose types have no axes of the outer mesh.
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
            _, vjp = jax.vjp(lambda *inputs: function(*inputs, *args[num:]), *args[:num])
            return tuple(map(sum_over_replicas, vjp(grad), specs))

        result = mapped(grads, (outs, *specs, *other_specs), specs)(grad, *args)
        return (*varying_over(result, varying_axes((args, grad))), *[None] * len(other_specs))

    compute_inside.defvjp(lambda *args: (compute_inside(*args), args), backward)
    is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes) or is_before_vmap()
    # A replicated weight has a different gradient on each device; the cast to varying sums them.
    return (lambda *args: compute_inside(*varying_alike(args))) if is_inside else compute


def _typed(trees: PyTree, specs: PyTree) -> PyTree:
    """Reshards arrays to their specs, as `jax.shard_map` requires over Explicit axes."""
    explicit = explicit_axes_of(jax.sharding.get_abstract_mesh())
    if not explicit:
        return trees
    return jax.tree.map(
        lambda spec, x: jax.sharding.reshard(x, only_axes(spec, explicit)), specs, trees,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
