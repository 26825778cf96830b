"""HOW devices meet where it is said by hand: gradients and metrics in a `jax.shard_map`.

Knows the core alone, and no layer.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
