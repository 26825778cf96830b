"""Modes of the command line, one per file, and the parser of their options.

A mode passes its options to functions of other packages and computes nothing itself.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
