"""What a checkpoint says of each of its arrays, and whether that is what is wanted.

Orbax knows only the padded shapes of the mesh that saved.
"""

from collections.abc import Mapping
from typing import Any

from praxis_lite.train_state import LeafLayout, StateLayout

Leaves = Mapping[str, Mapping[str, Any]]


def manifest_leaves(layout: StateLayout) -> dict[str, dict[str, Any]]:
    """Returns by path what a manifest has of each array: JSON's types only. `step` is apart."""
    return {leaf.path: manifest_leaf(leaf) for leaf in layout.leaves() if leaf.path != "step"}


def manifest_leaf(leaf: LeafLayout) -> dict[str, Any]:
    """Returns what a manifest has of one array."""
    return {
        "shape": list(leaf.shape),
        "padded_shape": list(leaf.padded_shape),
        "dtype": str(leaf.dtype),
        "spec": [list(e) if isinstance(e, tuple) else e for e in leaf.spec],
    }


def differences(saved: Leaves, wanted: Leaves) -> list[str]:
    """Returns a line for each leaf that only one side has, or of another true shape or dtype."""
    found = []
    # Sorted, the weights (mdl_vars) stand before their slots (opt_states).
    for path in sorted(saved.keys() | wanted.keys()):
        if path not in wanted:
            found.append(f"{path} is only in the checkpoint")
        elif path not in saved:
            found.append(f"{path} is only in the model")
        else:
            for what in ("shape", "dtype"):
                old, new = saved[path][what], wanted[path][what]
                if old != new:
                    found.append(f"{path} has {what} {old} in the checkpoint, {new} in the model")
    return found
