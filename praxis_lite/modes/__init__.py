"""What does a command line do with an experiment or a job? A mode per file, and the options.

Turns options into arguments, and never computes.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
