"""Private names of JAX (jax._src), of which there is no public form from jax 0.10 to 0.12.

No other file uses them; tests/core/sharding/test_jax_canaries.py fails when they have moved.
"""

import sys
import types
from typing import Any

__all__ = ("compilation_cache_modules",)


def distributed_state() -> Any:
    """Returns JAX's own record of the connection of processes; None before jax is imported."""
    return getattr(sys.modules.get("jax._src.distributed"), "global_state", None)


def detected_processes(method: str | None, seconds: int) -> tuple[str, int, int, list[int] | None]:
    """Returns the coordinator, number of processes, own index and devices that JAX detects."""
    from jax._src import clusters

    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, method, seconds
    )


def compilation_cache_modules() -> tuple[types.ModuleType, types.ModuleType, types.ModuleType]:
    """Returns the modules of JAX's cache: its files, the keys of programs, and who writes."""
    from jax._src import cache_key, compilation_cache, compiler

    return compilation_cache, cache_key, compiler
