"""Adapters that turn Flax Linen modules and plain functions into a `Model`.

The adapter for NNX modules is `praxis_lite.core.NnxModel`.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
