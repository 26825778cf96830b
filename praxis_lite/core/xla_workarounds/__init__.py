"""Workarounds for XLA bugs in lowered programs, before they are compiled.

Knows no tasks, layers or jobs.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
