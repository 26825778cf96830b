"""Checks of a state before it is saved: its names, and that its numbers are finite."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError, few
from praxis_lite.core.partitioner.train_state import StateLayout, TrainState
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.memory_spaces import to_device


def check_names(layout: StateLayout) -> None:
    """Checks that no two leaves have the same name in a checkpoint.

    Orbax joins names by "." and silently writes two leaves of one name over each other; we join
    them by "/".

    Raises:
      ConfigError: two leaves would share a name, or one would lie inside another; a name is empty,
        or has nothing between two "." or "/"; or a dtype cannot be stored.
    """
    stored = []
    for path, _ in jax.tree.leaves_with_path(layout.shapes):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        parts = tuple(part for name in names for part in re.split("[./]", name))
        shown = jax.tree_util.keystr(path).removeprefix(".")
        if not all(parts):
            raise ConfigError(
                f"{shown} cannot be saved: a name in it is empty, or begins or ends with '.' or "
                "'/', or has two of them in a row. Rename it."
            )
        stored.append((parts, shown))
    # In sorted order, a name that equals another or is inside it comes directly after it.
    for (outer, first), (inner, second) in itertools.pairwise(sorted(stored)):
        if inner[: len(outer)] == outer:
            raise ConfigError(
                f"{first} and {second} would have one name in a checkpoint, where '.' and '/' "
                "separate names. Rename one of them."
            )
    for leaf in layout.leaves():
        try:
            ts.dtype(str(leaf.dtype))
        except ValueError:
            raise ConfigError(
                f"{leaf.path} has the dtype {leaf.dtype}, which TensorStore cannot store. Change "
                "its dtype."
            ) from None


def check_finite(step: int, state: TrainState, newest_in_words: str) -> None:
    """Checks that a state may be saved.

    Raises:
      ConfigError: `non_finite_leaves` finds some; names them, the step and the newest checkpoint.
    """
    if paths := non_finite_leaves(state):
        raise ConfigError(
            f"Step {step} is not saved: not all numbers are finite in {few(paths)}. "
            f"{newest_in_words} Look at grad_norm in metrics.jsonl, run with --set "
            "run.debug_nans=true; to save such a state all the same, "
            "run.checkpoints.save_non_finite=true."
        )


def non_finite_leaves(state: TrainState) -> list[str]:
    """Returns the paths of leaves that must not be saved, in the state's order.

    Weights, other variables and averages of weights must be finite. Slots may be infinite, as what
    an optimizer compares with may begin, but not NaN. Padding is zero, and so finite.
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
    bad = jax.device_get(_checker(leaves[0].sharding)(leaves, tuple(is_weight)))
    return [path for path, item in zip(paths, bad, strict=True) if item]


@functools.cache
def _checker(sharding: jax.sharding.Sharding) -> Any:
    # Replicated, so that each of several processes can read it.
    is_named = isinstance(sharding, NamedSharding)
    out = NamedSharding(sharding.mesh, PartitionSpec()) if is_named else None
    return jax.jit(_are_bad, static_argnums=1, out_shardings=out)


def _are_bad(leaves: Sequence[jax.Array], is_weight: Sequence[bool]) -> jax.Array:
    return jnp.stack([
        (~jnp.isfinite(x)).any() if weight else jnp.isnan(x).any()
        for x, weight in zip(to_device(leaves), is_weight, strict=True)
    ])
