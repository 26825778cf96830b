"""The modes of the command line, a file for each, and the parser of its options.

Modes turn options into arguments of other packages and compute nothing themselves.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
