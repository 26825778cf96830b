"""Workarounds for XLA bugs, applied to traced or lowered functions before compilation.

This package does not depend on tasks, layers or jobs.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
