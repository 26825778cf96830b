"""A function run by each device on its rows (`jax.shard_map`), and what JAX refuses in words."""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax.core import spmd
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.logical_axes import LogicalAxisRules, axes_of

PyTree = Any


def on_each_device(
    function: Callable[..., Any], inputs: PyTree, *others: tuple[PyTree, PyTree], out: Any,
    data_axes: tuple[str, ...], axis_rules: LogicalAxisRules = (),
) -> Any:
    """Returns `function(inputs, *others)`, run by each device on its rows; JAX checks the types.

    Args:
      inputs: arrays whose rows the devices divide; scalars go to each.
      others: (tree, its PartitionSpecs or one for all).
      out: the specs of what is returned.
      data_axes: mesh axes; the others are left to the compiler.
      axis_rules: a job's rules of logical axes, which Linen layers follow.

    Raises:
      ConfigError: the model constrains an array over a data axis, or a loop or a branch in it has a
        value that differs between devices in one place only.
    """
    rows = jax.tree.map(lambda x: PartitionSpec(data_axes) if x.ndim else PartitionSpec(), inputs)
    mapped = jax.shard_map(
        function, in_specs=(rows, *(specs for _, specs in others)), out_specs=out,
        axis_names=set(data_axes),
    )
    # No constraint inside may name a data axis.
    rules = [
        (name, tuple(axis for axis in axes_of(axes) if axis not in data_axes) or None)
        for name, axes in axis_rules
    ]
    with (
        _saying_what_jax_refuses(data_axes),
        spmd.logical_axis_rules(rules) if rules else contextlib.nullcontext(),
    ):
        return mapped(inputs, *(tree for tree, _ in others))


@contextlib.contextmanager
def _saying_what_jax_refuses(data_axes: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        if "manual axis types do not match" in str(error):
            raise ConfigError(_of_loop(error, data_axes)) from error
        if "sharding_constraint" not in str(error) or "Manual" not in str(error):
            raise
        raise ConfigError(
            f"The model constrains an activation over one of data_axes {data_axes}, along which "
            "ExplicitCollectives give each device its own rows and nothing else. Leave the axis "
            "out of jax.lax.with_sharding_constraint (praxis_lite.core.constrain does), or "
            f"leave the Partitioner's gradients out. JAX says: {error}"
        ) from error


def _of_loop(error: Exception, axes: Sequence[str]) -> str:
    """Returns the message of a loop or branch, the user's or a library's, that JAX refused."""
    # The last line of the traceback that is neither JAX's nor Flax's.
    root = os.path.dirname(os.path.dirname(jax.__file__))
    hidden = tuple(os.path.join(root, name, "") for name in ("jax", "flax"))
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if not frame.filename.startswith(hidden)][-1]
    found = [line.strip(" *;") for line in str(error).splitlines() if "manual axis" in line]
    return (
        f"{place.name} ({os.path.basename(place.filename)}:{place.lineno}) has a loop or a branch "
        "with a value that is the same on all devices in one place and differs between devices "
        f"along {axes} in another: {' '.join(found)} The carry of a scan or while_loop must differ "
        "from the start where it does at the end, and the branches of a cond must agree. Begin "
        "with a value made from what the loop reads, such as jnp.zeros_like(x) in place of "
        f"jnp.zeros(shape), or with jax.lax.pcast(value, {axes}, to='varying'); or leave the "
        "Partitioner's gradients out."
    )
