"""Checks the names, dtypes and values of a state before it is saved."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError, first_few
from praxis_lite.core.partitioner.train_state import StateLayout, TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.memory_spaces import to_device


def check_names(layout: StateLayout) -> None:
    """Checks that every leaf has a valid and unique name in a checkpoint, and a storable dtype.

    Orbax joins names with ".", and the manifest joins them with "/". If two leaves have the same
    name, Orbax overwrites one of them without an error.

    Raises:
      ConfigError: Two leaves have the same name, a name is a prefix of another name or contains an
        empty part between "." or "/", or TensorStore cannot store a dtype.
    """
    stored = []
    for path, _ in jax.tree.leaves_with_path(layout.shapes):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        parts = tuple(part for name in names for part in re.split("[./]", name))
        shown = jax.tree_util.keystr(path).removeprefix(".")
        if not all(parts):
            raise ConfigError(
                f"{shown} cannot be saved, because one of its names is empty, starts or ends with "
                "'.' or '/', or contains two of them in a row. Rename it."
            )
        stored.append((parts, shown))
    # In sorted order, a name directly follows an equal name or its prefix.
    for (outer, first), (inner, second) in itertools.pairwise(sorted(stored)):
        if inner[: len(outer)] == outer:
            raise ConfigError(
                f"{first} and {second} would have the same name in a checkpoint, where '.' and '/' "
                "both separate names. Rename one of them."
            )
    for leaf in layout.leaves():
        try:
            ts.dtype(str(leaf.dtype))
        except ValueError:
            raise ConfigError(
                f"{leaf.path} has the dtype {leaf.dtype}, which TensorStore cannot store. Change "
                "its dtype."
            ) from None


def check_finite(step: int, state: TrainState, newest: str) -> None:
    """Checks that all numbers in a state are finite.

    Args:
      step: The step of the state.
      state: The state.
      newest: Information about the newest checkpoint, for the error message.

    Raises:
      ConfigError: Numbers are not finite. The message contains the paths of their leaves.
    """
    if paths := non_finite_leaves(state):
        raise ConfigError(
            f"Step {step} is not saved: not all numbers are finite in {first_few(paths)}. {newest} "
            "Look at grad_norm in metrics.jsonl, or run with --set run.debug_nans=true. To save "
            "such states anyway, set run.checkpoints.save_non_finite=true."
        )


def non_finite_leaves(state: TrainState) -> list[str]:
    """Returns the paths of leaves with values that must not be saved, in the state's order.

    Weights, other variables and averaged weights must be finite. Optimizer slots must not be NaN,
    but may be infinite, because a slot that tracks a minimum may be initialized to infinity.
    """
    tree = {"mdl_vars": state.mdl_vars, "opt_states": state.opt_states}
    paths, leaves, is_weight = [], [], []
    for path, leaf in leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            paths.append(path)
            leaves.append(leaf)
            is_weight.append(path.startswith(("mdl_vars/", "opt_states/ema/")))
    if not leaves:
        return []
    are_bad = jax.device_get(_checker(leaves[0].sharding)(leaves, tuple(is_weight)))
    return [path for path, is_bad in zip(paths, are_bad, strict=True) if is_bad]


@functools.cache
def _checker(sharding: jax.sharding.Sharding) -> Any:
    # Replicate the result, so that every process can read it.
    out = None
    if isinstance(sharding, NamedSharding):
        out = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(_are_bad, static_argnums=1, out_shardings=out)


def _are_bad(leaves: Sequence[jax.Array], is_weight: Sequence[bool]) -> jax.Array:
    return jnp.stack(
        [
            (~jnp.isfinite(x)).any() if weight else jnp.isnan(x).any()
            for x, weight in zip(to_device(leaves), is_weight, strict=True)
        ]
    )
