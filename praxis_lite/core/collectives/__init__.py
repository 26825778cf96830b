"""Data parallelism with explicit collectives: computes gradients and metrics in a `jax.shard_map`.

This package depends only on `praxis_lite.core`.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
