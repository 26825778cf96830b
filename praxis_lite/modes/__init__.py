"""Command-line modes, one per file, and the parser for their options.

Modes only pass their options to functions in other packages.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
