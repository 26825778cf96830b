"""How a step that is skipped leaves everything as it was."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.sharding.mesh import compiled_platform

PyTree = Any


def kept_if(is_kept: jax.Array, made: Callable[..., PyTree], *old: PyTree) -> PyTree:
    """Returns `made(*old)`, or `old` unless `is_kept`.

    On a CPU by a condition: a choice for each element has XLA:CPU write both out. Elsewhere by the
    choice, which fuses with the update; a condition keeps its arguments apart from what made them,
    padding from what is padded.
    """

    if compiled_platform() == "cpu":
        return jax.lax.cond(is_kept, made, lambda *old: old, *old)
    return jax.tree.map(lambda new, old: jnp.where(is_kept, new, old), made(*old), old)
