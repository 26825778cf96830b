"""Wrappers around private JAX APIs (jax._src) that have no public counterpart in jax 0.10 to 0.12.

Other files use only these wrappers; tests/core/sharding/test_jax_canaries.py detects changes.
"""

import sys
import types
from collections.abc import Sequence
from typing import Any

__all__ = ("compilation_cache_modules",)


def distributed_state() -> Any:
    """Returns the global state of `jax.distributed`, or None before jax is imported."""
    return getattr(sys.modules.get("jax._src.distributed"), "global_state", None)


def detected_processes(
    method: str | None, seconds: int
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Returns (coordinator, num_processes, process_id, local device ids) as detected by JAX."""
    from jax._src import clusters

    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, method, seconds
    )


def compilation_cache_modules() -> tuple[types.ModuleType, types.ModuleType, types.ModuleType]:
    """Returns JAX's modules compilation_cache, cache_key and compiler."""
    from jax._src import cache_key, compilation_cache, compiler

    return compilation_cache, cache_key, compiler
