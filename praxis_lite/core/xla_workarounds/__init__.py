"""Workarounds for XLA bugs, applied to traced or lowered programs before they are compiled.

This package knows nothing about tasks, layers or jobs.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
