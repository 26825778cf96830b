"""Custom kernels in programs: mapping over devices, and annotations of their cost.

XLA can neither partition a kernel nor count its operations.
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
SHARE_OF_BLOCKS = "share_of_blocks"  # An attribute of kernels in a program's text.


def share_of_blocks(share: float) -> contextlib.AbstractContextManager:
    """Returns a context that annotates kernels with the share of blocks that they compute.

    `--mode=plan` reads it, because the text of a program does not show what Pallas kernels compute.
    """
    return set_xla_metadata(**{SHARE_OF_BLOCKS: f"{share:.6f}"})


def without_vma(
    attend: Callable[..., PyTree], specs: tuple[PartitionSpec, ...],
    of_rest: tuple[PartitionSpec, ...], outs: PyTree, axes: set[str],
) -> Callable[..., PyTree]:
    """Returns `attend` mapped over `axes` with check_vma=False.

    Pallas does not provide the axes over which results vary. Inside a `shard_map` that checks, JAX
    refuses the types of a gradient through the unchecked one. There, and in `before_vmap`, the
    gradient is a separate mapped program, which recomputes the forward pass.

    Args:
      attend: called with arrays with gradients, and others.
      specs: of the arrays with gradients.
      of_rest: of the other arrays.
      outs: of the results, which all split over the same axes.
      axes: mesh axes.
    """
    split_over = {axis for entry in jax.tree.leaves(outs)[0] for axis in axes_of(entry)}

    def mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        def untyped(*args: Any) -> Any:
            # Arguments have types of the outer program; values computed from them have none.
            return function(*jax.tree.map(lambda x: jnp.expand_dims(x, 0).squeeze(0), args))

        on_devices = jax.shard_map(
            untyped, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
        )
        return lambda *args: on_devices(*_typed(args, in_specs))

    def attended(*args: jax.Array) -> PyTree:
        return mapped(attend, (*specs, *of_rest), outs)(*args)

    @jax.custom_vjp
    def attended_inside(*args: jax.Array) -> PyTree:
        return varying_over(attended(*args), varying_axes(args))

    def summed(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        whole = split_over - {axis for entry in spec for axis in axes_of(entry)}
        return jax.lax.psum(grad, tuple(sorted(whole))) if whole else grad

    def backward(args: tuple[jax.Array, ...], grad: PyTree) -> tuple:
        num = len(specs)

        def grads(grad: PyTree, *args: jax.Array) -> tuple[jax.Array, ...]:
            _, pulled_back = jax.vjp(lambda *inputs: attend(*inputs, *args[num:]), *args[:num])
            return tuple(map(summed, pulled_back(grad), specs))

        result = mapped(grads, (outs, *specs, *of_rest), specs)(grad, *args)
        return (*varying_over(result, varying_axes((args, grad))), *[None] * len(of_rest))

    attended_inside.defvjp(lambda *args: (attended_inside(*args), args), backward)
    is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes) or is_before_vmap()
    # A replicated weight has a different gradient on each device: the cast sums them.
    return (lambda *args: attended_inside(*varying_alike(args))) if is_inside else attended


def _typed(trees: PyTree, specs: PyTree) -> PyTree:
    """Reshards arrays to specs, as `jax.shard_map` requires over Explicit axes."""
    explicit = explicit_axes_of(jax.sharding.get_abstract_mesh())
    if not explicit:
        return trees
    return jax.tree.map(
        lambda spec, x: jax.sharding.reshard(x, only_axes(spec, explicit)), specs, trees,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
